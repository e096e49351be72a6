"""The correctness pass: makes one call with a known result, and compares every element on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective, Wrong
from ddpdoctor.probes.bandwidth.collectives import make_call
from ddpdoctor.probes.bandwidth.pattern import put_in, reduced, tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.buffers import Buffers
    from ddpdoctor.probes.bandwidth.group import RankGroup
    from ddpdoctor.probes.bandwidth.pattern import Pattern

ROOT = 0
"""Place in the group of the rank that broadcasts and that receives a reduction."""


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
    call_us = _make(group, case, buffers)
    own = _compare(buffers.target, _expected(group, case), tolerance(case, group))
    _clear(buffers)
    rows = group.gather([call_us, own.count, own.index, own.expected, own.found])
    return Checked(
        wrong=tuple(
            _wrong(case, rank, hosts[rank], row[1:]) for rank, row in zip(group.ranks, rows, strict=True) if row[1]
        ),
        first_us=max(row[0] for row in rows),
    )


def _make(group: RankGroup, case: Case, buffers: Buffers) -> float:
    call = make_call(group, case, buffers)
    group.barrier()
    group.tracker.enter(case.collective.value, group.ranks)
    began = time.perf_counter_ns()
    call(False)  # noqa: FBT003 - async_op
    group.settle()
    ended = time.perf_counter_ns()
    group.tracker.leave()
    return (ended - began) / 1e3


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


def _clear(buffers: Buffers) -> None:
    buffers.source.zero_()
    if buffers.target is not buffers.source:
        buffers.target.zero_()


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
            start=rank * share,
            count=share,
            pattern=put_in(case, group, rank),
            index=(rank if gathers else own) * share,
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
