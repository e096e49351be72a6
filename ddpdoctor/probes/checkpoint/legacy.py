"""Reads the format of ``torch.save`` before zip archives: several pickles, then the storages, without checksums.

Source: ``torch/serialization.py``, ``_legacy_save`` and ``_legacy_load``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ddpdoctor.probes.checkpoint.pickles import Loaded, Unreadable, read_pickle, walk_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Legacy:
    """A file of the old format."""

    loaded: Loaded
    starts: dict[str, int]
    """Where the bytes of each complete storage begin."""
    is_whole: bool


def read_legacy(file: BinaryIO, size_bytes: int) -> Legacy | None:
    """Return what a file of the old format holds, or None for another format. Raises ``Unreadable`` if damaged."""
    file.seek(0)
    try:
        if read_pickle(file).root != MAGIC_NUMBER:
            return None
    except Unreadable:
        return None
    for _ in ("protocol version", "system"):
        read_pickle(file)
    loaded = read_pickle(file)
    try:
        keys = read_pickle(file).root
    except Unreadable:
        return Legacy(loaded=loaded, starts={}, is_whole=False)
    if not isinstance(keys, list):
        raise Unreadable("its storages are not listed")
    starts = _find_storages(file, [str(key) for key in keys], loaded, size_bytes)
    return Legacy(loaded=loaded, starts=starts, is_whole=len(starts) == len(keys))


def _find_storages(file: BinaryIO, keys: Sequence[str], loaded: Loaded, size_bytes: int) -> dict[str, int]:
    sizes = {ref.storage.key: ref.storage for _, ref in walk_tensors(loaded.root)}
    starts: dict[str, int] = {}
    for key in keys:
        length = file.read(LENGTH.size)
        storage = sizes.get(key)
        if len(length) < LENGTH.size or storage is None:
            break
        if LENGTH.unpack(length)[0] != storage.numel:
            raise Unreadable(f"storage {key} should have {storage.numel} elements, but has another length")
        start = file.tell()
        if start + storage.size_bytes > size_bytes:
            break
        starts[key] = start
        file.seek(start + storage.size_bytes)
    return starts
