"""The correctness pass: makes one call with a known result, and compares every element on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective, Wrong
from ddpdoctor.probes.bandwidth.collectives import make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.collectives import Buffers
    from ddpdoctor.probes.bandwidth.group import RankGroup

ROOT = 0
"""Place in the group of the rank that broadcasts and that receives a reduction."""
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
class _Part:
    """A part of the output. From ``start`` on, it must equal the pattern from ``index`` on."""

    start: int
    count: int
    pattern: Pattern
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miss:
    """The first wrong element, and how many elements are wrong."""

    index: int = 0
    expected: float = 0.0
    found: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of the pass, the same on every rank."""

    wrong: tuple[Wrong, ...]
    first_us: float
    """Time of the call after a barrier, on the slowest rank. It is the group's first of its collective, dtype, size."""


def check(group: RankGroup, case: Case, buffers: Buffers, hosts: Sequence[str]) -> Checked:
    """Make the call once and return what is wrong on any rank. The buffers are zeros again afterwards.

    ``hosts`` is indexed by global rank. Nothing as large as a buffer is allocated. torch's errors propagate.
    """
    _fill(group, case, buffers)
    call = make_call(group, case, buffers)
    group.barrier()
    group.tracker.enter(case.collective.value, group.ranks)
    began = time.perf_counter_ns()
    call(False)  # noqa: FBT003 - async_op
    group.settle()
    ended = time.perf_counter_ns()
    group.tracker.leave()
    call_us = (ended - began) / 1e3
    own = _compare(buffers.target, _expected(group, case), tolerance(case, group))
    buffers.source.zero_()
    if buffers.target is not buffers.source:
        buffers.target.zero_()
    rows = group.gather([call_us, own.count, own.index, own.expected, own.found])
    return Checked(
        wrong=tuple(
            _wrong(case, rank, hosts[rank], row[1:]) for rank, row in zip(group.ranks, rows, strict=True) if row[1]
        ),
        first_us=max(row[0] for row in rows),
    )


def _wrong(case: Case, rank: int, host: str, row: Sequence[float]) -> Wrong:
    return Wrong(
        rank=rank,
        host=host,
        collective=case.collective,
        dtype=case.dtype,
        redop=case.redop,
        in_place=case.in_place,
        size_bytes=case.size_bytes,
        index=int(row[1]),
        expected=row[2],
        found=row[3],
        count=int(row[0]),
    )


def _fill(group: RankGroup, case: Case, buffers: Buffers) -> None:
    """Write this rank's input. Fill an output that is not also the input with a value that no result has."""
    receives = case.collective is Collective.BROADCAST and group.index != ROOT
    if receives or buffers.target is not buffers.source:
        buffers.target.fill_(255 if case.dtype == "uint8" else -1)
    if receives:
        return
    start = group.index * (case.count // group.size) if case.collective is Collective.ALL_GATHER else 0
    _write(buffers.source, put_in(case, group, group.index), start)


def _write(tensor: torch.Tensor, pattern: Pattern, index: int) -> None:
    at = 0
    for piece in pattern.pieces(index, index + tensor.numel()):
        tensor[at : at + piece.numel()].copy_(piece)
        at += piece.numel()


def _expected(group: RankGroup, case: Case) -> list[_Part]:
    """Return what this rank's output must hold. Patterns take no memory until they are iterated."""
    share, own = case.count // group.size, group.index
    if case.collective is Collective.ALL_REDUCE or (case.collective is Collective.REDUCE and own == ROOT):
        return [_Part(start=0, count=case.count, pattern=reduced(case, group), index=0)]
    if case.collective is Collective.REDUCE:
        # The contents of the other ranks' buffers are undefined.
        return []
    if case.collective is Collective.REDUCE_SCATTER:
        return [_Part(start=0, count=share, pattern=reduced(case, group), index=own * share)]
    if case.collective is Collective.BROADCAST:
        return [_Part(start=0, count=case.count, pattern=put_in(case, group, ROOT), index=0)]
    if case.collective is Collective.SEND_RECV:
        former = (own - 1) % group.size
        return [_Part(start=0, count=case.count, pattern=put_in(case, group, former), index=0)]
    gathers = case.collective is Collective.ALL_GATHER
    return [
        _Part(
            start=rank * share, count=share, pattern=put_in(case, group, rank), index=(rank if gathers else own) * share
        )
        for rank in range(group.size)
    ]


def _compare(output: torch.Tensor, parts: Sequence[_Part], allowed: float) -> _Miss:
    """Compare in pieces of one period, so that little memory is needed besides the buffers."""
    first = _Miss()
    for part in parts:
        at = part.start
        for piece in part.pattern.pieces(part.index, part.index + part.count):
            missed = _compare_piece(output[at : at + piece.numel()], piece, at, allowed)
            if missed is not None:
                known = first if first.count else missed
                first = _Miss(
                    index=known.index, expected=known.expected, found=known.found, count=first.count + missed.count
                )
            at += piece.numel()
    return first


def _compare_piece(found: torch.Tensor, expected: torch.Tensor, start: int, allowed: float) -> _Miss | None:
    import torch

    if not allowed and torch.equal(found, expected):
        return None
    if allowed:
        # Also true for NaN.
        differs = ~torch.isclose(found.to(torch.float64), expected, rtol=allowed, atol=0.0)
    else:
        differs = found != expected
    places = differs.nonzero()
    if not places.numel():
        return None
    place = int(places[0])
    return _Miss(
        index=start + place, expected=float(expected[place]), found=float(found[place]), count=int(places.numel())
    )


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
        # A rank's input: its own value if it is one of the next active ranks after place, else neutral
        size = group.size
        import torch

        is_active = (rank - places) % size < _active(redop, size)
        values = _active_values(redop, torch.full_like(places, rank), size, places)
        return torch.where(is_active, values, _OPERATORS[redop].neutral)

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
