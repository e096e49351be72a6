"""Packs a node's record for the first member, and unpacks it there, accepting only known files.

Layout: the length of the index (4 bytes, big-endian), the index as JSON, ``[[name, size, [piece, …]], …]``, then the
64 KiB pieces of each file that are not all zeros, one after another. All of it is compressed with zlib. Rings are
mostly zeros; without those pieces unpacking takes a fifth of the time. Received data is untrusted: names must be those
of files in a run folder, and sizes are limited before and after decompression.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import lt
from typing import TYPE_CHECKING

from ddpdoctor.exchange.conversation import BadMessage, decompress
from ddpdoctor.recorder.storage.files import check_json, open_new, read_plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_PACKED_BYTES = 64 * 2**20
"""Our choice: the meeting's limit for one value. A rank's record packs to about 100 KiB."""
MAX_FILE_BYTES = 64 * 2**20
MAX_PLAIN_BYTES = 512 * 2**20
"""Our choice: 256 ranks on a node, each with a ring of 1 MiB and stacks of the same size."""
MAX_FILES = 8192
LEVEL = 1
"""The fastest zlib level, because somebody waits."""
_LENGTH = struct.Struct("!I")
_PIECE_BYTES = 64 * 1024

_KNOWN = re.compile(
    r"run\.json|agent\.jsonl|machine\.json|reached\.json|lost-\d+(-\d+)?"
    r"|(watch|consistency|moments)(-\d+)?\.json"
    r"|rings/\d+-\d+\.ring"
    r"|evidence/\d+-\d+(-\d+\.json|\.(dump|term|held|flight\d+))"
    r"|nccl/[\w.%-]{1,200}\.log"
)
"""The files of a run folder that a judgment reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A received file."""

    name: str
    size: int
    pieces: dict[int, memoryview]
    """The pieces that are not all zeros, by their index."""


def pack_folder(folder: Path) -> bytes:
    """Pack the files of a run folder that a judgment reads.

    Files that do not fit are left out, the largest first. Raises OSError if the folder is gone.
    """
    files = _fitting([(path, str(path.relative_to(folder))) for path in _files(folder)])
    read = [(name, _read(path)) for path, name in files]
    pieces = [_pieces(content) for _, content in read]
    named = zip(read, pieces, strict=True)
    index = json.dumps([[name, len(content), list(kept)] for (name, content), kept in named]).encode()
    packer = zlib.compressobj(LEVEL)
    parts = [packer.compress(_LENGTH.pack(len(index)) + index)]
    parts += [packer.compress(piece) for kept in pieces for piece in kept.values()]
    return b"".join([*parts, packer.flush()])


def unpack_folder(packed: bytes, folder: Path) -> None:
    """Unpack a run folder and replace ``folder`` with it; raises ``BadMessage``, or OSError if writing fails."""
    plain = decompress(packed, MAX_PLAIN_BYTES)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for one in _contents(plain):
        file = part / one.name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_sparse(file, one)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the relevant files of a run folder. Of each process, that is its last answer and its ring at that time."""
    answers: dict[str, tuple[int, Path]] = {}
    kept = {path.stem for path in (folder / "evidence").glob("*.held")}
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        name = str(path.relative_to(folder))
        if not _KNOWN.fullmatch(name) or path.is_symlink() or not path.is_file():
            continue
        if name.startswith("rings/") and path.stem in kept:
            continue
        if name.startswith("evidence/") and name.endswith(".json"):
            process, _, request = path.stem.rpartition("-")
            answers[process] = max(answers.get(process, (-1, path)), (int(request), path))
        else:
            yield path
    yield from (path for _, path in answers.values())


def _fitting(files: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Return the smallest files that fit within the limits together."""
    sizes = {name: _size(path) for path, name in files}
    left = MAX_PLAIN_BYTES - 2**20
    kept = []
    for path, name in sorted(files, key=lambda file: sizes[file[1]])[:MAX_FILES]:
        left -= sizes[name]
        if sizes[name] <= MAX_FILE_BYTES and left >= 0:
            kept.append((path, name))
    return kept


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> bytes:
    """Return a file's content, or b"" if the file has vanished, as those of loader workers do."""
    try:
        return read_plain(path, MAX_FILE_BYTES)
    except OSError:
        return b""


def _contents(plain: bytes) -> tuple[_Packed, ...]:
    """Return all files; raises ``BadMessage``."""
    try:
        (length,) = _LENGTH.unpack_from(plain)
        index = json.loads(check_json(plain[_LENGTH.size : _LENGTH.size + length]))
        named = [(str(name), int(size), list(map(int, pieces))) for name, size, pieces in index]
    except (struct.error, ValueError, TypeError, RecursionError, OverflowError):
        raise BadMessage("a packed folder whose index cannot be read") from None
    if len(named) > MAX_FILES or len({name for name, _, _ in named}) < len(named):
        raise BadMessage("a packed folder with too many files, or with one of them twice")
    if not all(map(_is_known, named)) or sum(size for _, size, _ in named) > MAX_PLAIN_BYTES:
        raise BadMessage("a packed folder with files that no run folder has")
    view, at = memoryview(plain), _LENGTH.size + length
    found = []
    for name, size, pieces in named:
        ends = list(accumulate((min(_PIECE_BYTES, size - number * _PIECE_BYTES) for number in pieces), initial=at))
        parts = {number: view[begin:end] for number, (begin, end) in zip(pieces, pairwise(ends), strict=True)}
        found.append(_Packed(name=name, size=size, pieces=parts))
        at = ends[-1]
    if at != len(plain):
        raise BadMessage("a packed folder that is not as long as its index says")
    return tuple(found)


def _is_known(file: tuple[str, int, list[int]]) -> bool:
    """Return whether a run folder has such a file, and its pieces are within its size and in order."""
    name, size, pieces = file
    places = range(-(-size // _PIECE_BYTES))
    in_order = all(number in places for number in pieces) and all(map(lt, pieces, pieces[1:]))
    return _KNOWN.fullmatch(name) is not None and 0 <= size <= MAX_FILE_BYTES and in_order


def _pieces(content: bytes) -> dict[int, bytes]:
    """Return the pieces of a file that are not all zeros, by their index."""
    zeros = bytes(_PIECE_BYTES)
    pieces = (content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES))
    return {number: piece for number, piece in enumerate(pieces) if piece != zeros[: len(piece)]}


def _write_sparse(file: Path, packed: _Packed) -> None:
    """Write a file with holes instead of zeros, because the full rings of a thousand ranks would take a gigabyte."""
    with os.fdopen(open_new(file), "wb") as out:
        for number, piece in packed.pieces.items():
            out.seek(number * _PIECE_BYTES)
            out.write(piece)
        out.truncate(packed.size)
