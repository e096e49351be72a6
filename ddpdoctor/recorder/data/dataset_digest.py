"""A digest of a dataset's description, which shows whether ranks hold the same dataset.

None of the dataset's own code runs; only the attributes of objects are followed. Large values are sampled. If something
cannot be read (a table of another library, an open file), there is no digest, because two different ones would look the
same.
"""

from __future__ import annotations

import hashlib
import types
from typing import Any

from .digests import SCALARS, attributes, leaf_of

MAX_NODES = 1000
"""Values that are read, which takes about a millisecond."""
MAX_BYTES = 64 * 1024
MAX_DEPTH = 5
SAMPLED = 64
"""Items that are read of a list, evenly spread, or first entries of a dict."""
LEAF_PIECE = 1024
"""Bytes that are read at each of eight places of a tensor or an array."""

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: classes written in Python have it, and most C classes do not."""
_BY_NAME = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


def digest_of(dataset: Any) -> str:
    """Return the digest; empty if the dataset cannot be described."""
    description = _Description()
    try:
        description.add(dataset, MAX_DEPTH)
    except _OpaqueError:
        return ""
    return description.hash.hexdigest() if description.values else ""


class _OpaqueError(Exception):
    """A value cannot be read."""


class _Description:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self.nodes = 0
        self.bytes = 0
        self.values = 0
        """Number of values found, not counting names of classes."""

    def add(self, value: Any, depth: int) -> None:
        """Add a value to the digest."""
        self.nodes += 1
        if self.nodes > MAX_NODES or self.bytes > MAX_BYTES:
            return
        kind = type(value)
        if value is None or kind in SCALARS:
            self._take(repr(value)[:1024].encode("utf-8", "replace"))
            self.values += value is not None
        elif isinstance(value, _BY_NAME):
            self._take(str(getattr(value, "__qualname__", kind.__name__)).encode("utf-8", "replace"))
        elif kind in (list, tuple, range):
            self._add_items(value, depth)
        elif kind is dict:
            self._add_entries(value, depth)
        else:
            self._add_other(value, depth)

    def _take(self, data: bytes) -> None:
        self.bytes += len(data)
        self.hash.update(b"%d:" % len(data))
        self.hash.update(data)

    def _add_items(self, items: Any, depth: int) -> None:
        self._take(b"%d items" % len(items))
        self._go_deeper(depth)
        count = len(items)
        for i in range(min(count, SAMPLED)):
            self.add(items[i * count // min(count, SAMPLED)], depth - 1)

    def _add_entries(self, entries: Any, depth: int) -> None:
        self._take(b"%d entries" % len(entries))
        self._go_deeper(depth)
        for key in list(entries)[:SAMPLED]:
            self.add(key, depth - 1)
            self.add(entries[key], depth - 1)

    def _add_other(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._take(("%s.%s" % (kind.__module__, kind.__qualname__)).encode("utf-8", "replace"))
        leaf = leaf_of(value)
        if leaf is not None:
            self._take(repr((leaf.shape, leaf.item)).encode())
            step = max(1, leaf.size // 8)
            for at in range(0, leaf.size, step):
                self._take(leaf.read(at, min(LEAF_PIECE, leaf.size - at)))
            self.values += 1
            return
        if kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ("dtype", "device", "Generator", "Size"):
            return
        if not _is_plain(kind):
            raise _OpaqueError
        self._go_deeper(depth)
        given = attributes(value)
        for name in list(given)[:SAMPLED]:
            self._take(name.encode("utf-8", "replace"))
            self.add(given[name], depth - 1)

    def _go_deeper(self, depth: int) -> None:
        if depth <= 0:
            raise _OpaqueError


def _is_plain(kind: type) -> bool:
    """Return whether objects of a class keep everything in ``__dict__``: a Python class without slots."""
    return all(one is object or (one.__flags__ & _HEAP_TYPE and not vars(one).get("__slots__")) for one in kind.__mro__)
