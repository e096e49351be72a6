"""Digests of what a loader delivers: of whole leaves of a batch, and of single samples in them.

Memory is read directly, without torch operations, so no mode, profiler or random state of the script is affected. Only
plain data is read: tensors in CPU memory, NumPy arrays, lists of strings and numbers.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import islice
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..state import pass_on

MAX_LEAF_BYTES = 64 * 1024
"""Bytes that are read of one leaf. Of a larger leaf the first and the last half of this are read."""
MAX_LEAVES = 4
MAX_DEPTH = 4
MAX_ITEMS = 1024
DIGEST_BYTES = 4
"""Our choice: only a few digests from the same place are compared, and 32 bits are equal by chance once in 4e9."""

SCALARS = frozenset({bool, int, float, str, bytes})


class Leaf:
    """A part of a batch that holds values: its shape, and a function that reads bytes of it from an offset."""

    __slots__ = ("item", "read", "shape", "size")

    def __init__(self, shape: Tuple[int, ...], item: int, size: int, read: Callable[[int, int], bytes]) -> None:
        self.shape = shape
        self.item = item
        """Bytes of one element."""
        self.size = size
        """Bytes of all."""
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
    _collect(value, MAX_DEPTH, found)
    return found


def digest(data: bytes) -> str:
    """Return a short digest of bytes."""
    import hashlib

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


def _collect(value: Any, depth: int, found: List[Leaf]) -> None:
    if len(found) >= MAX_LEAVES or depth < 0 or value is None:
        return
    leaf = leaf_of(value)
    if leaf is not None:
        found.append(leaf)
        return
    for item in _items(value):
        _collect(item, depth - 1, found)


def _items(value: Any) -> List[Any]:
    """Return the first items of a container of a type that collating makes; empty for any other type."""
    if isinstance(value, dict):
        return list(islice(dict.values(value), MAX_ITEMS))
    if isinstance(value, tuple):
        return list(islice(tuple.__iter__(value), MAX_ITEMS))
    if isinstance(value, list):
        return list(islice(list.__iter__(value), MAX_ITEMS))
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
        return _array(value)
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


def _array(array: Any) -> Optional[Leaf]:
    if array.dtype.hasobject or not array.flags.c_contiguous or not array.nbytes:
        return None
    view = memoryview(array.reshape(-1).view("u1"))
    return Leaf(
        tuple(array.shape), int(array.itemsize), int(array.nbytes), lambda at, size: bytes(view[at : at + size])
    )


def _scalars(values: Any) -> Leaf:
    """Return strings and numbers as a leaf whose rows are digests of equal length."""
    rows = [digest(repr(value)[:MAX_ITEMS].encode("utf-8", "replace")).encode() for value in values[:MAX_ITEMS]]
    data = b"".join(rows)
    return Leaf((len(values),), 2 * DIGEST_BYTES, len(data), lambda at, length: data[at : at + length])
