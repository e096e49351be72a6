"""The rows of ranks in a report, and what its pictures show: the timeline of a job, and which rank waits for which."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpdoctor.model.facts import POINT_TO_POINT, Life
from ddpdoctor.model.findings import RankRow
from ddpdoctor.model.pictures import Lane, RankWaits, Span, SpanKind, Timeline, TimelineEvent, WaitingRanks
from ddpdoctor.model.steps import Phase, pace_of, step_totals
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.progress.states import final_error, is_over, main_frames, to_place
from ddpdoctor.rules.progress.waits import default_name, own_state

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

    from ddpdoctor.model.facts import Call, CallKind, CallLog, Job, Rank, Run
    from ddpdoctor.model.findings import Finding, Place
    from ddpdoctor.model.stacks import Frame

    Rows = Mapping[int, RankRow]

PHASE_WORDS = {
    "init_process_group": "in init_process_group",
    "new_group": "in new_group",
    "destroy_process_group": "in destroy_process_group",
    "ddp_init": "in DDP's constructor",
    "ddp_forward": "in forward",
    "ddp_forward_no_grad": "in forward without gradients",
    "backward": "in backward",
    "next_batch": "waits for a batch",
    "work_wait": "waits for an asynchronous call",
    "epoch": "starts an epoch",
}
MAX_STACK = 40


def rank_row(rank: Rank, stopped_ns: int | None = None) -> RankRow:
    """Return a rank's row of the report.

    Errors after ``stopped_ns``, when a hung job was stopped, are left out: when several nodes are stopped, the ranks of
    one node fail because those of another are gone.
    """
    if stopped_ns is not None and rank.samples:
        rank = replace(rank, raised=tuple(error for error in rank.raised if error.time_ns <= stopped_ns))
    state, error, frames = describe_state(rank), final_error(rank), main_frames(rank)
    user = [frame for frame in (error.frames if error else frames) if frame.user]
    frame = user[-1] if user else rank.fatal_place or rank.exit_call or rank.last_place
    return RankRow(
        rank=rank.rank,
        local_rank=rank.local_rank,
        host=rank.host,
        pid=rank.pid,
        state=state,
        where=to_place(rank.rank, frame) if frame is not None else None,
        step=rank.steps or None,
        starved_s=round(rank.starved_ns / 1e9, 1),
        stack=tuple(f"{f.file}:{f.line} {f.function}" for f in ((error and error.frames) or frames)[-MAX_STACK:]),
    )


def describe_state(rank: Rank) -> str:
    """Return one phrase for what a rank does, how it ended, or what it did until the job was stopped."""
    error = final_error(rank)
    if error is not None:
        where = "a wait" if error.in_call == "work_wait" else error.in_call
        return f"raised {error.type}" + (f" in {where}" if where else "")
    is_frozen = rank.proc_state in ("T", "t")  # by a signal or a debugger, when it was last checked
    if not (rank.after_stop and (rank.samples or is_frozen)):
        if rank.life is Life.EXITED:
            return f"exit status {rank.exit_code}"
        if rank.life is Life.SIGNALED:
            return "running until the job was stopped" if rank.after_stop else f"killed by {rank.signal}"
        if rank.life in (Life.NEVER_STARTED, Life.GONE):
            return "gone" if rank.life is Life.GONE else "never started"
    if is_frozen:
        return "frozen"
    if rank.main_ended_ns:
        return "exiting"
    for call in reversed(rank.open_calls):
        if call.thread_is_main and not call.is_async:
            awaited = next((other.op for other in rank.open_calls if other.index == call.awaits), None)
            return f"in {awaited}" if awaited else PHASE_WORDS.get(call.op, f"in {call.op}")
    return "in the script" if rank.recorded else "not recorded"


def pace_rows(job: Job) -> list[dict[str, Any]]:
    known = [(rank.rank, rank.step_times) for rank in job.ranks if rank.step_times is not None]
    return [
        {
            "rank": rank,
            "steps": pace.steps,
            "end_with": times.ends_with.value,
            "step_ms": round(pace.step_ms, 3),
            "before_forward_ms": round(pace.busy_ms[Phase.BEFORE], 3),
            "forward_ms": round(pace.busy_ms[Phase.FORWARD], 3),
            "between_ms": round(pace.busy_ms[Phase.BETWEEN], 3),
            "backward_ms": round(pace.busy_ms[Phase.BACKWARD], 3),
            "waited_ms": round(pace.waited_ms, 3),
        }
        for rank, times in known
        if (pace := pace_of(times)) is not None
    ]


def blamed_ranks(verdict: Finding | None) -> frozenset[int]:
    return frozenset(verdict.ranks) if verdict is not None else frozenset()


def classes_of(rows: Rows, blamed: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in the same state at the same line, by lowest rank. Blamed ranks have their own classes."""
    alike = grouped(((row.state, place_words(row.where), rank in blamed), rank) for rank, row in sorted(rows.items()))
    return tuple(tuple(ranks) for ranks in alike.values())


