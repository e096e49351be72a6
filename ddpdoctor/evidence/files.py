"""Finds and opens the files of evidence. They may come from anybody: sizes are limited, and links do not lead out."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.evidence import MOST_RANKS, Who

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

HEAD_BYTES = 64 * 2**10
"""A reader recognizes a file by this many bytes."""
MOST_BYTES = 256 * 2**20
"""Our choice: the limit for a file that must fit into memory. A dump of 2,000 entries has 2 MB."""
MOST_UNPACKED = 2**36
"""Our choice: the most that is unpacked of one file. A log of 64 GiB takes ten minutes to read."""
MOST_FILES = 200_000
"""Our choice: 16,384 ranks may leave ten files each."""
STDIN = "-"
_PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_NO_TEXT = "".join(map(chr, [*range(1, 8), *range(14, 27), *range(28, 32), 127])) + "\ufffd"
_MOST_STRANGE = 0.02
_RANK = re.compile(r"(?P<of>[a-z]*)[_.-]?rank[_.=-]?(?P<rank>\d+)(?!.*rank[_.=-]?\d)", re.IGNORECASE)
_OTHER_RANKS = frozenset((
    "cp", "data", "dp", "ep", "etp", "expert", "group", "host", "intra", "local", "machine", "model", "mp", "node",
    "pipeline", "pp", "sp", "tensor", "tp",
))  # fmt: skip
"""A rank of one of these in the name of a file is the number of a node, or of a process in a group."""
_LOCAL = re.compile(r"attempt_(\d+)/(\d+)/[^/]+$")
"""torchrun's layout below --log-dir: attempt, then local rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile:
    """A file to read."""

    name: str
    """As the user gave it, or below the folder that the user gave."""
    path: Path | None
    """None for standard input."""
    who: Who
    attempt: int | None = None
    """The attempt that torchrun's folder names, or None."""
    problem: str = ""
    """Why the file must not be read."""


def find_files(paths: Sequence[str]) -> Iterator[EvidenceFile]:
    """Yield the files to read, those of a folder sorted by name. "-" is standard input.

    Raises UserError if a path does not exist, or if there are too many files.
    """
    count = 0
    for given in paths:
        for found in [_standard_input()] if given == STDIN else _below(Path(given)):
            count += 1
            if count > MOST_FILES:
                raise UserError(
                    f"there are more than {MOST_FILES:,} files", help="Give the folders or files of one job."
                )
            yield found


def open_file(file: EvidenceFile) -> tuple[IO[bytes], bytes, float | None]:
    """Open a file, unpacked if it is packed by gzip, bzip2 or xz, and as UTF-8 if it is UTF-16.

    Returns:
        The stream, which begins after its first bytes; these first bytes, at most ``HEAD_BYTES``; and the time at
        which the file was last written, in seconds since the epoch, or None if that says nothing. NUL bytes at the
        beginning of the file are left out: a log that was truncated while a program had it open begins with them.

    Raises:
        OSError, EOFError, lzma.LZMAError: the file cannot be read.
    """
    stream: IO[bytes] = sys.stdin.buffer if file.path is None else file.path.open("rb")
    head = _fill(stream, b"")
    unpack = next((kind for magic, kind in _PACKED.items() if head.startswith(magic)), None)
    modified = None
    if file.path is not None:
        state = os.fstat(stream.fileno())
        modified = state.st_mtime if stat.S_ISREG(state.st_mode) else None
    if unpack is not None:
        stream = unpack(io.BufferedReader(_Rejoined(head, stream)))
        head = _fill(stream, b"")
    skipped = 0
    while head and not head.strip(b"\0") and skipped < MOST_BYTES:
        skipped += len(head)
        head = _fill(stream, b"")
    if (encoding := _wide_encoding(head)) is not None:
        stream = io.BufferedReader(_Transcoded(head, stream, encoding))
        head = _fill(stream, b"")
    return stream, head.removeprefix(codecs.BOM_UTF8), modified


def is_text(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a text, even if some NUL bytes got into it.

    A disk that is full, or a host that crashes, leaves some or many of them in a log.
    """
    if b"\0" not in head:
        return True
    if b"\0" in head[:8] and head[8:9] == b"{":  # the size of the header of a file of safetensors
        return False
    text = head.replace(b"\0", b"").decode("utf-8", "replace")
    strange = sum(text.count(one) for one in _NO_TEXT)
    return bool(text) and strange <= _MOST_STRANGE * len(text)


def _wide_encoding(head: bytes) -> str | None:
    """Return the encoding of UTF-16, as PowerShell writes logs, with its mark at the beginning or without."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[:4096]
    half = len(sample) // 2
    zeros = sample[::2].count(0), sample[1::2].count(0)
    if half < 8 or min(zeros) > 0.1 * half or max(zeros) < 0.7 * half:
        return None
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


class _Transcoded(io.RawIOBase):
    """A stream in another encoding, from its start, as UTF-8."""

    def __init__(self, head: bytes, stream: IO[bytes], encoding: str) -> None:
        self._stream, self._decoder = stream, codecs.getincrementaldecoder(encoding)("replace")
        self._ready = self._decoder.decode(head).encode("utf-8", "replace")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        while not self._ready and (more := self._stream.read(HEAD_BYTES)):
            self._ready = self._decoder.decode(more).encode("utf-8", "replace")
        part, self._ready = self._ready[: len(view)], self._ready[len(view) :]
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Rejoined(io.RawIOBase):
    """A stream from its start, of which the first bytes have been read: a pipe cannot go back."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        part, self._head = self._head[: len(view)], self._head[len(view) :]
        part = part or self._stream.read(len(view))
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._stream.close()
        super().close()


def read_rest(stream: IO[bytes], head: bytes) -> tuple[bytes, bool]:
    """Return the whole content, at most ``MOST_BYTES`` of it, and whether there is more."""
    if len(head) < HEAD_BYTES:
        return head, False
    body = head + stream.read(MOST_BYTES - len(head))
    return body, len(body) == MOST_BYTES and bool(stream.read(1))


def _fill(stream: IO[bytes], head: bytes) -> bytes:
    """Read until there are ``HEAD_BYTES`` or the end: a pipe gives less at once."""
    while len(head) < HEAD_BYTES and (more := stream.read(HEAD_BYTES - len(head))):
        head += more
    return head


def _standard_input() -> EvidenceFile:
    return EvidenceFile(name=STDIN, path=None, who=Who())


def _below(path: Path) -> Iterator[EvidenceFile]:
    if path.is_dir():
        root = path.resolve()
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                yield _file(Path(folder, name), root)
    elif path.exists():
        yield _file(path, None)
    else:
        raise UserError(
            f"there is no {path}",
            help="Give logs, dumps, stacks, or folders of them; - reads standard input.",
        )


def _file(path: Path, root: Path | None) -> EvidenceFile:
    problem = ""
    if root is not None and path.is_symlink() and not path.resolve().is_relative_to(root):
        problem = "a link that leads out of the folder"
    elif root is not None and not path.is_file():
        problem = "no regular file" if path.exists() else "a link that leads nowhere"
    local = _LOCAL.search(path.as_posix())
    rank = _RANK.search(path.name) or _RANK.search(path.parent.name)
    is_global = rank is not None and rank["of"].lower() not in _OTHER_RANKS
    number = int(rank["rank"][:9]) if rank is not None and is_global else MOST_RANKS
    who = Who(rank=number if number < MOST_RANKS else None, local_rank=int(local[2]) if local else None)
    return EvidenceFile(
        name=str(path), path=path, who=who, attempt=int(local[1]) if local else None, problem=problem
    )  # fmt: skip
