"""Reads the pickle of a checkpoint without running anything: functions and classes are recorded, never imported.

torch.save writes tensors as calls of a few torch functions with numbered storages. We replace those functions by our
own, which record shape, dtype and storage. Every other function or class becomes an ``Opaque``, which holds its
arguments.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "qint32": 4, "qint8": 1, "quint8": 1,
}  # fmt: skip
"""Bytes of an element, by torch's name of the dtype."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
    "QInt32Storage": "qint32", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
}  # fmt: skip


MOST_ELEMENTS = 2**60
"""Our choice: the limit of storage sizes, shapes and offsets."""
MOST_BITS = 1024
MOST_READ_BYTES = 2**26
"""Our choice: the limit of one value, such as a string or a NumPy array."""
MOST_LINE_BYTES = 2**16
MOST_PATH = 4096
"""Our choice: the longest path of keys, in characters. No state dict is nested more deeply."""
PLAIN_KEYS = (str, bytes, int, float, bool, type(None))


class Unreadable(Exception):  # noqa: N818 - says what it is
    """The file is not what torch.save writes. The message is a phrase."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage, identified by the number of its record."""

    key: str
    dtype: str
    numel: int

    @property
    def size_bytes(self) -> int:
        """The size in bytes."""
        return self.numel * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: which part of which storage."""

    storage: StorageRef
    offset: int
    """Offset into the storage, in elements of ``dtype``."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Opaque:
    """Stands for the result of an unknown function or class, which is not called."""

    name = ""

    def __new__(cls, *args: Any, **_: Any) -> Opaque:  # noqa: PYI034 - the unpickler makes it in its own ways
        made = object.__new__(cls)
        made.args, made.state, made.items = args, None, {}  # type: ignore[attr-defined]
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments."""

    def __call__(self, *_: Any, **__: Any) -> Opaque:
        """Return a placeholder for the result of a call."""
        return Opaque()

    def __setstate__(self, state: Any) -> None:
        """Keep the state as it is."""
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep an item of a mapping."""
        self.items[key] = value  # type: ignore[attr-defined]

    def append(self, value: Any) -> None:
        """Keep an item of a list."""
        self.items[len(self.items)] = value  # type: ignore[attr-defined]

    def extend(self, values: Any) -> None:
        """Keep several items of a list."""
        for value in values:
            self.append(value)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a pickle holds."""

    root: Any
    names: tuple[str, ...]
    """The unknown functions and classes that it names."""


def read_pickle(file: BinaryIO) -> Loaded:
    """Read one pickle from the current position of a file. Raises ``Unreadable``."""
    reader = _Reader(file)
    try:
        root = reader.load()
    except Unreadable:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    return Loaded(root, tuple(reader.names))


_PYTHONS_OWN: Any = pickle._Unpickler  # noqa: SLF001 - `pickle` has no public name for it


class _Bounded:
    """A file that refuses reads larger than any value in a pickle from torch.save."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_READ_BYTES:
            raise Unreadable(f"it contains a value of {size} bytes")
        return self._file.read(size)

    def readline(self) -> bytes:
        return self._file.readline(MOST_LINE_BYTES)

    def readinto(self, buffer: bytearray) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Reader(_PYTHONS_OWN):  # type: ignore[misc]
    """Python's own unpickler. The one in C allocates gigabytes if four damaged bytes give a huge memo index."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(_Bounded(file), encoding="utf-8", errors="surrogateescape")
        self.names: dict[str, None] = {}

    def load_bytearray8(self) -> None:
        """Check the size before allocating memory, because eight damaged bytes can announce any number."""
        (size,) = struct.unpack("<Q", self.read(8))
        if size > MOST_READ_BYTES:
            raise Unreadable(f"it contains a value of {size} bytes")
        self.append(bytearray(self.read(size)))

    dispatch: ClassVar[dict[int, Any]] = {**_PYTHONS_OWN.dispatch, pickle.BYTEARRAY8[0]: load_bytearray8}

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module in {"torch", "torch.storage", "torch.cuda"} and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in DTYPES:
            return name
        self.names[f"{module}.{name}"] = None
        return type(name, (Opaque,), {"name": f"{module}.{name}"})

    def persistent_load(self, saved: Any) -> StorageRef:
        if not isinstance(saved, tuple) or len(saved) < 5 or saved[0] != "storage":
            raise Unreadable("a persistent id that is not a storage")
        _, dtype, key, _, numel = saved[:5]
        if dtype not in DTYPES or not isinstance(numel, int) or not 0 <= numel < MOST_ELEMENTS:
            raise Unreadable("a storage of an unknown kind")
        return StorageRef(str(key), dtype, numel)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    return _make(storage, offset, shape, stride, storage.dtype if isinstance(storage, StorageRef) else "")


def _typed_tensor(  # the signature is torch's
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Any:
    return _make(storage, offset, shape, stride, dtype)


def _make(storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any) -> Any:
    if not isinstance(storage, StorageRef) or dtype not in DTYPES:
        return Opaque(storage, offset, shape, stride)
    sizes, steps, at = tuple(map(int, shape)), tuple(map(int, stride)), int(offset)
    if len(sizes) != len(steps) or not all(0 <= number < MOST_ELEMENTS for number in (*sizes, *steps, at)):
        raise Unreadable("a tensor whose shape and strides do not fit together")
    return TensorRef(storage, at, sizes, steps, dtype)


def _first(value: Any = None, *_: Any) -> Any:
    """Replace the functions that wrap a tensor in a parameter."""
    return value


def _from_type(_make_it: Any, _kind: Any, args: Any, _state: Any = None) -> Any:
    """Rebuild a tensor of a subclass, if its function is one of ``_REBUILDERS``."""
    return _make_it(*args) if _make_it in _REBUILDERS else Opaque(args)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Replace ``_codecs.encode``, with which old protocols write bytes."""
    if encoding != "latin1" or not isinstance(text, str):
        raise Unreadable(f"bytes written in {encoding}")
    return text.encode("latin1")


def _sequence(*args: Any) -> tuple[Any, ...]:
    return tuple(args[0]) if args else ()


_REBUILDERS: tuple[Callable[..., Any], ...] = (_tensor, _typed_tensor, _first)
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): _sequence,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_qtensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._tensor", "_rebuild_from_type"): _from_type,
}

LAYERS = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes of a pickled module that hold its tensors. They do not appear in the names of its state dict."""


def walk_tensors(root: Any) -> Iterator[tuple[str, TensorRef]]:
    """Yield the path of keys and the tensor for every tensor, in file order."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, TensorRef):
            yield path, value
            continue
        if id(value) in seen or len(path) > MOST_PATH:
            continue
        children = list(_children(value))
        if children:
            seen.add(id(value))
        waiting.extend((_join(path, key), child) for key, child in reversed(children))


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, Opaque):
        yield from (("", child) for child in (value.args, value.state, value.items))  # type: ignore[attr-defined]


def _join(path: str, key: Any) -> str:
    name = "" if isinstance(key, str) and key in LAYERS else _name(key)
    return f"{path}.{name}" if path and name else path or name


def _name(key: Any) -> str:
    """Return a key as text. Python refuses to convert a number with thousands of digits."""
    if isinstance(key, int) and key.bit_length() > MOST_BITS:
        return "(a number)"
    return str(key) if isinstance(key, PLAIN_KEYS) else f"({type(key).__name__})"
