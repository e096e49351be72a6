"""Reads one checkpoint file of any format: its damage, its contents by name, its values."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ddpdoctor.model.errors import typed_line
from ddpdoctor.model.saved import Checksums, Damage, FileSeen, Form, ReadState
from ddpdoctor.probes.checkpoint.contents import describe, weights_of
from ddpdoctor.probes.checkpoint.legacy import read_legacy
from ddpdoctor.probes.checkpoint.pickles import TensorRef, Unreadable, walk_tensors
from ddpdoctor.probes.checkpoint.safetensors import is_safetensors, read_safetensors
from ddpdoctor.probes.checkpoint.values import check_values, digest_tensors, mapped
from ddpdoctor.probes.checkpoint.zips import LOCAL_SIGNATURE, PICKLE, read_archive, read_rest, tensors_by_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.probes.checkpoint.zips import Archive

HEAD_BYTES = 512
TAIL_BYTES = 4096
END_SIGNATURE = b"PK\x05\x06"
"""Signature of the record that ends a zip archive."""
END_BYTES = 22
"""The least size of that record. A file that ends within it is truncated."""


_BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of git-lfs: the file itself was not fetched (git lfs pull)"),
    (b"<!doctype html", "an HTML page, as a server sends where a download failed"),
    (b"<html", "an HTML page, as a server sends where a download failed"),
    (b"<?xml", "XML, as a storage server sends where a download failed"),
    (b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"\x89hdf", "an HDF5 file, as Keras writes"),
    (b"\x93numpy", "an array of NumPy"),
    (b"gguf", "a GGUF file, as llama.cpp reads"),
)
"""The usual files that are found where a checkpoint should be, by how they begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What to read beyond the index. Each of these reads the whole file."""

    checksums: bool = True
    values: bool = True
    digests: bool = False


def read_file(path: Path, extent: Extent) -> FileSeen:
    """Read a file. Raises ``OSError`` if it cannot be opened."""
    size = path.stat().st_size
    if size == 0:
        return _unread(path, 0, Form.FOREIGN, ReadState.EMPTY)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if head.startswith(LOCAL_SIGNATURE):
            return _read_zip(path, file, size, extent)
        if is_safetensors(head):
            return _read_safetensors(path, file, size, extent)
        return _read_legacy(path, file, size, extent) or _unread(
            path, size, Form.FOREIGN, ReadState.FOREIGN, name_foreign(head)
        )


def _unread(path: Path, size: int, form: Form, state: ReadState, detail: str = "") -> FileSeen:
    return FileSeen(path=str(path), size_bytes=size, form=form, state=state, detail=detail)


def _read_zip(path: Path, file: BinaryIO, size: int, extent: Extent) -> FileSeen:
    try:
        archive = read_archive(file, checksums=extent.checksums)
    except zipfile.BadZipFile:
        return _read_cut_zip(path, file, size)
    if archive.loaded is None:
        state = ReadState.UNREADABLE if archive.damaged else ReadState.FOREIGN
        return FileSeen(
            path=str(path),
            size_bytes=size,
            form=Form.ZIP,
            state=state,
            detail=archive.problem,
            checksums=_checksums(archive, extent),
            damaged=tuple(Damage(record=name) for name in archive.damaged),
        )
    tensors = tuple(walk_tensors(archive.loaded.root))
    refused, refusal = ((), "") if archive.damaged else try_load(path, named=archive.loaded.names)
    seen = FileSeen(
        path=str(path),
        size_bytes=size,
        form=Form.ZIP,
        state=ReadState.WHOLE,
        checksums=_checksums(archive, extent),
        damaged=_name_damage(archive),
        contents=describe(archive.loaded.root, archive.loaded.names),
        refused=refused,
        refusal=refusal,
    )
    return _with_values(seen, tensors, archive.starts, extent)


def _checksums(archive: Archive, extent: Extent) -> Checksums:
    if not extent.checksums:
        return Checksums.NOT_READ
    return Checksums.CHECKED if archive.has_checksums else Checksums.NOT_WRITTEN


def _name_damage(archive: Archive) -> tuple[Damage, ...]:
    by_record = {} if archive.loaded is None else tensors_by_record(archive.loaded.root)
    return tuple(
        Damage(record=name, tensors=tuple(by_record.get(name.removeprefix("data/"), ()) if name != PICKLE else ()))
        for name in archive.damaged
    )


def _read_cut_zip(path: Path, file: BinaryIO, size: int) -> FileSeen:
    end = _end_of_data(file, size)
    rest = read_rest(file, end)
    tensors = () if rest.loaded is None else tuple(walk_tensors(rest.loaded.root))
    has_end = _ends_as_archive(file, size)
    zeros = "" if end == size else f"its last {size - end} bytes are zeros"
    return FileSeen(
        path=str(path),
        size_bytes=size,
        form=Form.ZIP,
        state=ReadState.UNREADABLE if has_end else ReadState.CUT,
        detail="the directory of its records is damaged" if has_end else zeros,
        lost=tuple(name for name, ref in tensors if ref.storage.key not in rest.whole),
        contents=None if rest.loaded is None else describe(rest.loaded.root, rest.loaded.names),
    )


def _ends_as_archive(file: BinaryIO, size: int) -> bool:
    """Return whether the end of a zip archive is there. If so, the file is damaged and not truncated."""
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    return 0 <= tail.rfind(END_SIGNATURE) <= len(tail) - END_BYTES


def _end_of_data(file: BinaryIO, size: int) -> int:
    """Return where the data ends. Zeros after it were never written: the host went down, or the disk was full.

    Fewer than ``TAIL_BYTES`` zeros may be data and count as such.
    """
    end = size
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        block = file.read(end - start).rstrip(b"\0")
        if block:
            end = start + len(block)
            break
        end = start
    return end if size - end >= TAIL_BYTES else size


def _read_legacy(path: Path, file: BinaryIO, size: int, extent: Extent) -> FileSeen | None:
    try:
        legacy = read_legacy(file, size)
    except Unreadable as error:
        # Damaged or truncated: without an index we cannot know which.
        return _unread(path, size, Form.LEGACY, ReadState.UNREADABLE, str(error))
    if legacy is None:
        return None
    tensors = tuple(walk_tensors(legacy.loaded.root))
    seen = FileSeen(
        path=str(path),
        size_bytes=size,
        form=Form.LEGACY,
        state=ReadState.WHOLE if legacy.is_whole else ReadState.CUT,
        checksums=Checksums.NONE,
        lost=tuple(name for name, ref in tensors if ref.storage.key not in legacy.starts),
        contents=describe(legacy.loaded.root, legacy.loaded.names),
        refused=legacy.loaded.names,
    )
    return _with_values(seen, tensors, legacy.starts, extent)


def _read_safetensors(path: Path, file: BinaryIO, size: int, extent: Extent) -> FileSeen:
    try:
        read = read_safetensors(file, size)
    except Unreadable as error:
        return _unread(path, size, Form.SAFETENSORS, ReadState.UNREADABLE, str(error))
    lost = tuple(name for name in read.tensors if name not in read.starts)
    seen = FileSeen(
        path=str(path),
        size_bytes=size,
        form=Form.SAFETENSORS,
        state=ReadState.CUT if lost else ReadState.WHOLE,
        checksums=Checksums.NONE,
        lost=lost,
        contents=weights_of(read.tensors),
    )
    return _with_values(seen, tuple(read.tensors.items()), read.starts, extent)


def _with_values(
    seen: FileSeen, tensors: Sequence[tuple[str, TensorRef]], starts: Mapping[str, int], extent: Extent
) -> FileSeen:
    """Add what the values of a whole file show."""
    if seen.state is not ReadState.WHOLE:
        return seen
    with mapped(Path(seen.path)) as buffer:
        values, unseen = check_values(buffer, tensors, starts) if extent.values else (None, ())
        digests = digest_tensors(buffer, tensors, starts) if extent.digests else None
    return replace(seen, values=values, unseen=unseen, digests=digests)


def name_foreign(head: bytes) -> str:
    """Return a phrase that says what a file beginning with ``head`` is."""
    lowered = head.lstrip().lower() if head[:1].isspace() else head.lower()
    for beginning, what in _BEGINNINGS:
        if lowered.startswith(beginning):
            return what
    if not any(head):
        return "only zeros at its beginning, as after a host crash before the data reached the disk"
    return (
        f"it begins with {head[:8]!r}, which is neither a zip archive nor an old format of torch.save nor safetensors"
    )


def try_load(path: Path, *, named: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the functions and classes for which torch refuses a zip archive, and any other error of torch.

    ``named`` are those that the file names. If torch does not say which it refuses, it may be any of them.
    """
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        return _refused(path, named), "" if named else typed_line(error)
    except NotImplementedError:
        return (), ""  # the meta device has no quantized or nested tensors, which says nothing about the file
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        return (), typed_line(error)
    return (), ""


def _refused(path: Path, named: tuple[str, ...]) -> tuple[str, ...]:
    from torch import serialization

    ask = getattr(serialization, "get_unsafe_globals_in_checkpoint", None)  # since torch 2.6
    try:
        found = tuple(ask(path)) if ask is not None else ()
    except Exception:  # noqa: BLE001 - we have read the file already, and torch's list is only a refinement
        found = ()
    return tuple(found) or named
