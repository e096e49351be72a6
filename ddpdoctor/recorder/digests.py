"""Digests of what a loader delivers, and of a dataset's description, which shows whether ranks hold the same dataset.

Whole leaves of a batch are digested, and single samples in them. Memory is read directly, without torch operations, so
no mode, profiler or random state of the script is affected. Only plain data is read: tensors in CPU memory, NumPy
arrays, lists of strings and numbers.

None of a dataset's own code runs; only the attributes of objects are followed. Large values are sampled. If something
cannot be read (a table of another library, an open file), there is no digest, because two different ones would look the
same.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import types
from itertools import islice
from typing import Any, Callable, Dict, List, Optional, Tuple

from .state import pass_on

# Bytes that are read of one leaf. Of a larger leaf the first and the last half of this are read.
MAX_LEAF_BYTES = 64 * 1024
MAX_LEAVES = 4
MAX_DEPTH = 4
MAX_ITEMS = 1024
# Our choice: only a few digests from the same place are compared, and 32 bits are equal by chance once in 4e9.
DIGEST_BYTES = 4

SCALARS = frozenset({bool, int, float, str, bytes})


class Leaf:
    """A part of a batch that holds values: its shape, and a function that reads bytes of it from an offset."""

    __slots__ = ("item", "read", "shape", "size")

    def __init__(self, shape: Tuple[int, ...], item: int, size: int, read: Callable[[int, int], bytes]) -> None:
        self.shape = shape
        self.item = item  # bytes of one element
        self.size = size  # bytes of all
        self.read = read

    @property
    def count(self) -> int:
        """How many elements it has."""
        return self.size // self.item if self.item else 0

    def sample(self) -> bytes:
        """Return its bytes, or of a large leaf the first and the last ones."""
        if self.size <= MAX_LEAF_BYTES:
            return self.read(0, self.size)
        half = MAX_LEAF_BYTES // 2
        return self.read(0, half) + self.read(self.size - half, half)

    def row(self, number: int) -> bytes:
        """Return the first bytes of one row."""
        length = self.size // self.shape[0]
        return self.read(number * length, min(length, MAX_LEAF_BYTES // 4))


def leaves_of(value: Any) -> List[Leaf]:
    """Return the first few leaves of a batch, in order."""
    found: List[Leaf] = []
    waiting = [(value, MAX_DEPTH)]
    while waiting and len(found) < MAX_LEAVES:
        one, depth = waiting.pop()
        leaf = leaf_of(one) if one is not None and depth >= 0 else None
        if leaf is not None:
            found.append(leaf)
        elif one is not None and depth >= 0:
            waiting += [(item, depth - 1) for item in reversed(_items(one))]
    return found


def digest(data: bytes) -> str:
    """Return a short digest of bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def is_constant(data: bytes, item: int) -> bool:
    """Return whether all elements are the same. Such data does not identify samples."""
    return data == data[:item] * (len(data) // item) if item else True


def shapes_of(value: Any) -> List[Tuple[Tuple[int, ...], int]]:
    """Return shape and number of elements of the first tensors in arguments, on any device."""
    torch = sys.modules["torch"]
    found: List[Tuple[Tuple[int, ...], int]] = []
    waiting = [value]
    with torch._C.DisableTorchFunction():
        for _ in range(MAX_ITEMS):
            if not waiting:
                break
            item = waiting.pop()
            if isinstance(item, torch.Tensor):
                found.append((tuple(item.shape), item.numel()))
            else:
                waiting.extend(_items(item))
    return found


def _items(value: Any) -> List[Any]:
    """Return the first items of a container of a type that collating makes; empty for any other type."""
    readers: Any = ((dict, dict.values), (tuple, tuple.__iter__), (list, list.__iter__))
    for kind, items_of in readers:
        if isinstance(value, kind):
            return list(islice(items_of(value), MAX_ITEMS))
    if any(kind.__name__ == "UserDict" for kind in type(value).__mro__):  # transformers.BatchEncoding
        return _items(attributes(value).get("data"))
    return []


def attributes(value: Any) -> Dict[str, Any]:
    """Return an object's ``__dict__``, bypassing its class's ``__getattr__`` and properties."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception as error:  # noqa: BLE001 - the object has none
        pass_on(error)
        return {}
    return found if type(found) is dict else {}


def leaf_of(value: Any) -> Optional[Leaf]:
    """Return a value as a leaf, or None if it is none or cannot be read directly."""
    torch = sys.modules.get("torch")
    kind = type(value)
    if torch is not None and kind is torch.Tensor:
        return _tensor(torch, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is getattr(numpy, "ndarray", None):
        if value.dtype.hasobject or not value.flags.c_contiguous or not value.nbytes:
            return None
        view = memoryview(value.reshape(-1).view("u1"))
        shape, item, size = tuple(value.shape), int(value.itemsize), int(value.nbytes)
        return Leaf(shape, item, size, lambda at, length: bytes(view[at : at + length]))
    if kind in (str, bytes):
        return _scalars([value])
    if kind in (list, tuple) and value and all(type(item) in SCALARS for item in value[:MAX_ITEMS]):
        return _scalars(value)
    return None


def _tensor(torch: Any, tensor: Any) -> Optional[Leaf]:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        shape, item, address = tuple(tensor.shape), tensor.element_size(), tensor.data_ptr()
        size = tensor.numel() * item
    if not address or not size:
        return None

    def read(at: int, length: int, owner: Any = tensor) -> bytes:
        """Read from the memory of ``owner``, which this function keeps alive."""
        return ctypes.string_at(address + at, length)

    return Leaf(shape, item, size, read)


def _scalars(values: Any) -> Leaf:
    """Return strings and numbers as a leaf whose rows are digests of equal length."""
    rows = [digest(repr(value)[:MAX_ITEMS].encode("utf-8", "replace")).encode() for value in values[:MAX_ITEMS]]
    data = b"".join(rows)
    return Leaf((len(values),), 2 * DIGEST_BYTES, len(data), lambda at, length: data[at : at + length])


MAX_NODES = 1000  # values that are read, which takes about a millisecond
MAX_DATASET_BYTES = 64 * 1024
MAX_DATASET_DEPTH = 5
SAMPLED = 64  # items that are read of a list, evenly spread, or first entries of a dict
LEAF_PIECE = 1024  # bytes that are read at each of eight places of a tensor or an array

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes written in Python have it, and most C classes do not
_BY_NAME = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


def digest_of_dataset(dataset: Any) -> str:
    """Return the digest; empty if the dataset cannot be described."""
    description = _Description()
    try:
        description.add(dataset, MAX_DATASET_DEPTH)
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
        self.values = 0  # number of values found, not counting names of classes

    def add(self, value: Any, depth: int) -> None:
        """Add a value to the digest."""
        self.nodes += 1
        if self.nodes > MAX_NODES or self.bytes > MAX_DATASET_BYTES:
            return
        kind = type(value)
        if value is None or kind in SCALARS:
            self._take(repr(value)[:1024].encode("utf-8", "replace"))
            self.values += value is not None
        elif isinstance(value, _BY_NAME):
            self._take(str(getattr(value, "__qualname__", kind.__name__)).encode("utf-8", "replace"))
        elif kind in (list, tuple, range):
            self._take(b"%d items" % len(value))
            self._go_deeper(depth)
            count = min(len(value), SAMPLED)
            for i in range(count):
                self.add(value[i * len(value) // count], depth - 1)
        elif kind is dict:
            self._take(b"%d entries" % len(value))
            self._go_deeper(depth)
            for key in list(value)[:SAMPLED]:
                self.add(key, depth - 1)
                self.add(value[key], depth - 1)
        else:
            self._add_other(value, depth)

    def _take(self, data: bytes) -> None:
        self.bytes += len(data)
        self.hash.update(b"%d:" % len(data))
        self.hash.update(data)

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
        # Objects of a Python class without slots keep everything in ``__dict__``.
        if not all(c is object or (c.__flags__ & _HEAP_TYPE and not vars(c).get("__slots__")) for c in kind.__mro__):
            raise _OpaqueError
        self._go_deeper(depth)
        given = attributes(value)
        for name in list(given)[:SAMPLED]:
            self._take(name.encode("utf-8", "replace"))
            self.add(given[name], depth - 1)

    def _go_deeper(self, depth: int) -> None:
        if depth <= 0:
            raise _OpaqueError
