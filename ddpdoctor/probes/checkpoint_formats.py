"""Reads the formats of checkpoint files without running anything in them: pickles, zip archives, safetensors."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from ddpdoctor.recorder.storage.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Bytes of an element, by torch's name of the dtype.
DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "qint32": 4, "qint8": 1, "quint8": 1,
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
    "QInt32Storage": "qint32", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
}  # fmt: skip
MOST_ELEMENTS = 2**60  # our choice: the limit of storage sizes, shapes and offsets
MOST_BITS = 1024
MOST_READ_BYTES = 2**26  # our choice: the limit of one value, such as a string or a NumPy array
MOST_LINE_BYTES = 2**16
MOST_PATH = 4096  # Our choice: the longest path of keys, in characters. No state dict is nested more deeply.
PLAIN_KEYS = (str, bytes, int, float, bool, type(None))
_PYTHONS_OWN: Any = pickle._Unpickler  # noqa: SLF001 - `pickle` has no public name for it
# Attributes of a pickled module that hold its tensors. They do not appear in the names of its state dict.
LAYERS = frozenset({"_modules", "_parameters", "_buffers"})
LOCAL_HEADER = struct.Struct("<4s22xHH")  # only the signature and the lengths of name and extra field are read
LOCAL_SIGNATURE = b"PK\x03\x04"
PICKLE = "data.pkl"
CHUNK_BYTES = 4 * 2**20
# Our choice: an index names tensors but does not hold them. For 100,000 tensors it has about 20 MB.
MOST_INDEX_BYTES = 2**28
# Search block. The next header follows within some 100 bytes: records are aligned to 64 bytes, or as the user set.
SEARCH_BYTES = 2**16
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
STORAGE_LENGTH = struct.Struct("<q")
HEADER_LENGTH = struct.Struct("<Q")
MOST_HEADER_BYTES = 100 * 10**6  # the format's own limit
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


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
        return self.numel * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: which part of which storage."""

    storage: StorageRef
    offset: int  # offset into the storage, in elements of ``dtype``
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Opaque:
    """Stands for the result of an unknown function or class, which is not called."""

    args: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]

    def __new__(cls, *args: Any, **_: Any) -> Opaque:  # noqa: PYI034 - the unpickler makes it in its own ways
        made = object.__new__(cls)
        made.args, made.state, made.items = args, None, {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments."""

    def __call__(self, *_: Any, **__: Any) -> Opaque:
        return Opaque()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.items[len(self.items)] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """What a file claims to hold, and which parts of it are present."""

    root: Any = None
    names: tuple[str, ...] = ()  # the unknown functions and classes that its pickle names
    problem: str = ""  # why an archive's index could not be read, if it could not
    starts: dict[str, int]  # where the bytes of each complete storage begin, by its key
    is_whole: bool = True
    damaged: tuple[str, ...] = ()  # records whose checksum is wrong, without the archive's name before them
    has_checksums: bool = False


def read_pickle(file: BinaryIO) -> tuple[Any, tuple[str, ...]]:
    """Return what a pickle holds, and which unknown functions and classes it names. Raises ``Unreadable``."""
    reader = _Reader(_Bounded(file), encoding="utf-8", errors="surrogateescape")
    reader.names = {}
    try:
        root = reader.load()
    except Unreadable:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    return root, tuple(reader.names)


class _Bounded:
    """A file that refuses to read more than any value in a pickle of torch.save has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_READ_BYTES:
            raise Unreadable(f"it contains a value of {size} bytes")
        return self._file.read(size)

    def readline(self) -> bytes:
        return self._file.readline(MOST_LINE_BYTES)


class _Reader(_PYTHONS_OWN):  # type: ignore[misc]
    """Python's own unpickler. The one in C allocates gigabytes if four damaged bytes give a huge memo index."""

    names: dict[str, None]  # the unknown functions and classes that it has met

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
        return type(name, (Opaque,), {})

    def persistent_load(self, saved: Any) -> StorageRef:
        if not isinstance(saved, tuple) or len(saved) < 5 or saved[0] != "storage":
            raise Unreadable("a persistent id that is not a storage")
        _, dtype, key, _, numel = saved[:5]
        if dtype not in DTYPES or not isinstance(numel, int) or not 0 <= numel < MOST_ELEMENTS:
            raise Unreadable("a storage of an unknown kind")
        return StorageRef(str(key), dtype, numel)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    dtype = storage.dtype if isinstance(storage, StorageRef) else ""
    return _typed_tensor(storage, offset, shape, stride, None, None, dtype)


def _typed_tensor(  # the signature is torch's
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Any:
    if not isinstance(storage, StorageRef) or dtype not in DTYPES:
        return Opaque(storage, offset, shape, stride)
    sizes, steps, at = tuple(map(int, shape)), tuple(map(int, stride)), int(offset)
    if len(sizes) != len(steps) or not all(0 <= number < MOST_ELEMENTS for number in (*sizes, *steps, at)):
        raise Unreadable("a tensor whose shape and strides do not fit together")
    return TensorRef(storage, at, sizes, steps, dtype)


def _first(value: Any = None, *_: Any) -> Any:
    return value


def _from_type(_make_it: Any, _kind: Any, args: Any, _state: Any = None) -> Any:
    """Rebuild a tensor of a subclass, if its function is one of ``_REBUILDERS``."""
    return _make_it(*args) if _make_it in _REBUILDERS else Opaque(args)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Replace ``_codecs.encode``, with which old protocols write bytes."""
    if encoding != "latin1" or not isinstance(text, str):
        raise Unreadable(f"bytes written in {encoding}")
    return text.encode("latin1")


_REBUILDERS: tuple[Callable[..., Any], ...] = (_tensor, _typed_tensor, _first)
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_qtensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._tensor", "_rebuild_from_type"): _from_type,
}


def walk_tensors(root: Any) -> Iterator[tuple[str, TensorRef]]:
    """Yield every tensor after its path of keys, in file order."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, TensorRef):
            yield path, value
            continue
        if id(value) in seen or len(path) > MOST_PATH:
            continue
        children: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            children += value.items()
        elif isinstance(value, list | tuple):
            children += enumerate(value)
        elif isinstance(value, Opaque):
            children += (("", child) for child in (value.args, value.state, value.items))
        if children:
            seen.add(id(value))
        for key, child in reversed(children):
            if isinstance(key, int) and key.bit_length() > MOST_BITS:
                name = "(a number)"  # Python refuses to convert a number with thousands of digits
            elif isinstance(key, PLAIN_KEYS):
                name = "" if key in LAYERS else str(key)
            else:
                name = f"({type(key).__name__})"
            waiting.append((f"{path}.{name}" if path and name else path or name, child))


def read_archive(file: BinaryIO, *, checksums: bool = True) -> FileIndex:
    """Read an archive's index and verify every record's checksum. Raises ``zipfile.BadZipFile``."""
    try:
        opened = zipfile.ZipFile(file)
    except Exception as error:
        # With a flipped bit in the directory, zipfile may raise anything.
        raise zipfile.BadZipFile(str(error)) from error
    with opened as archive:
        records = {_base_name(info.filename): info for info in archive.infolist()}
        has_sums = any(info.CRC for info in records.values())
        damaged = tuple(_damaged(archive, records)) if has_sums and checksums else ()
        info, problem = records.get(PICKLE), ""
        root, names = None, tuple[str, ...]()
        if info is None:
            problem = f"it holds no {PICKLE}: it is a zip archive that torch.save did not write"
        elif (start := _start(file, info)) < 0:
            problem = f"the header of {PICKLE} is damaged"
        elif info.file_size > MOST_INDEX_BYTES:
            problem = f"{PICKLE} should have {info.file_size} bytes"
        else:
            try:
                file.seek(start)
                root, names = read_pickle(io.BytesIO(file.read(info.file_size)))
            except Unreadable as error:
                problem = str(error)
        sound = (name for name in records if name.startswith("data/") and name not in damaged)
        starts = {name.removeprefix("data/"): _start(file, records[name]) for name in sound}
    return FileIndex(root=root, names=names, problem=problem, starts=starts, damaged=damaged, has_checksums=has_sums)


def _base_name(name: str) -> str:
    """Return a record's name without the archive's name before it."""
    return name.partition("/")[2] or name


def _damaged(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo]) -> Iterator[str]:
    for name, info in records.items():
        try:
            with archive.open(info) as record:
                while record.read(CHUNK_BYTES):
                    pass
        except Exception:  # noqa: BLE001 - with a flipped bit in a header, zipfile may raise anything
            yield name


def _start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin, or -1 if its header is damaged."""
    header = _header_at(file, info.header_offset)
    return -1 if header is None else header[1]


def read_rest(file: BinaryIO, size_bytes: int) -> FileIndex | None:
    """Read a truncated archive: its index comes first, and the other records follow. Return None without an index."""
    first = _header_at(file, 0)
    if first is None or _base_name(first[0]) != PICKLE:
        return None
    file.seek(first[1])
    try:
        root, names = read_pickle(file)
    except Unreadable:
        return None
    storages = {ref.storage.key: ref.storage for _, ref in walk_tensors(root)}
    position = first[1]
    starts: dict[str, int] = {}
    while (found := _next_header(file, position, size_bytes)) is not None:
        name, position = found
        storage = storages.get(_base_name(name).removeprefix("data/")) if _base_name(name).startswith("data/") else None
        if storage is not None:
            if position + storage.size_bytes <= size_bytes:
                starts[storage.key] = position
            position += storage.size_bytes
    return FileIndex(root=root, names=names, starts=starts, is_whole=False)


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


def read_legacy(file: BinaryIO, size_bytes: int) -> FileIndex | None:
    """Read a file of the old format; None for another format. Raises ``Unreadable`` if damaged."""
    file.seek(0)
    try:
        if read_pickle(file)[0] != MAGIC_NUMBER:
            return None
    except Unreadable:
        return None
    for _ in ("protocol version", "system"):
        read_pickle(file)
    root, names = read_pickle(file)
    try:
        keys, _ = read_pickle(file)
    except Unreadable:
        return FileIndex(root=root, names=names, starts={}, is_whole=False)
    if not isinstance(keys, list):
        raise Unreadable("its storages are not listed")
    storages = {ref.storage.key: ref.storage for _, ref in walk_tensors(root)}
    starts: dict[str, int] = {}
    for key in map(str, keys):
        length = file.read(STORAGE_LENGTH.size)
        storage = storages.get(key)
        if len(length) < STORAGE_LENGTH.size or storage is None:
            break
        if STORAGE_LENGTH.unpack(length)[0] != storage.numel:
            raise Unreadable(f"storage {key} should have {storage.numel} elements, but has another length")
        start = file.tell()
        if start + storage.size_bytes > size_bytes:
            break
        starts[key] = start
        file.seek(start + storage.size_bytes)
    return FileIndex(root=root, names=names, starts=starts, is_whole=len(starts) == len(keys))


def read_safetensors(file: BinaryIO, size_bytes: int) -> FileIndex:
    """Read the tensors of the header, by name, each with a storage of the same name. Raises ``Unreadable``."""
    file.seek(0)
    (length,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
    try:
        entries = {name: entry for name, entry in parse_json(file.read(length)).items() if name != "__metadata__"}
        tensors: dict[str, TensorRef] = {}
        begins: dict[str, int] = {}
        for name, entry in entries.items():
            shape, dtype = tuple(map(_natural, entry["shape"])), SAFETENSORS_DTYPES[entry["dtype"]]
            *strides, numel = accumulate(reversed(shape), mul, initial=1)
            tensors[name] = TensorRef(StorageRef(name, dtype, numel), 0, shape, tuple(reversed(strides)), dtype)
            begins[name] = HEADER_LENGTH.size + length + _natural(entry["data_offsets"][0])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Unreadable(f"its header cannot be read ({type(error).__name__})") from error
    starts = {name: start for name, start in begins.items() if start + tensors[name].storage.size_bytes <= size_bytes}
    return FileIndex(root=tensors, starts=starts, is_whole=len(starts) == len(tensors))


def _natural(value: Any) -> int:
    """Return a size or an offset if it is possible. Raises ``ValueError``."""
    if type(value) is not int or not 0 <= value < MOST_ELEMENTS:
        raise ValueError("neither a size nor an offset")
    return value
