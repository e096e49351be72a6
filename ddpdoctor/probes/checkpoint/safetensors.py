"""Reads safetensors: eight bytes with the length of a JSON header, the header, and the tensors. No checksums.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from ddpdoctor.probes.checkpoint.pickles import MOST_ELEMENTS, StorageRef, TensorRef, Unreadable
from ddpdoctor.recorder.storage.files import parse_json

LENGTH = struct.Struct("<Q")
MOST_HEADER_BYTES = 100 * 10**6
"""The format's own limit."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Safetensors:
    """What the header announces, even if the file is too short for it."""

    tensors: dict[str, TensorRef]
    """The tensors by name. Each has its own storage, keyed by the same name."""
    starts: dict[str, int]
    """Where the bytes of each complete tensor begin."""


def is_safetensors(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` may be safetensors."""
    return len(head) > LENGTH.size and 2 <= LENGTH.unpack_from(head)[0] <= MOST_HEADER_BYTES and head[8:9] == b"{"


def read_safetensors(file: BinaryIO, size_bytes: int) -> Safetensors:
    """Read the header. Raises ``Unreadable``."""
    file.seek(0)
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    try:
        header = parse_json(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _read_entry(name, entry) for name, entry in entries.items()}
        begins = {name: LENGTH.size + length + _whole(entry["data_offsets"][0]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Unreadable(f"its header cannot be read ({type(error).__name__})") from error
    starts = {
        name: start for name, start in begins.items() if start + tensors[name].storage.size_bytes <= size_bytes
    }  # fmt: skip
    return Safetensors(tensors=tensors, starts=starts)


def _read_entry(name: str, entry: Any) -> TensorRef:
    shape = tuple(map(_whole, entry["shape"]))
    stride, numel = [], 1
    for size in reversed(shape):
        stride.append(numel)
        numel *= size
    dtype = DTYPES[entry["dtype"]]
    return TensorRef(StorageRef(name, dtype, numel), 0, shape, tuple(reversed(stride)), dtype)


def _whole(value: Any) -> int:
    """Return a size or an offset. Raises ``ValueError`` if it is not an integer in a possible range."""
    if type(value) is not int or not 0 <= value < MOST_ELEMENTS:
        raise ValueError("neither a size nor an offset")
    return value
