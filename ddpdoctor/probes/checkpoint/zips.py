"""Reads the zip archives that ``torch.save`` writes: the index, the checksums, and the rest of a truncated archive.

Source: ``caffe2/serialize/inline_container.cc`` of torch 2.13. Records are not compressed, and ``data.pkl`` is the
first. Local headers hold no sizes, only the directory at the end does. ``set_crc32_options(False)`` writes 0 for every
checksum.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ddpdoctor.model.words import grouped
from ddpdoctor.probes.checkpoint.pickles import Loaded, StorageRef, TensorRef, Unreadable, read_pickle, walk_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Only the signature and the lengths of name and extra field are read."""
LOCAL_SIGNATURE = b"PK\x03\x04"
PICKLE = "data.pkl"
CHUNK_BYTES = 4 * 2**20
MOST_INDEX_BYTES = 2**28
"""Our choice: an index names tensors but does not hold them. For 100,000 tensors it has about 20 MB."""
SEARCH_BYTES = 2**16
"""Search block. The next header follows within some 100 bytes: records are aligned to 64 bytes, or as the user set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive whose directory could be read."""

    loaded: Loaded | None
    """None if the index is too damaged to read."""
    problem: str
    """Why the index could not be read."""
    starts: dict[str, int]
    """Where the bytes of each record begin, by the storage's key."""
    damaged: tuple[str, ...]
    """Records whose checksum is wrong, without the archive's name before them."""
    has_checksums: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left of an archive that has lost its directory."""

    loaded: Loaded | None
    whole: frozenset[str]
    """Keys of the complete storages."""


def read_archive(file: BinaryIO, *, checksums: bool = True) -> Archive:
    """Read the index of an archive and verify every record's checksum. Raises ``zipfile.BadZipFile``."""
    with _open_archive(file) as archive:
        records = {_short(info.filename): info for info in archive.infolist()}
        has_checksums = any(info.CRC for info in records.values())
        damaged = tuple(_damaged(archive, records)) if has_checksums and checksums else ()
        loaded, problem = _read_index(file, records.get(PICKLE))
        starts = {
            name.removeprefix("data/"): _start(file, info)
            for name, info in records.items()
            if name.startswith("data/") and name not in damaged
        }
    return Archive(
        loaded=loaded, problem=problem, starts=starts, damaged=damaged, has_checksums=has_checksums
    )  # fmt: skip


def _open_archive(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except Exception as error:
        # With a flipped bit in the directory, zipfile may raise anything.
        raise zipfile.BadZipFile(str(error)) from error


def _short(name: str) -> str:
    """Return a record's name without the archive's name, which precedes all of them."""
    return name.partition("/")[2] or name


def _damaged(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo]) -> Iterator[str]:
    for name, info in records.items():
        try:
            with archive.open(info) as record:
                while record.read(CHUNK_BYTES):
                    pass
        except Exception:  # noqa: BLE001 - with a flipped bit in a header, zipfile may raise anything
            yield name


def _read_index(file: BinaryIO, info: zipfile.ZipInfo | None) -> tuple[Loaded | None, str]:
    if info is None:
        return None, f"it holds no {PICKLE}: it is a zip archive, and not one of torch.save's"
    start = _start(file, info)
    if start < 0:
        return None, f"the header of {PICKLE} is damaged"
    if info.file_size > MOST_INDEX_BYTES:
        return None, f"{PICKLE} should have {info.file_size} bytes"
    try:
        file.seek(start)
        return read_pickle(io.BytesIO(file.read(info.file_size))), ""
    except Unreadable as error:
        return None, str(error)


def _start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin, or -1 if its header is damaged."""
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_SIGNATURE):
        return -1
    _, name, extra = LOCAL_HEADER.unpack(header)
    return info.header_offset + LOCAL_HEADER.size + int(name) + int(extra)


def read_rest(file: BinaryIO, size_bytes: int) -> Rest:
    """Read a truncated archive: its index comes first, and the other records follow."""
    first = _header_at(file, 0)
    if first is None or _short(first[0]) != PICKLE:
        return Rest(loaded=None, whole=frozenset())
    file.seek(first[1])
    try:
        loaded = read_pickle(file)
    except Unreadable:
        return Rest(loaded=None, whole=frozenset())
    storages = {ref.storage.key: ref.storage for _, ref in walk_tensors(loaded.root)}
    return Rest(loaded=loaded, whole=frozenset(_whole(file, first[1], size_bytes, storages)))


def _whole(file: BinaryIO, position: int, size_bytes: int, storages: Mapping[str, StorageRef]) -> Iterator[str]:
    while (found := _next_header(file, position, size_bytes)) is not None:
        name, start = found
        storage = storages.get(_short(name).removeprefix("data/")) if _short(name).startswith("data/") else None
        end = start + (storage.size_bytes if storage is not None else 0)
        if storage is not None and end <= size_bytes:
            yield storage.key
        position = end


def _next_header(file: BinaryIO, position: int, size_bytes: int) -> tuple[str, int] | None:
    """Return name and start of the next record, or None. Only the index is long and of unknown length."""
    while position < size_bytes:
        file.seek(position)
        block = file.read(SEARCH_BYTES)
        place = block.find(LOCAL_SIGNATURE)
        if place >= 0:
            return _header_at(file, position + place)
        position += max(1, len(block) - len(LOCAL_SIGNATURE) + 1)
    return None


def _header_at(file: BinaryIO, position: int) -> tuple[str, int] | None:
    file.seek(position)
    header = file.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_SIGNATURE):
        return None
    _, name_length, extra_length = LOCAL_HEADER.unpack(header)
    name = file.read(name_length).decode(errors="replace")
    return name, position + LOCAL_HEADER.size + name_length + extra_length


def tensors_by_record(root: object) -> dict[str, list[str]]:
    """Return the names of the tensors in each storage, by the storage's key."""
    return grouped((ref.storage.key, name) for name, ref in walk_tensors(root) if isinstance(ref, TensorRef))
