"""What ranks put into their buffers for the correctness pass, and what has to come out.

Every value depends on the rank and on the index, every result is a whole number of 0 to 127, and so is what any part
of the ranks make together: exact in int8 as in bfloat16, whatever the order of the arithmetic. With many ranks that
holds because at each index a few of them, other ones at the next, put in something, and the rest what changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.group import Group

LARGEST = 127
"""Of int8."""
PERIODS = {"cpu": 65521, "cuda": 1048573}
"""Values are worked out for so many indexes and used again from there on, rotated anew each time. Primes, so that no
chunk of a ring or tree is a multiple of it; on the CPU as many as stay in its cache, on a GPU for few launches."""
ROTATION = 7919
WORKING_BYTES = 64
"""For each index of a period: so much is allocated at once at most, as a test counts."""
_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """How many ranks put in something at an index, and what."""

    active: int
    low: int
    high: Callable[[int], int]
    """The largest value, where so many ranks put in one."""
    neutral: int
    """What the others put in."""


_OPERATORS = {
    "sum": _Operator(active=16, low=0, high=lambda active: LARGEST // active, neutral=0),
    # Two ranks: an average may be rounded at each step, and the fewer there are the closer the result can be held.
    "avg": _Operator(active=2, low=0, high=lambda active: LARGEST // active, neutral=0),
    "prod": _Operator(active=6, low=1, high=lambda _: 2, neutral=1),
    "min": _Operator(active=16, low=0, high=lambda _: LARGEST - 1, neutral=LARGEST),
    "max": _Operator(active=16, low=1, high=lambda _: LARGEST, neutral=0),
}


class Pattern:
    """Values by index. At most one period of them is in memory, and nothing where nobody asks."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], period: int, device: torch.device) -> None:
        """``make`` returns the values at places, which are below the period."""
        self._make, self._period, self._device = make, period, device

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield the values of the indexes from ``start`` to ``stop``, in pieces of a period at most."""
        import torch

        made = None
        if stop - start >= self._period:
            made = self._values(0, self._period)
            # Twice, so that every rotation of it is one piece.
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


def put_in(case: Case, group: Group, rank: int) -> Pattern:
    """Return what a rank of the group, by its place in it, puts into its buffer."""
    redop = case.redop

    def make(places: torch.Tensor) -> torch.Tensor:
        if redop is None:
            return _hash(rank, places) % (LARGEST + 1)
        return _share_of(redop, rank, group.size, places)

    return _pattern(make, case, group)


def reduced(case: Case, group: Group) -> Pattern:
    """Return what all ranks of the group make together; in float64 where it need not be exact."""
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


def tolerance(case: Case, group: Group) -> float:
    """Return how far a result may be off, relatively; 0 where it has to be exact.

    Backends average by a division at the end, or a multiplication of each value first. Both are exact where the number
    of ranks is a power of two. Elsewhere each value, their sum and 1/n are rounded once.
    """
    import torch

    if case.redop != "avg" or group.size & (group.size - 1) == 0:
        return 0.0
    return 2 * float(torch.finfo(getattr(torch, case.dtype)).eps)


def working_bytes(case: Case, group: Group) -> int:
    """Return what the pass takes at most beside the buffers, whatever the number of ranks."""
    return min(case.count, _period(group)) * WORKING_BYTES


def _pattern(make: Callable[[torch.Tensor], torch.Tensor], case: Case, group: Group) -> Pattern:
    import torch

    dtype: torch.dtype = getattr(torch, case.dtype)
    return Pattern(lambda places: make(places).to(dtype), _period(group), group.device)


def _period(group: Group) -> int:
    return PERIODS[group.device.type]


def _active(redop: str, size: int) -> int:
    return min(size, _OPERATORS[redop].active)


def _share_of(redop: str, rank: int, size: int, places: torch.Tensor) -> torch.Tensor:
    """Return what a rank puts in: a value of its own where it is one of those that follow ``place`` round the group."""
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
    """Return numbers below 2**32 without a pattern of their own; multipliers of xxHash and of Knuth."""
    mixed = (places * 2654435761 + ranks * 2246822519 + 374761393) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 668265263) & _MASK
    return mixed ^ (mixed >> 13)