def rows_by_rank(rows: Iterable[RankRow]) -> dict[int, RankRow]:
    """Return the row of each rank. If several processes have one number, the last counts."""
    return {row.rank: row for row in sorted(rows, key=lambda row: row.rank)}


def place_words(place: Place | None) -> str:
    """Write a line of code: "/home/me/train.py:61 in main"; empty if it is unknown."""
    return f"{place.file}:{place.line} in {place.function}" if place is not None else ""


def short_place(place: Place | Frame | None) -> str:
    """Write a line of code with the name of its file only: "train.py:61 in main"."""
    return f"{place.file.rpartition('/')[2]}:{place.line} in {place.function}" if place is not None else ""


def began_ns(job: Job) -> int:
    return min((rank.started_ns for rank in job.ranks if rank.started_ns), default=job.launched_ns)


def wall_time(time_ns: int | None, job: Job, run: Run) -> str | None:
    try:
        launched = datetime.fromisoformat(run.started_at or "")
    except ValueError:
        return None
    if time_ns is None:
        return None
    return (launched + timedelta(microseconds=(time_ns - job.launched_ns) / 1000)).isoformat(timespec="milliseconds")


def last_call_ns(rank: Rank) -> int:
    ended = [call.ended_ns or 0 for call in rank.recent_calls[-1:]]
    return max([0, *ended, *(call.started_ns for call in rank.open_calls)])


def open_call(rank: Rank, stopped_ns: int | None) -> Call | None:
    """Return the innermost call that the main thread was in at the end, or when the job was stopped."""
    calls = [call for call in rank.open_calls if call.thread_is_main and (not call.is_async or call.op == "work_wait")]
    if calls:
        return max(calls, key=lambda call: call.index)
    last = rank.recent_calls[-1] if len(rank.recent_calls) else None
    if last is None or stopped_ns is None or not last.thread_is_main or (last.ended_ns or 0) < stopped_ns:
        return None
    return last if last.started_ns < stopped_ns else None


def fault_ns(job: Job, blamed: Iterable[int]) -> int | None:
    """Return when the first of the blamed ranks failed, ended, was frozen, or was last seen active."""
    stopped_ns, times = job.stopping_since_ns, []
    for rank in job.ranks:
        if rank.rank in set(blamed) and rank.life is not Life.NEVER_STARTED:
            failed, ended = failed_ns(rank), rank.ended_ns if is_over(rank) else None
            known = filter(None, (failed, ended, rank.frozen_since_ns, rank.main_ended_ns))
            at_ns = min((time_ns for time_ns in known if stopped_ns is None or time_ns <= stopped_ns), default=None)
            if at_ns is None:
                call = open_call(rank, stopped_ns)
                at_ns = (call.started_ns if call is not None else 0) or last_call_ns(rank) or rank.started_ns
            times += [at_ns] if at_ns else []
    return min(times, default=None)


