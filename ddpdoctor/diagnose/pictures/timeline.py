"""Makes the timeline of a job: the whole run in few spans, and its end in full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.pictures.classes import blamed_ranks, classes_of, short_place
from ddpdoctor.diagnose.pictures.clock import TimelineClock
from ddpdoctor.diagnose.pictures.coarse import coarse_spans
from ddpdoctor.diagnose.pictures.detail import (
    ChosenCalls,
    LaneEnd,
    LastArrivals,
    call_keys,
    choose_calls,
    detail_spans,
    last_arrivals,
    open_span,
)
from ddpdoctor.diagnose.pictures.faults import (
    began_ns,
    failures,
    fault_ns,
    last_call_ns,
    open_call,
    over_at_ns,
    until_ns,
)
from ddpdoctor.diagnose.pictures.reductions import last_to_reduce
from ddpdoctor.model.facts import Life
from ddpdoctor.model.timeline import Lane, Span, SpanKind, Timeline, TimelineEvent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ddpdoctor.model.facts import Job, Rank
    from ddpdoctor.model.findings import Finding, RankRow

MOST_DETAILED = 48
"""Lanes with detail: one for each class, then blamed ranks."""
MOST_DETAIL_SPANS = 960
LANE_DETAIL_SPANS = 240
MOST_COARSE_SPANS = 8_000
LANE_COARSE_SPANS = 48
LEAST_COARSE_SPANS = 8
"""Our choice of all five: a span takes 200 to 300 bytes in report.json, which is to stay small: 400 KiB for 8 ranks and
3 MiB for 1,024."""
MOST_FAILURES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the lanes of a timeline have in common."""

    job: Job
    waiters: Collection[int]
    rows: Mapping[int, RankRow]
    blamed: frozenset[int]
    clock: TimelineClock
    fault_ns: int | None
    hung: bool


