"""Checks the values of tensors in a file through a memory map, so that only the needed parts are read."""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.saved import OddValues
from ddpdoctor.recorder.replicas.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ddpdoctor.probes.checkpoint.pickles import TensorRef

CHUNK = 2**22
"""Our choice: elements checked at once. Temporary tensors stay small, and a 30 GB file is not loaded as a whole."""
MOST_REPEATED = 2**24
"""Our choice: the most elements of a tensor larger than its storage. Damaged bytes can announce any number."""
WITH_FRACTIONS = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"}
)
"""Dtypes that have NaN and that torch can check on a CPU."""


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file with private pages. torch wants a writable buffer, but nothing is written to it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as bytes_of_file:
        yield bytes_of_file


def check_values(
    buffer: mmap.mmap, tensors: Iterable[tuple[str, TensorRef]], starts: Mapping[str, int]
) -> tuple[tuple[OddValues, ...], tuple[str, ...]]:
    """Return the tensors with values that are not finite, and the names of those that could not be checked."""
    found, unseen = [], []
    for name, ref in tensors:
        if ref.dtype not in WITH_FRACTIONS or 0 in ref.shape:
            continue
        tensor = open_tensor(buffer, ref, starts)
        if tensor is None:
            unseen.append(name)
            continue
        values = _odd_values(name, tensor)
        if values is not None:
            found.append(values)
    return tuple(found), tuple(unseen)


def digest_tensors(
    buffer: mmap.mmap, tensors: Iterable[tuple[str, TensorRef]], starts: Mapping[str, int]
) -> dict[str, str]:
    """Return dtype, shape and fingerprint of each readable tensor as text, by name."""
    found = {}
    for name, ref in tensors:
        tensor = open_tensor(buffer, ref, starts)
        if tensor is not None:
            found[name] = f"{ref.dtype} {list(ref.shape)} {fingerprints([tensor]).hex()}"
    return found


def open_tensor(buffer: mmap.mmap, ref: TensorRef, starts: Mapping[str, int]) -> Any | None:
    """Return a tensor as a view of the map, or None if its record is missing or too short."""
    import torch

    start, dtype = starts.get(ref.storage.key, -1), getattr(torch, ref.dtype, None)
    if start < 0 or dtype is None:
        return None
    if ref.dtype.startswith("q"):  # quantized: torch reads a buffer only as plain integers
        dtype = getattr(torch, ref.dtype.removeprefix("q"))
    size = dtype.itemsize
    numel = prod(ref.shape)
    if numel > max(MOST_REPEATED, ref.storage.numel):
        return None
    if numel == 0:
        return torch.empty(0, dtype=dtype) if max(ref.shape) > MOST_REPEATED else torch.empty(ref.shape, dtype=dtype)
    count = 1 + ref.offset + sum((length - 1) * step for length, step in zip(ref.shape, ref.stride, strict=True))
    if count * size > max(ref.storage.size_bytes, 0) or start + count * size > len(buffer):
        return None
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
    return flat.as_strided(ref.shape, ref.stride, ref.offset)


def _odd_values(name: str, tensor: Any) -> OddValues | None:
    """Count the values that are not finite. One pass is enough for most tensors, because they have none."""
    import torch

    chunks = list(_chunks(tensor))
    if all(bool(torch.isfinite(chunk).all()) for chunk in chunks):
        return None
    nan = above = below = plain = 0
    for chunk in chunks:
        nan += int(torch.isnan(chunk).sum())
        above += int(torch.isposinf(chunk).sum())
        below += int(torch.isneginf(chunk).sum())
        plain += int((torch.isfinite(chunk) & (chunk != 0)).sum())
    return OddValues(name=name, of=tensor.numel(), nan=nan, above=above, below=below, plain=plain)


def _chunks(tensor: Any) -> Iterator[Any]:
    """Yield the values in pieces that torch can compute with on a CPU, complex values as pairs of real ones."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    pieces = (
        tensor.reshape(-1).split(CHUNK) if tensor.is_contiguous() else (row for row in tensor.reshape(1, *tensor.shape))
    )
    for piece in pieces:
        # torch cannot compare one-byte floats on a CPU.
        yield piece.float() if piece.element_size() == 1 else piece
