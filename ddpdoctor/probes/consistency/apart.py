"""Measures how much two tensors of the same shape and dtype differ, without copying either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.diff import Apart

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 2**18
"""Elements compared at once, a few MiB as float64. Our choice."""


@dataclass(slots=True)
class _Seen:
    """The differences found so far."""

    differing: int = 0
    first: int = -1
    largest: float | None = None
    relative: float | None = None
    not_finite: int = 0


def measure_apart(file: int, against: int, ours: Any, theirs: Any) -> Apart | None:
    """Return how far ``ours``, of one file, is from ``theirs``, or None if they cannot be subtracted."""
    import torch

    both = (ours, theirs)
    if any(one.layout is not torch.strided or one.is_quantized for one in both):
        return None
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.numel() == 0:
        return None
    seen = _Seen()
    for at, a, b in _chunks(ours.detach(), theirs.detach()):
        _look(seen, at, a, b)
    return Apart(
        file=file,
        against=against,
        differing=seen.differing,
        of=ours.numel(),
        first=tuple(int(i) for i in torch.unravel_index(torch.tensor(seen.first), ours.shape)),
        largest=seen.largest,
        relative=seen.relative,
        not_finite=seen.not_finite,
    )


def _chunks(ours: Any, theirs: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield the start index and the elements of each chunk, in logical order."""
    if ours.is_contiguous() and theirs.is_contiguous():
        pairs = zip(ours.reshape(-1).split(CHUNK), theirs.reshape(-1).split(CHUNK), strict=True)
    else:
        pairs = zip(ours.reshape(ours.shape[0], -1), theirs.reshape(theirs.shape[0], -1), strict=True)
    at = 0
    for a, b in pairs:
        yield at, a.reshape(-1), b.reshape(-1)
        at += a.numel()


def _look(seen: _Seen, at: int, ours: Any, theirs: Any) -> None:
    import torch

    other = (_bits(ours) != _bits(theirs)).any(1)
    places = other.nonzero().view(-1)
    if not len(places):
        return
    seen.first = at + int(places[0]) if seen.first < 0 else seen.first
    seen.differing += len(places)
    a, b = _numbers(ours.contiguous()[places]), _numbers(theirs.contiguous()[places])
    finite = torch.isfinite(a) & torch.isfinite(b)
    seen.not_finite += int((~finite).sum())
    if not finite.any():
        return
    a, b = a[finite], b[finite]
    off, size = (a - b).abs(), torch.maximum(a.abs(), b.abs())
    seen.largest = max(seen.largest or 0.0, float(off.max()))
    # The size is 0 only for +0 and -0.
    seen.relative = max(seen.relative or 0.0, float((off / size.clamp_min(torch.finfo(torch.float64).tiny)).max()))


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1)


def _numbers(tensor: Any) -> Any:
    """Return the tensor in a dtype that can be subtracted. Integers beyond 2**53 are rounded."""
    import torch

    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
