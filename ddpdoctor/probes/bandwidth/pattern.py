"""The ranks' inputs for the correctness pass, and the expected results.

Every value depends on the rank and the index. Every result and every partial result is a whole number from 0 to 127, so
it is exact in int8 and in bfloat16, in any order of the arithmetic. To keep results small with many ranks, only a few
ranks contribute at each index. These change from index to index, and the others contribute a neutral value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.group import RankGroup

LARGEST = 127
"""The largest int8."""
PERIODS = {"cpu": 65521, "cuda": 1048573}
"""Values are computed for this many indexes and then repeated, rotated differently each time. The periods are primes,
so no chunk of a ring or tree is a multiple. On the CPU a period fits the cache; on a GPU it needs few launches."""
ROTATION = 7919
WORKING_BYTES = 64
"""The most memory allocated at once, per index of a period. A test checks this."""
_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """How many ranks contribute at an index, and which values."""

    active: int
    low: int
    high: Callable[[int], int]
    """The largest value when this many ranks contribute."""
    neutral: int
    """The value of the other ranks, which does not change the result."""


_OPERATORS = {
    "sum": _Operator(active=16, low=0, high=lambda active: LARGEST // active, neutral=0),
    # Two ranks: an average may be rounded at each step, so fewer ranks allow a tighter tolerance.
    "avg": _Operator(active=2, low=0, high=lambda active: LARGEST // active, neutral=0),
    "prod": _Operator(active=6, low=1, high=lambda _: 2, neutral=1),
    "min": _Operator(active=16, low=0, high=lambda _: LARGEST - 1, neutral=LARGEST),
    "max": _Operator(active=16, low=1, high=lambda _: LARGEST, neutral=0),
}


class Pattern:
    """Values by index. At most one period of them is in memory, and nothing until ``pieces`` is iterated."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], period: int, device: torch.device) -> None:
        """``make`` returns the values at the given places, which are all below ``period``."""
        self._make, self._period, self._device = make, period, device

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield the values of the indexes from ``start`` to ``stop``, in pieces of a period at most."""
        import torch

        made = None
        if stop - start >= self._period:
            made = self._values(0, self._period)
            # Doubled, so that every rotation is one contiguous piece.
            made = torch.cat([made, made])
        while start < stop:
            block, place = divmod(start, self._period)
            count = min(stop - start, self._period - place)
            begin = (place + ROTATION * block) % self._period
            yield self._values(begin, count) if made is None else made[begin : begin + count]
            start += count

    def _values(self, begin: int, count: int) -> torch.Tensor:
        import torch

        places = torch.arange(begin, begin + count, dtype=torch.int64, device=self._device)
        return self._make(places.remainder_(self._period))


def put_in(case: Case, group: RankGroup, rank: int) -> Pattern:
    """Return the input of a rank. ``rank`` is its place in the group."""
    redop = case.redop

    def make(places: torch.Tensor) -> torch.Tensor:
        if redop is None:
            return _hash(rank, places) % (LARGEST + 1)
        return _share_of(redop, rank, group.size, places)

    return _pattern(make, case, group)


def reduced(case: Case, group: RankGroup) -> Pattern:
    """Return the reduction over all ranks of the group, in float64 if it may be inexact."""
    import torch

    redop = case.redop
    assert redop is not None

    def make(places: torch.Tensor) -> torch.Tensor:
        result = torch.full_like(places, _OPERATORS[redop].neutral)
        for offset in range(_active(redop, group.size)):
            ranks = (places + offset) % group.size
            result = _combine(redop, result, _active_values(redop, ranks, group.size, places))
        return result.to(torch.float64) / group.size if redop == "avg" else result

    return Pattern(make, _period(group), group.device) if tolerance(case, group) else _pattern(make, case, group)


def tolerance(case: Case, group: RankGroup) -> float:
    """Return the allowed relative error of a result, 0 if it must be exact.

    Backends average by dividing at the end or by multiplying each value first. Both are exact if the number of ranks is
    a power of two. Otherwise each value, their sum and 1/n are rounded once.
    """
    import torch

    if case.redop != "avg" or group.size & (group.size - 1) == 0:
        return 0.0
    return 2 * float(torch.finfo(getattr(torch, case.dtype)).eps)


def working_bytes(case: Case, group: RankGroup) -> int:
    """Return the most memory that the pass takes besides the buffers. It does not depend on the number of ranks."""
    return min(case.count, _period(group)) * WORKING_BYTES


def _pattern(make: Callable[[torch.Tensor], torch.Tensor], case: Case, group: RankGroup) -> Pattern:
    import torch

    dtype: torch.dtype = getattr(torch, case.dtype)
    return Pattern(lambda places: make(places).to(dtype), _period(group), group.device)


def _period(group: RankGroup) -> int:
    return PERIODS[group.device.type]


def _active(redop: str, size: int) -> int:
    return min(size, _OPERATORS[redop].active)


def _share_of(redop: str, rank: int, size: int, places: torch.Tensor) -> torch.Tensor:
    """Return a rank's input: its own value if it is one of the next active ranks after ``place``, else neutral."""
    import torch

    is_active = (rank - places) % size < _active(redop, size)
    values = _active_values(redop, torch.full_like(places, rank), size, places)
    return torch.where(is_active, values, _OPERATORS[redop].neutral)


def _active_values(redop: str, ranks: torch.Tensor, size: int, places: torch.Tensor) -> torch.Tensor:
    operator = _OPERATORS[redop]
    high = operator.high(_active(redop, size))
    return _hash(ranks, places) % (high - operator.low + 1) + operator.low


def _combine(redop: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    import torch

    if redop == "prod":
        return left * right
    if redop in {"min", "max"}:
        return torch.minimum(left, right) if redop == "min" else torch.maximum(left, right)
    return left + right


def _hash(ranks: torch.Tensor | int, places: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random numbers below 2**32, with the multipliers of xxHash and Knuth."""
    mixed = (places * 2654435761 + ranks * 2246822519 + 374761393) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 668265263) & _MASK
    return mixed ^ (mixed >> 13)
