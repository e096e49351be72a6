"""Turns a timeline into compact data for the page's script, and into the rows of its table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.timeline import SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.timeline import Lane, Span, Timeline

TICKS_PER_MS = 100
"""Times are whole hundredths of a millisecond: 10 us is finer than a screen shows."""
ABSENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """A row of the table of a timeline: ranks that did the same, and the last thing that they did."""

    ranks: tuple[int, ...]
    state: str
    blamed: bool
    last: str


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline for the script. ``timeline_data.js`` reads it.

    ``whats`` holds what spans have in common: [kind, label, group, shape, place]. A lane's spans are one flat list,
    four numbers each: what, start after the start of the span before, duration (-1: not ended), number (-1: none).
    """
    whats: dict[tuple[Any, ...], int] = {}
    lanes = [
        {
            "rank": lane.rank,
            "host": lane.host,
            "state": lane.state,
            "blamed": lane.blamed,
            "coarse": _pack(lane.coarse, whats),
            "detail": _pack(lane.detail, whats),
        }
        for lane in timeline.lanes
    ]
    return {
        "kinds": [kind.value for kind in SpanKind],
        "startedAt": timeline.started_at,
        "lengthMs": timeline.length_ms,
        "detailFromMs": timeline.detail_from_ms,
        "lanes": lanes,
        "classes": _classes(timeline),
        "events": [
            {"atMs": one.at_ms, "label": one.label, "ranks": one.ranks, "fault": one.fault} for one in timeline.events
        ],
        "whats": list(whats),
    }


def lane_rows(timeline: Timeline) -> tuple[LaneRow, ...]:
    """Return a row for each class of ranks, those to blame first."""
    by_rank = {lane.rank: lane for lane in timeline.lanes}
    rows = []
    for ranks in _classes(timeline):
        lanes = [by_rank[rank] for rank in ranks]
        lane = next((one for one in lanes if one.detail), lanes[0])
        rows.append(
            LaneRow(
                ranks=tuple(ranks),
                state=lane.state,
                blamed=any(one.blamed for one in lanes),
                last=_describe_last(lane),
            )
        )
    return tuple(rows)


def _classes(timeline: Timeline) -> list[list[int]]:
    """Return the classes, those to blame first. A rank without a lane is left out, one without a class has its own."""
    blamed = {lane.rank: lane.blamed for lane in timeline.lanes}
    classes = [[rank for rank in ranks if rank in blamed] for ranks in timeline.classes]
    known = {rank for ranks in classes for rank in ranks}
    classes += [[rank] for rank in blamed if rank not in known]
    return sorted((ranks for ranks in classes if ranks), key=lambda ranks: not any(blamed[rank] for rank in ranks))


def _pack(spans: Iterable[Span], whats: dict[tuple[Any, ...], int]) -> list[int]:
    kinds = list(SpanKind)
    packed: list[int] = []
    before = 0
    for span in sorted(spans, key=lambda span: span.start_ms):
        key = (kinds.index(span.kind), span.label, span.group, span.shape, span.place)
        start = _ticks(span.start_ms)
        duration = ABSENT if span.end_ms is None else max(0, _ticks(span.end_ms) - start)
        number = ABSENT if span.number is None else span.number
        packed += [whats.setdefault(key, len(whats)), start - before, duration, number]
        before = start
    return packed


def _ticks(time_ms: float) -> int:
    return round(time_ms * TICKS_PER_MS) if math.isfinite(time_ms) else 0


def _describe_last(lane: Lane) -> str:
    """Describe the last call of a lane, else the last thing that it did."""
    spans = lane.detail or lane.coarse
    calls = [span for span in spans if span.kind in {SpanKind.COLLECTIVE, SpanKind.POINT_TO_POINT}] or spans
    if not calls:
        return ""
    last = max(calls, key=lambda span: span.start_ms)
    number = "" if last.number is None else f"number {last.number}"
    group = f"in {last.group}" if last.group else ""
    began = f"from {last.start_ms / 1e3:.2f} s"
    ended = "not ended" if last.end_ms is None else f"to {last.end_ms / 1e3:.2f} s"
    return ", ".join(part for part in (last.label, group, number, last.shape, last.place, f"{began}, {ended}") if part)