def failed_ns(rank: Rank) -> int | None:
    """Return when a rank failed, or None if it did not, or only because it was stopped."""
    error = final_error(rank)
    if error is not None:
        return error.time_ns
    is_bad = rank.life is Life.SIGNALED or (rank.life is Life.EXITED and rank.exit_code not in {0, None})
    return rank.ended_ns if is_bad and is_over(rank) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineClock:
    """The beginning and the end of a timeline."""

    began_ns: int
    until_ns: int

    @property
    def until_ms(self) -> float:
        return self.ms(self.until_ns)

    def ms(self, time_ns: int) -> float:
        """Return a time by the timeline, not outside of it."""
        return round((min(max(time_ns, self.began_ns), self.until_ns) - self.began_ns) / 1e6, 3)


StepKey = tuple[str, int]  # a step: the group whose members end it together, and its number


def find_reductions(rank: Rank, from_ns: int) -> dict[int, tuple[StepKey, int]]:
    """Return, by the start of each backward since a time, its step and when the wait for its reduction began."""
    times = rank.step_times
    if times is None or not times.waits_us:
        return {}
    log = rank.recent_calls
    calls = log[bisect_left(log.started_ns, from_ns) :]
    backwards = {which for which, kind in enumerate(calls.kinds) if kind.op == "backward"}
    columns = zip(calls.which, calls.started_ns, calls.ended_ns, strict=True)
    seen = [(start_ns, end_ns) for which, start_ns, end_ns in columns if which in backwards]
    starts_ns = [start_ns for start_ns, _ in seen]
    found: dict[int, tuple[StepKey, int]] = {}
    for number, ended_ns, wait_us in zip(times.numbers, times.ended_ns, times.waits_us[Phase.BACKWARD], strict=False):
        at = bisect_right(starts_ns, ended_ns) - 1
        if at >= 0 and wait_us:
            start_ns, end_ns = seen[at]
            found[start_ns] = ((times.group, number), max(start_ns, end_ns - wait_us * 1000))
    return found


class StepRange(NamedTuple):
    """Consecutive steps. Times are nanoseconds."""

    first: int
    last: int
    start_ns: int
    end_ns: int


def coarse_spans(rank: Rank, clock: TimelineClock, tail: Span | None, most: int) -> tuple[Span, ...]:
    """Return a rank's steps, merged to at most ``most`` spans, what was before and after, the save, and ``tail``."""
    # The recorded steps by number: the evenly kept and the longest of the run, and the last ones
    found: dict[int, StepRange] = {}
    kept = rank.speed.kept if rank.speed is not None else None
    if kept is not None:
        for number, end_ns, wall_ms in zip(kept.numbers, kept.ended_ns, kept.parts_ms.get("wall", ()), strict=False):
            found[number] = StepRange(number, number, end_ns - int(wall_ms * 1e6), end_ns)
    times = rank.step_times
    if times is not None:
        for number, end_ns, total_us in zip(times.numbers, times.ended_ns, step_totals(times), strict=False):
            found[number] = StepRange(number, number, end_ns - total_us * 1000, end_ns)
    # Steps without overlaps, and one part for all steps between two known ones
    parts: list[StepRange] = []
    for step in sorted(span for span in found.values() if span.end_ns > span.start_ns):
        _, last_number, _, busy_ns = parts[-1] if parts else (0, step.first - 1, 0, step.start_ns)
        if step.end_ns <= busy_ns:  # numbers of another count, or a damaged record
            continue
        start_ns = max(step.start_ns, busy_ns)
        if step.first > last_number + 1 and start_ns > busy_ns:
            parts.append(StepRange(last_number + 1, step.first - 1, busy_ns, start_ns))
        parts.append(StepRange(step.first, step.last, start_ns, step.end_ns))
    parts = merge_parts(parts, most)
    end_ms = tail.start_ms if tail is not None else clock.until_ms
    last = (*checkpoint_spans(rank, clock), *(() if tail is None else (tail,)))
    began_ms = clock.ms(rank.started_ns or clock.began_ns)
    if not parts:
        return (*_host(began_ms, end_ms, "script"), *last)
    first = parts[0].first
    before = _host(began_ms, clock.ms(parts[0].start_ns), f"before step {first}")
    after = _host(clock.ms(parts[-1].end_ns), end_ms, f"after step {parts[-1].last}")
    steps = []
    for part in parts:
        label, only = ("step", part.first) if part.first == part.last else (f"steps {part.first}-{part.last}", None)
        start_ms, stop_ms = clock.ms(part.start_ns), clock.ms(part.end_ns)
        steps.append(Span(kind=SpanKind.STEP, start_ms=start_ms, end_ms=stop_ms, label=label, number=only))
    return (*before, *steps, *after, *last)


