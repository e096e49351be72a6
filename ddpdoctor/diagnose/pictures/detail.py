"""The end of one rank's run in full: each recorded call, the waits in it, and the script's code between."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.pictures.classes import short_place
from ddpdoctor.diagnose.pictures.reductions import find_reductions
from ddpdoctor.model.call_log import kind_of, pack_calls
from ddpdoctor.model.facts import POINT_TO_POINT
from ddpdoctor.model.timeline import Span, SpanKind
from ddpdoctor.rules.progress.groups import default_name, own_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.diagnose.pictures.clock import TimelineClock
    from ddpdoctor.diagnose.pictures.reductions import StepKey
    from ddpdoctor.model.call_log import CallLog
    from ddpdoctor.model.facts import Call, CallKind, Rank

CallKey = tuple[str, int, int, int]
"""A collective: the name of its group, the group's first member and size, and its number."""
PHASE_KINDS = {
    "ddp_forward": SpanKind.FORWARD,
    "ddp_forward_no_grad": SpanKind.FORWARD,
    "backward": SpanKind.BACKWARD,
    "next_batch": SpanKind.BATCH,
    "epoch": SpanKind.BATCH,
    "work_wait": SpanKind.WAIT,
}
REDUCTION = "gradient reduction"
LEAST_GAP_MS = 0.05
"""Our choice: shorter times between two calls are not shown as host code."""
LEAST_WAIT_MS = 0.05
LEAST_WAIT_SHARE = 0.05
"""Our choice: a collective is split into wait and transfer if the wait is at least this long, and this part of it."""
CALLS_AFTER = 4
"""A quarter of a lane's calls, at most, are later than the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCalls:
    """Which of a rank's calls are shown."""

    calls: CallLog
    cut_before: bool
    """Earlier calls exist or existed, and are not shown."""
    cut_after: bool
    """Later calls exist, and are not shown."""

    @property
    def from_ns(self) -> int:
        """When the first of them began."""
        return self.calls.started_ns[0] if len(self.calls) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastArrivals:
    """When the last rank came to a collective, or to the reduction of a step's gradients."""

    calls: Mapping[CallKey, int]
    steps: Mapping[StepKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnd:
    """How a rank ended, or what it did when it was last seen."""

    tail: Span | None
    waits: bool
    """It waited for others, also if that wait failed."""


def choose_calls(rank: Rank, fault_ns: int | None, most: int) -> ChosenCalls:
    """Return the last calls of a rank, or those around the fault if there are many after it."""
    log = pack_calls(rank.recent_calls)
    end = len(log)
    if fault_ns is not None:
        end = min(end, bisect_right(log.started_ns, fault_ns) + most // CALLS_AFTER)
    start = max(0, end - most)
    is_whole = start == 0 and (not len(log) or log.indexes[0] <= 1)
    return ChosenCalls(calls=log[start:end], cut_before=not is_whole, cut_after=end < len(log))


def call_keys(rank: Rank, calls: CallLog) -> list[CallKey | None]:
    """Return for each call which collective it is, or None if that cannot be compared between ranks."""
    heads = [_group_key(rank, kind) if kind.numbered and not kind.is_async else None for kind in calls.kinds]
    keys = [heads[which] for which in calls.which]
    return [None if key is None or seq <= 0 else (*key, seq) for key, seq in zip(keys, calls.numbers, strict=True)]


def _group_key(rank: Rank, kind: CallKind) -> tuple[str, int, int] | None:
    state = own_state(rank, kind.group)
    return None if state is None or not state.ranks else (kind.group, state.ranks[0], len(state.ranks))


def last_arrivals(ranks: Iterable[Rank], wanted: set[CallKey], from_ns: int) -> dict[CallKey, int]:
    """Return when the last rank began each of the wanted collectives."""
    latest: dict[CallKey, int] = {}
    for rank in ranks:
        log = pack_calls(rank.recent_calls)
        calls = log[bisect_left(log.started_ns, from_ns) :]
        for key, started_ns in zip(call_keys(rank, calls), calls.started_ns, strict=True):
            if key in wanted and key is not None:
                latest[key] = max(latest.get(key, 0), started_ns)
    return latest


def detail_spans(
    rank: Rank, chosen: ChosenCalls, arrivals: LastArrivals, clock: TimelineClock, end: LaneEnd
) -> list[Span]:
    """Return the spans of a rank's chosen calls, of those that have not ended, and of the code between, by start.

    What the rank did in the end is left out if later calls are not shown.
    """
    spans = [*_ended_spans(rank, chosen, arrivals, clock, end)]
    if not chosen.cut_after:
        spans += [(span, False) for span in _still_open(rank, clock, end.tail)]
        spans += [(end.tail, True)] if end.tail is not None else []
    spans += [(span, True) for span in checkpoint_spans(rank, clock) if _is_shown(span, chosen, clock)]
    spans.sort(key=lambda one: (one[0].start_ms, -_end_of(one[0], clock)))
    return sorted((*(span for span, _ in spans), *_gaps(spans, clock)), key=lambda one: one.start_ms)


def _ended_spans(
    rank: Rank, chosen: ChosenCalls, arrivals: LastArrivals, clock: TimelineClock, end: LaneEnd
) -> Iterator[tuple[Span, bool]]:
    """Yield the spans of ended calls, and whether each is one in which the main thread was."""
    calls, words = chosen.calls, [_words(rank, kind) for kind in chosen.calls.kinds]
    reductions = find_reductions(rank, chosen.from_ns)
    columns = zip(calls.which, calls.numbers, calls.started_ns, calls.ended_ns, call_keys(rank, calls), strict=True)
    for which, number, started_ns, ended_ns, key in columns:
        kind = calls.kinds[which]
        span = replace(
            words[which],
            number=number if kind.numbered and number > 0 else None,
            start_ms=clock.ms(started_ns),
            end_ms=clock.ms(ended_ns),
        )
        if end.tail is not None and (span.label, span.start_ms) == (end.tail.label, end.tail.start_ms):
            continue  # it ended because the job was stopped
        is_main = kind.thread_is_main and not kind.is_async
        if kind.failed and end.waits:
            yield replace(span, kind=SpanKind.WAIT), is_main
        elif started_ns in reductions and kind.op == "backward":
            yield from ((part, is_main) for part in _split_backward(span, *reductions[started_ns], arrivals, clock))
        else:
            come_ns = arrivals.calls.get(key) if key is not None else None
            yield from ((part, is_main) for part in _split(span, come_ns, clock))


def _split_backward(
    span: Span, step: StepKey, began_ns: int, arrivals: LastArrivals, clock: TimelineClock
) -> Iterator[Span]:  # fmt: skip
    """Yield the computation of a backward, then the wait for other ranks, then the reduction that nothing hides."""
    began_ms = clock.ms(began_ns)
    reduction = replace(span, kind=SpanKind.COLLECTIVE, label=REDUCTION, start_ms=began_ms)
    if _end_of(span, clock) - began_ms < LEAST_WAIT_MS:
        yield span
        return
    yield replace(span, end_ms=began_ms)
    yield from _split(reduction, arrivals.steps.get(step), clock)


def _words(rank: Rank, kind: CallKind) -> Span:
    """Return a span with all that calls of one kind share."""
    group = "" if not kind.numbered or kind.group == default_name(rank) else kind.group
    state = own_state(rank, kind.group)
    return Span(
        kind=_kind_of_op(kind.op),
        start_ms=0.0,
        end_ms=None,
        label="wait" if kind.op == "work_wait" else kind.op,
        group=(state.mesh_dim if state is not None else "") or group,
        shape=_shape(kind),
        place=short_place(kind.site),
    )


def _kind_of_op(op: str) -> SpanKind:
    """Return what a rank does in a call."""
    return PHASE_KINDS.get(op) or (SpanKind.POINT_TO_POINT if op in POINT_TO_POINT else SpanKind.COLLECTIVE)


def _shape(kind: CallKind) -> str:
    if kind.dtype is None or kind.shape is None:
        return ""
    return f"{kind.dtype.removeprefix('torch.')} {list(kind.shape)}"


def _split(span: Span, come_ns: int | None, clock: TimelineClock) -> Iterator[Span]:
    """Yield the span of a call. If others came later, ``come_ns``, its wait and the rest are two spans."""
    start_ms, end_ms = span.start_ms, _end_of(span, clock)
    come_ms = clock.ms(come_ns) if come_ns is not None else None
    waited_ms = min(end_ms, come_ms) - start_ms if come_ms is not None else 0.0
    if waited_ms < max(LEAST_WAIT_MS, LEAST_WAIT_SHARE * (end_ms - start_ms)):
        yield span
        return
    yield replace(span, kind=SpanKind.WAIT, end_ms=round(start_ms + waited_ms, 3))
    if round(start_ms + waited_ms, 3) < end_ms:
        yield replace(span, start_ms=round(start_ms + waited_ms, 3))


def _still_open(rank: Rank, clock: TimelineClock, tail: Span | None) -> Iterator[Span]:
    """Yield the calls that have not ended, except the one that the tail shows.

    Of a call that is pending on a device alone, the host's call has ended.
    """
    for call in rank.open_calls:
        if call.device_state is not None:
            continue
        span = open_span(rank, call, clock)
        if tail is None or (span.label, span.start_ms) != (tail.label, tail.start_ms):
            yield span


def checkpoint_spans(rank: Rank, clock: TimelineClock) -> tuple[Span, ...]:
    """Return the rank's last save to a file, if there was one."""
    save = rank.last_save
    if save is None:
        return ()
    end_ms = clock.ms(save.ended_ns) if save.ended_ns is not None else None
    return (Span(kind=SpanKind.CHECKPOINT, start_ms=clock.ms(save.began_ns), end_ms=end_ms, label="torch.save"),)


def _is_shown(span: Span, chosen: ChosenCalls, clock: TimelineClock) -> bool:
    """Tell whether a span lies among the calls that are shown."""
    if chosen.cut_before and span.start_ms < clock.ms(chosen.from_ns):
        return False
    return not chosen.cut_after or span.start_ms <= clock.ms(chosen.calls.started_ns[-1])


def open_span(rank: Rank, call: Call, clock: TimelineClock) -> Span:
    """Return the span of a call that has not ended."""
    return replace(_words(rank, kind_of(call)), start_ms=clock.ms(call.started_ns), number=call.seq)


def _gaps(spans: Sequence[tuple[Span, bool]], clock: TimelineClock) -> Iterator[Span]:
    """Yield the code between the calls of the main thread, which are sorted by start."""
    busy_ms: float | None = None
    for span, is_main in spans:
        if not is_main:
            continue
        if busy_ms is not None and span.start_ms - busy_ms >= LEAST_GAP_MS:
            yield Span(kind=SpanKind.HOST, start_ms=busy_ms, end_ms=span.start_ms, label="script")
        busy_ms = max(busy_ms or 0.0, _end_of(span, clock))


def _end_of(span: Span, clock: TimelineClock) -> float:
    return clock.until_ms if span.end_ms is None else span.end_ms
