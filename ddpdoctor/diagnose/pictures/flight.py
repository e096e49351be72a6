"""The timeline of a job that nobody watched, from the dumps of torch's flight recorders."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.pictures.classes import blamed_ranks, classes_of, short_place
from ddpdoctor.diagnose.pictures.clock import TimelineClock
from ddpdoctor.diagnose.pictures.timeline import (
    LANE_DETAIL_SPANS,
    MOST_DETAIL_SPANS,
    MOST_DETAILED,
    choose_detailed,
    since,
)
from ddpdoctor.model.timeline import Lane, Span, SpanKind, Timeline, TimelineEvent
from ddpdoctor.rules.evidence.stacks import innermost

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.findings import Finding, RankRow
    from ddpdoctor.model.flight import FlightCall, FlightDump, FlightGroup

AFTER_SHARE = 0.1
"""Our choice: dumps do not say when they were made. What had not ended is drawn for so much of the time before."""


def flight_timeline(
    dumps: Iterable[FlightDump], rows: Mapping[int, RankRow], verdict: Finding | None
) -> Timeline | None:
    """Return the timeline of the ranks that left dumps, or None if no dump has times.

    Times are those of the hosts' wall clocks. How far these differ is not known.
    """
    by_rank = {one.rank: one for one in dumps if one.rank in rows and one.rank is not None and _times(one)}
    if not by_rank:
        return None
    blamed = blamed_ranks(verdict)
    clock = _clock(by_rank.values())
    classes = classes_of({rank: rows[rank] for rank in by_rank}, blamed)
    shown = choose_detailed(classes, blamed)
    most = min(LANE_DETAIL_SPANS, MOST_DETAIL_SPANS // min(len(shown), MOST_DETAILED))
    details = {rank: _detail(by_rank[rank], rows[rank], clock)[-most:] for rank in shown}
    from_ms = max((spans[0].start_ms for spans in details.values() if len(spans) == most), default=0.0)
    return Timeline(
        started_at=datetime.fromtimestamp(clock.began_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds"),
        length_ms=clock.until_ms,
        detail_from_ms=from_ms,
        lanes=tuple(
            _lane(dump, rows[rank], clock, tuple(since(details.get(rank, []), from_ms)), blamed=rank in blamed)
            for rank, dump in sorted(by_rank.items())
        ),
        classes=classes,
        events=tuple(_fault(by_rank, verdict, clock)),
    )


def _times(dump: FlightDump) -> list[int]:
    """Return the known times of a dump's calls."""
    groups = [time for group in dump.groups for time in (*group.last_made_ns, *group.last_ended_ns) if time > 0]
    return [*groups, *(one.created_ns for group in dump.groups for one in group.transfers if one.created_ns > 0)]


def _clock(dumps: Iterable[FlightDump]) -> TimelineClock:
    times = [time for dump in dumps for time in (*_times(dump), dump.first_ns or 0) if time > 0]
    began_ns, last_ns = min(times), max(times)
    return TimelineClock(began_ns=began_ns, until_ns=last_ns + max(1_000_000, int((last_ns - began_ns) * AFTER_SHARE)))


def _lane(dump: FlightDump, row: RankRow, clock: TimelineClock, detail: Sequence[Span], *, blamed: bool) -> Lane:
    times = _times(dump)
    calls = Span(
        kind=SpanKind.COLLECTIVE,
        start_ms=clock.ms(dump.first_ns or min(times)),
        end_ms=clock.ms(max(times)),
        label="calls in its flight recorder",
    )
    return Lane(
        rank=row.rank,
        host=row.host,
        state=row.state,
        blamed=blamed,
        coarse=(calls, *_end(dump, row, clock)),
        detail=tuple(detail),
    )


def _detail(dump: FlightDump, row: RankRow, clock: TimelineClock) -> list[Span]:
    spans = [span for group in dump.groups for span in _completed(group, clock)]
    return sorted((*spans, *_end(dump, row, clock)), key=lambda span: span.start_ms)


def _end(dump: FlightDump, row: RankRow, clock: TimelineClock) -> list[Span]:
    """Return the calls that had not completed; without any, the code after the last one."""
    pending = [span for group in dump.groups for span in _pending(group, clock)]
    if pending:
        return pending
    start_ms = clock.ms(max(_times(dump)))
    return [Span(kind=SpanKind.HOST, start_ms=start_ms, end_ms=None, label=row.state, place=short_place(row.where))]


def _completed(group: FlightGroup, clock: TimelineClock) -> Iterator[Span]:
    """Yield the last completed calls. Where their ends are not known they have no length."""
    first = len(group.seq) - len(group.last_made_ns)
    for at, (made_ns, ended_ns) in enumerate(zip(group.last_made_ns, group.last_ended_ns, strict=True), start=first):
        if at < group.done and made_ns > 0:
            call = group.calls[group.which[at]][0]
            span = _span(group, call, clock.ms(made_ns), group.seq[at])
            yield replace(span, end_ms=max(span.start_ms, clock.ms(ended_ns)))


def _pending(group: FlightGroup, clock: TimelineClock) -> Iterator[Span]:
    if group.pending_ns and group.done < len(group.which):
        call = group.calls[group.which[group.done]][0]
        span = _span(group, call, clock.ms(group.pending_ns), group.seq[group.done])
        yield replace(span, kind=SpanKind.WAIT, place=short_place(innermost(group.pending_frames)))
    for one in group.transfers[:1]:
        place = short_place(innermost(one.frames))
        yield Span(kind=SpanKind.WAIT, start_ms=clock.ms(one.created_ns), end_ms=None, label=one.op, place=place)


def _span(group: FlightGroup, call: FlightCall, start_ms: float, number: int) -> Span:
    shape = f"{call.dtype} {list(call.shape)}" if call.dtype else ""
    name = "" if group.desc == "default_pg" or group.name == "0" else group.desc or group.name
    return Span(
        kind=SpanKind.COLLECTIVE, start_ms=start_ms, end_ms=None, label=call.op, group=name, number=number, shape=shape
    )


def _fault(dumps: Mapping[int, FlightDump], verdict: Finding | None, clock: TimelineClock) -> Iterator[TimelineEvent]:
    """Yield the last call of the blamed ranks, or if they left no dump, when the first of the others began to wait."""
    if verdict is None:
        return
    lasts = [max(_times(dumps[rank])) for rank in verdict.ranks if rank in dumps]
    waits = [group.pending_ns for dump in dumps.values() for group in dump.groups if group.pending_ns]
    at_ns = min(lasts or waits, default=None)
    if at_ns is not None:
        label = f"{verdict.code} {verdict.kind}"
        yield TimelineEvent(at_ms=clock.ms(at_ns), label=label, ranks=tuple(sorted(verdict.ranks)), fault=True)