def _host(start_ms: float, end_ms: float, label: str) -> tuple[Span, ...]:
    return (Span(kind=SpanKind.HOST, start_ms=start_ms, end_ms=end_ms, label=label),) if end_ms > start_ms else ()


def merge_parts(parts: Sequence[StepRange], most: int) -> list[StepRange]:
    """Merge parts that end in the same slice of time; there are ``most`` / 2. One longer than a slice stays alone."""
    if len(parts) <= most:
        return list(parts)
    start_ns, count = parts[0].start_ns, max(1, most // 2)
    length_ns = max(1, parts[-1].end_ns - start_ns)

    slices: dict[tuple[int, bool], list[StepRange]] = {}
    for part in parts:
        is_long = (part.end_ns - part.start_ns) * count > length_ns
        number = min(count - 1, (part.end_ns - start_ns) * count // length_ns)
        slices.setdefault((number, is_long), []).append(part)
    return [StepRange(those[0].first, those[-1].last, those[0].start_ns, those[-1].end_ns) for those in slices.values()]


# A collective: the name of its group, the group's first member and size, and its number.
CallKey = tuple[str, int, int, int]
Arrivals = Mapping[CallKey | StepKey, int]  # when the last rank came to a collective, or to the reduction of a step
PHASE_KINDS = {
    "ddp_forward": SpanKind.FORWARD,
    "ddp_forward_no_grad": SpanKind.FORWARD,
    "backward": SpanKind.BACKWARD,
    "next_batch": SpanKind.BATCH,
    "epoch": SpanKind.BATCH,
    "work_wait": SpanKind.WAIT,
}
REDUCTION = "gradient reduction"
LEAST_GAP_MS = 0.05  # our choice: shorter times between two calls are not shown as host code
LEAST_WAIT_MS = 0.05
# Our choice: a collective is split into wait and transfer if the wait is at least this long, and this part of it.
LEAST_WAIT_SHARE = 0.05
CALLS_AFTER = 4  # a quarter of a lane's calls, at most, are later than the fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCalls:
    """Which of a rank's calls are shown."""

    calls: CallLog
    cut_before: bool  # earlier calls exist or existed, and are not shown
    cut_after: bool  # later calls exist, and are not shown

    @property
    def from_ns(self) -> int:
        return self.calls.started_ns[0] if len(self.calls) else 0


def call_keys(rank: Rank, calls: CallLog) -> list[CallKey | None]:
    """Return for each call which collective it is, or None if that cannot be compared between ranks."""
    heads: list[tuple[str, int, int] | None] = []
    for kind in calls.kinds:
        state = own_state(rank, kind.group) if kind.numbered and not kind.is_async else None
        heads.append(None if state is None or not state.ranks else (kind.group, state.ranks[0], len(state.ranks)))
    keys = [heads[which] for which in calls.which]
    return [None if key is None or seq <= 0 else (*key, seq) for key, seq in zip(keys, calls.numbers, strict=True)]


def detail_spans(
    rank: Rank, chosen: ChosenCalls, arrivals: Arrivals, clock: TimelineClock, tail: Span | None, *, waits: bool
) -> list[Span]:
    """Return spans of calls, ended or not, and of the code between; ``waits``: it waited in its ``tail``, the end."""
    spans = [*_ended_spans(rank, chosen, arrivals, clock, tail, waits=waits)]
    if not chosen.cut_after:
        # Of a call that is pending on a device alone, the host's call has ended.
        still_open = [open_span(rank, call, clock) for call in rank.open_calls if call.device_state is None]
        in_tail = (tail.label, tail.start_ms) if tail is not None else None
        spans += [(span, False) for span in still_open if (span.label, span.start_ms) != in_tail]
        spans += [(tail, True)] if tail is not None else []
    first_ms = clock.ms(chosen.from_ns) if chosen.cut_before else 0.0
    last_ms = clock.ms(chosen.calls.started_ns[-1]) if chosen.cut_after else clock.until_ms
    spans += [(span, True) for span in checkpoint_spans(rank, clock) if first_ms <= span.start_ms <= last_ms]
    spans.sort(key=lambda pair: (pair[0].start_ms, -_end_of(pair[0], clock)))
    # The code between the calls of the main thread, which are sorted by start
    gaps: list[Span] = []
    busy_ms: float | None = None
    for span, is_main in spans:
        if not is_main:
            continue
        if busy_ms is not None and span.start_ms - busy_ms >= LEAST_GAP_MS:
            gaps.append(Span(kind=SpanKind.HOST, start_ms=busy_ms, end_ms=span.start_ms, label="script"))
        busy_ms = max(busy_ms or 0.0, _end_of(span, clock))
    return sorted((*(span for span, _ in spans), *gaps), key=lambda gap: gap.start_ms)


def _ended_spans(
    rank: Rank, chosen: ChosenCalls, arrivals: Arrivals, clock: TimelineClock, tail: Span | None, *, waits: bool
) -> Iterator[tuple[Span, bool]]:
    """Yield the spans of ended calls, and whether each is one in which the main thread was."""
    calls, words = chosen.calls, [_kind_span(rank, kind) for kind in chosen.calls.kinds]
    reductions = find_reductions(rank, chosen.from_ns)
    columns = zip(calls.which, calls.numbers, calls.started_ns, calls.ended_ns, call_keys(rank, calls), strict=True)
    for which, number, started_ns, ended_ns, key in columns:
        kind, span = calls.kinds[which], words[which]
        shown = number if span.number is not None and number > 0 else None
        span = replace(span, number=shown, start_ms=clock.ms(started_ns), end_ms=clock.ms(ended_ns))
        if tail is not None and (span.label, span.start_ms) == (tail.label, tail.start_ms):
            continue  # it ended because the job was stopped
        is_main = kind.thread_is_main and not kind.is_async
        if kind.failed and waits:
            yield replace(span, kind=SpanKind.WAIT), is_main
        elif started_ns in reductions and kind.op == "backward":
            # The computation of a backward, then the wait for other ranks, then the reduction that nothing hides
            step, reduces_ns = reductions[started_ns]
            reduces_ms = clock.ms(reduces_ns)
            if _end_of(span, clock) - reduces_ms < LEAST_WAIT_MS:
                yield span, is_main
                continue
            yield replace(span, end_ms=reduces_ms), is_main
            rest = replace(span, kind=SpanKind.COLLECTIVE, label=REDUCTION, start_ms=reduces_ms)
            yield from ((part, is_main) for part in _split(rest, arrivals.get(step), clock))
        else:
            come_ns = arrivals.get(key) if key is not None else None
            yield from ((part, is_main) for part in _split(span, come_ns, clock))


def _kind_span(rank: Rank, kind: CallKind) -> Span:
    """Return a span with all that calls of one kind share. If they have numbers, its own is 0."""
    is_numbered, state = kind.numbered, own_state(rank, kind.group)
    group = "" if not is_numbered or kind.group == default_name(rank) else kind.group
    other = SpanKind.POINT_TO_POINT if kind.op in POINT_TO_POINT else SpanKind.COLLECTIVE
    return Span(
        kind=PHASE_KINDS.get(kind.op, other),
        start_ms=0.0,
        end_ms=None,
        label="wait" if kind.op == "work_wait" else kind.op,
        group=(state.mesh_dim if state is not None else "") or group,
        number=0 if is_numbered else None,
        shape=f"{kind.dtype.removeprefix('torch.')} {list(kind.shape)}"
        if kind.dtype and kind.shape is not None
        else "",
        place=short_place(kind.site),
    )


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


def checkpoint_spans(rank: Rank, clock: TimelineClock) -> tuple[Span, ...]:
    save = rank.last_save
    if save is None:
        return ()
    end_ms = clock.ms(save.ended_ns) if save.ended_ns is not None else None
    return (Span(kind=SpanKind.CHECKPOINT, start_ms=clock.ms(save.began_ns), end_ms=end_ms, label="torch.save"),)


def open_span(rank: Rank, call: Call, clock: TimelineClock) -> Span:
    return replace(_kind_span(rank, call.kind), start_ms=clock.ms(call.started_ns), number=call.seq)


def _end_of(span: Span, clock: TimelineClock) -> float:
    return clock.until_ms if span.end_ms is None else span.end_ms


MOST_DETAILED = 48  # lanes with detail: one for each class, then blamed ranks
MOST_DETAIL_SPANS = 960
LANE_DETAIL_SPANS = 240
MOST_COARSE_SPANS = 8_000
LANE_COARSE_SPANS = 48
# Our choice of all five: a span takes 200 to 300 bytes in report.json, which is to stay small: 400 KiB for 8 ranks and
# 3 MiB for 1,024.
LEAST_COARSE_SPANS = 8
MOST_FAILURES = 12


def make_timeline(
    job: Job, rows: Rows, verdict: Finding | None, *, waiters: Collection[int], started_at: str, hung: bool
) -> Timeline | None:
    """Return a timeline if there were ranks. ``waiters`` waited for others in the end, also if their wait failed."""
    ranks = {rank.rank: rank for rank in sorted(job.ranks, key=lambda rank: (rank.attempt, rank.started_ns or 0))}
    if not ranks:
        return None
    blamed = blamed_ranks(verdict)
    # The last rank ended then, or one still runs. No recorded call is later.
    seen = [rank.ended_ns or job.now_ns for rank in job.ranks if rank.life is not Life.NEVER_STARTED]
    until_ns = max([*seen, *(last_call_ns(rank) for rank in job.ranks), began_ns(job)])
    clock = TimelineClock(began_ns=began_ns(job), until_ns=until_ns)
    at_ns = fault_ns(job, blamed) if blamed else None
    classes = classes_of({number: rows[number] for number in ranks}, blamed)
    shown = choose_detailed(classes, blamed)
    there = {number: rank for number, rank in ranks.items() if rank.life is not Life.NEVER_STARTED}
    tails = {
        number: _tail(rank, rows[number], clock, job.stopping_since_ns, hung=hung, waits=number in waiters)
        for number, rank in there.items()
    }
    details, from_ms = _details(shown, there, tails, waiters, clock, at_ns)
    most = max(LEAST_COARSE_SPANS, min(LANE_COARSE_SPANS, MOST_COARSE_SPANS // len(ranks)))
    lanes = []
    for number, rank in sorted(ranks.items()):
        room = LANE_COARSE_SPANS if number in shown else most
        coarse = coarse_spans(rank, clock, tails[number], room) if number in there else ()
        state, is_blamed, detail = rows[number].state, number in blamed, details.get(number, ())
        lane = Lane(rank=number, host=rank.host, state=state, blamed=is_blamed, coarse=coarse, detail=detail)
        lanes.append(lane)
    return Timeline(
        started_at=started_at,
        length_ms=clock.until_ms,
        detail_from_ms=from_ms,
        lanes=tuple(lanes),
        classes=classes,
        events=tuple(sorted(_events(job, rows, verdict, at_ns, clock), key=lambda event: event.at_ms)),
    )


def choose_detailed(classes: tuple[tuple[int, ...], ...], blamed: frozenset[int]) -> frozenset[int]:
    """Return the ranks whose calls are kept: one of each class, then the blamed ones, as far as there is room."""
    firsts = sorted((ranks[0] for ranks in classes), key=lambda rank: (rank not in blamed, rank))
    members = {rank for ranks in classes for rank in ranks}
    return frozenset(list(dict.fromkeys((*firsts, *sorted(blamed & members))))[:MOST_DETAILED])


def _tail(
    rank: Rank, row: RankRow, clock: TimelineClock, stopped_ns: int | None, *, hung: bool, waits: bool
) -> Span | None:
    """Return the call or the user code that a rank was in until it ended or failed, or None."""
    failed = failed_ns(rank)
    if failed is not None and hung and stopped_ns is not None and failed > stopped_ns:
        failed = None  # the stop of the hung job caused it
    over_ns = min(filter(None, (failed, rank.ended_ns if is_over(rank) else None)), default=None)
    end_ms = clock.ms(over_ns) if over_ns is not None else None
    call = open_call(rank, stopped_ns)
    start_ms = clock.ms(last_call_ns(rank) or rank.started_ns or clock.began_ns)
    if call is not None:
        span = open_span(rank, call, clock)
        span = replace(span, end_ms=None if end_ms is None else max(span.start_ms, end_ms))
        if call.device_state is not None:  # the host went on, and stands in .item() or synchronize() now
            span = replace(span, start_ms=start_ms, place=short_place(row.where))
        return replace(span, kind=SpanKind.WAIT) if waits else span
    if end_ms is not None and end_ms <= start_ms:
        return None
    label = row.state if end_ms is None else "script"
    return Span(kind=SpanKind.HOST, start_ms=start_ms, end_ms=end_ms, label=label, place=short_place(row.where))


def _details(
    shown: Collection[int],
    there: Mapping[int, Rank],
    tails: Mapping[int, Span | None],
    waiters: Collection[int],
    clock: TimelineClock,
    at_ns: int | None,
) -> tuple[dict[int, tuple[Span, ...]], float]:
    """Return the spans of each lane shown in full, and since when all of them are whole. ``at_ns``: of the fault."""
    most = min(LANE_DETAIL_SPANS, MOST_DETAIL_SPANS // len(shown))
    chosen = {}
    for number in there.keys() & shown:  # its last calls, or those around the fault if there are many after it
        log, room = there[number].recent_calls, most // 2
        end = len(log)
        if at_ns is not None:
            end = min(end, bisect_right(log.started_ns, at_ns) + room // CALLS_AFTER)
        start = max(0, end - room)
        is_whole = start == 0 and (not len(log) or log.indexes[0] <= 1)
        chosen[number] = ChosenCalls(calls=log[start:end], cut_before=not is_whole, cut_after=end < len(log))
    keys = (key for number, choice in chosen.items() for key in call_keys(there[number], choice.calls))
    wanted = {key for key in keys if key is not None}
    first_ns = min((choice.from_ns for choice in chosen.values() if len(choice.calls)), default=clock.until_ns)
    # When the last rank began each of the wanted collectives, and was done with each step's backward
    arrivals: dict[CallKey | StepKey, int] = {}
    for rank in there.values():
        log = rank.recent_calls
        begun_calls = log[bisect_left(log.started_ns, first_ns) :]
        begun = zip(call_keys(rank, begun_calls), begun_calls.started_ns, strict=True)
        for arrival, came_ns in (*begun, *find_reductions(rank, first_ns).values()):
            if arrival is not None and (len(arrival) == 2 or arrival in wanted):
                arrivals[arrival] = max(arrivals.get(arrival, 0), came_ns)
    found: dict[int, list[Span]] = {}
    froms = [0.0]
    for number, calls in chosen.items():
        spans = detail_spans(there[number], calls, arrivals, clock, tails[number], waits=number in waiters)
        found[number] = spans[-most:]
        if (len(spans) > most or calls.cut_before) and found[number]:
            froms.append(found[number][0].start_ms)
    from_ms = min(max(froms), clock.ms(at_ns) if at_ns is not None else clock.until_ms)
    return {number: tuple(since(spans, from_ms)) for number, spans in found.items()}, from_ms


def since(spans: list[Span], from_ms: float) -> Iterator[Span]:
    """Yield the spans since a time. One that began before is cut there."""
    for span in spans:
        if span.end_ms is None or span.end_ms > from_ms:
            yield span if span.start_ms >= from_ms else replace(span, start_ms=from_ms)


def _events(
    job: Job, rows: Rows, verdict: Finding | None, at_ns: int | None, clock: TimelineClock
) -> Iterator[TimelineEvent]:
    stopped_ns = job.stopping_since_ns
    if verdict is not None and at_ns is not None:
        label = f"{verdict.code} {verdict.kind}"
        yield TimelineEvent(at_ms=clock.ms(at_ns), label=label, ranks=tuple(sorted(verdict.ranks)), fault=True)
    # Ranks that failed alike are one event, at the first time
    found = [(rank.rank, at) for rank in job.ranks if rank.rank in rows and (at := failed_ns(rank))]
    alike = grouped((rows[rank].state, (at, rank)) for rank, at in found if stopped_ns is None or at <= stopped_ns)
    failures = [(min(times)[0], state, tuple(sorted(rank for _, rank in times))) for state, times in alike.items()]
    for failure_ns, state, ranks in sorted(failures)[:MOST_FAILURES]:
        yield TimelineEvent(at_ms=clock.ms(failure_ns), label=state, ranks=ranks)
    if stopped_ns is not None:
        yield TimelineEvent(at_ms=clock.ms(stopped_ns), label="the job is stopped")


# Our choice: a graph with more nodes cannot be read. Ranks are then folded even if they wait for different ranks.
MOST_CLASSES = 40


def fold_waits(targets: Mapping[int, frozenset[int]], rows: Rows, blamed: frozenset[int]) -> RankWaits | None:
    """Return the waits by class, if any. Ranks of a class wait for the same ranks, so that a circle stays one."""
    if not targets:
        return None
    taking_part = sorted({*targets}.union(*set(targets.values())))
    ids = {peers: number for number, peers in enumerate(dict.fromkeys(targets.values()))}

    def looks(rank: int) -> Hashable:
        row = rows.get(rank)
        return (row.state if row else "", place_words(row.where) if row else "", rank in blamed)

    keys = {rank: (looks(rank), ids.get(targets.get(rank, frozenset()))) for rank in taking_part}
    alike: dict[Hashable, list[int]] = grouped((key, rank) for rank, key in keys.items())
    if len(alike) > MOST_CLASSES:
        alike = grouped((looks(rank), rank) for rank in taking_part)
    classes = list(alike.values())[:MOST_CLASSES]
    number_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    pairs = {(number_of[rank], peers) for rank, peers in targets.items() if rank in number_of}
    links = {(number, number_of[peer]) for number, peers in pairs for peer in peers if peer in number_of}
    made = []
    for ranks in classes:
        row = rows.get(ranks[0])
        state, place = (row.state, place_words(row.where)) if row is not None else ("never started", "")
        made.append(WaitingRanks(ranks=tuple(ranks), state=state, place=place, blamed=ranks[0] in blamed))
    return RankWaits(classes=tuple(made), links=tuple(sorted(links)))