def make_timeline(
    job: Job,
    rows: Mapping[int, RankRow],
    verdict: Finding | None,
    *,
    waiters: Collection[int],
    started_at: str,
    hung: bool,
) -> Timeline | None:
    """Return the timeline of a job, or None if it had no ranks.

    Args:
        job: Its facts.
        rows: The row of each rank in the report.
        verdict: The verdict if the job ended badly, else None.
        waiters: The ranks that waited for others in the end, also if their wait failed.
        started_at: The time of ``began_ns`` in the format of reports.
        hung: It hung, and was stopped for that.
    """
    ranks = {rank.rank: rank for rank in sorted(job.ranks, key=lambda one: (one.attempt, one.started_ns or 0))}
    if not ranks:
        return None
    blamed = blamed_ranks(verdict)
    clock = TimelineClock(began_ns=began_ns(job), until_ns=until_ns(job))
    scene = Scene(
        job=job,
        waiters=waiters,
        rows=rows,
        blamed=blamed,
        clock=clock,
        fault_ns=fault_ns(job, blamed) if blamed else None,
        hung=hung,
    )
    classes = classes_of({number: rows[number] for number in ranks}, blamed)
    shown = choose_detailed(classes, blamed)
    details, from_ms = _details(scene, {number: ranks[number] for number in shown}, ranks)
    most = max(LEAST_COARSE_SPANS, min(LANE_COARSE_SPANS, MOST_COARSE_SPANS // len(ranks)))
    return Timeline(
        started_at=started_at,
        length_ms=clock.until_ms,
        detail_from_ms=from_ms,
        lanes=tuple(
            _lane(scene, rank, details.get(number, ()), LANE_COARSE_SPANS if number in shown else most)
            for number, rank in sorted(ranks.items())
        ),
        classes=classes,
        events=tuple(sorted(_events(scene, verdict), key=lambda one: one.at_ms)),
    )


def choose_detailed(classes: tuple[tuple[int, ...], ...], blamed: frozenset[int]) -> frozenset[int]:
    """Return the ranks whose calls are kept: one of each class, then the blamed ones, as far as there is room."""
    firsts = sorted((ranks[0] for ranks in classes), key=lambda rank: (rank not in blamed, rank))
    members = {rank for ranks in classes for rank in ranks}
    return frozenset(list(dict.fromkeys((*firsts, *sorted(blamed & members))))[:MOST_DETAILED])


def _lane(scene: Scene, rank: Rank, detail: tuple[Span, ...], most: int) -> Lane:
    row = scene.rows[rank.rank]
    is_there = rank.life is not Life.NEVER_STARTED
    return Lane(
        rank=rank.rank,
        host=rank.host,
        state=row.state,
        blamed=rank.rank in scene.blamed,
        coarse=coarse_spans(rank, scene.clock, _tail(scene, rank), most) if is_there else (),
        detail=detail,
    )


def _tail(scene: Scene, rank: Rank) -> Span | None:
    """Return what a rank did in the end: the call that it was in, or its own code since its last call.

    A lane ends where its rank ended or failed. None if it did nothing after its last call.
    """
    row, clock = scene.rows[rank.rank], scene.clock
    over_ns = over_at_ns(rank, scene.job.stopping_since_ns if scene.hung else None)
    end_ms = clock.ms(over_ns) if over_ns is not None else None
    call = open_call(rank, scene.job.stopping_since_ns)
    start_ms = clock.ms(last_call_ns(rank) or rank.started_ns or clock.began_ns)
    if call is not None:
        span = open_span(rank, call, clock)
        span = replace(span, end_ms=None if end_ms is None else max(span.start_ms, end_ms))
        if call.device_state is not None:  # the host went on, and stands in .item() or synchronize() now
            span = replace(span, start_ms=start_ms, place=short_place(row.where))
        return replace(span, kind=SpanKind.WAIT) if rank.rank in scene.waiters else span
    if end_ms is not None and end_ms <= start_ms:
        return None
    label = row.state if end_ms is None else "script"
    return Span(kind=SpanKind.HOST, start_ms=start_ms, end_ms=end_ms, label=label, place=short_place(row.where))


def _details(
    scene: Scene, shown: Mapping[int, Rank], ranks: Mapping[int, Rank]
) -> tuple[dict[int, tuple[Span, ...]], float]:
    """Return the spans of each lane that is shown in full, and since when all of them are whole."""
    most = min(LANE_DETAIL_SPANS, MOST_DETAIL_SPANS // len(shown))
    there = {number: rank for number, rank in shown.items() if rank.life is not Life.NEVER_STARTED}
    chosen = {number: choose_calls(rank, scene.fault_ns, most // 2) for number, rank in there.items()}
    wanted = {key for number, rank in there.items() for key in call_keys(rank, chosen[number].calls) if key is not None}
    first_ns = min((one.from_ns for one in chosen.values() if len(one.calls)), default=scene.clock.until_ns)
    arrivals = LastArrivals(
        calls=last_arrivals(ranks.values(), wanted, first_ns), steps=last_to_reduce(ranks.values(), first_ns)
    )
    found: dict[int, list[Span]] = {}
    froms = [0.0]
    for number, rank in there.items():
        end = LaneEnd(tail=_tail(scene, rank), waits=rank.rank in scene.waiters)
        spans = detail_spans(rank, chosen[number], arrivals, scene.clock, end)
        found[number] = spans[-most:]
        if _is_cut(chosen[number], spans, most) and found[number]:
            froms.append(found[number][0].start_ms)
    from_ms = min(max(froms), scene.clock.ms(scene.fault_ns) if scene.fault_ns is not None else scene.clock.until_ms)
    return {number: tuple(since(spans, from_ms)) for number, spans in found.items()}, from_ms


def _is_cut(chosen: ChosenCalls, spans: list[Span], most: int) -> bool:
    return len(spans) > most or chosen.cut_before


def since(spans: list[Span], from_ms: float) -> Iterator[Span]:
    """Yield the spans since a time. One that began before is cut there."""
    for span in spans:
        if span.end_ms is None or span.end_ms > from_ms:
            yield span if span.start_ms >= from_ms else replace(span, start_ms=from_ms)


def _events(scene: Scene, verdict: Finding | None) -> Iterator[TimelineEvent]:
    """Yield what happened at one time: the fault, failures of ranks, and the stop."""
    ms = scene.clock.ms
    if verdict is not None and scene.fault_ns is not None:
        label = f"{verdict.code} {verdict.kind}"
        yield TimelineEvent(at_ms=ms(scene.fault_ns), label=label, ranks=tuple(sorted(verdict.ranks)), fault=True)
    for at_ns, state, ranks in sorted(failures(scene.job, scene.rows))[:MOST_FAILURES]:
        yield TimelineEvent(at_ms=ms(at_ns), label=state, ranks=ranks)
    if scene.job.stopping_since_ns is not None:
        yield TimelineEvent(at_ms=ms(scene.job.stopping_since_ns), label="the job is stopped")
