"""The report of `analyze`."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.job import PictureData, walled
from ddpdoctor.diagnose.pictures import (
    LANE_DETAIL_SPANS,
    MOST_DETAIL_SPANS,
    MOST_DETAILED,
    TimelineClock,
    blamed_ranks,
    choose_detailed,
    classes_of,
    fold_waits,
    rows_by_rank,
    short_place,
    since,
)
from ddpdoctor.diagnose.report import make_report
from ddpdoctor.logs.reading import read_logs
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import RankRow, Severity
from ddpdoctor.model.log_facts import (
    Absent,
    Circle,
    Doing,
    Exited,
    Failed,
    Finished,
    Hint,
    Inside,
    Nature,
    ProcessState,
    Reached,
    Waiting,
)
from ddpdoctor.model.pictures import Lane, Span, SpanKind, Timeline, TimelineEvent
from ddpdoctor.model.words import count_of, name_list
from ddpdoctor.rules.engine import judge, pick_verdict
from ddpdoctor.rules.logs.calls import innermost
from ddpdoctor.rules.logs.nccl_path import explain_nccl
from ddpdoctor.rules.logs.ruling import decide
from ddpdoctor.rules.logs.state import RunState, build_run_state, last_samples
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.model.log_facts import Fact, FlightCall, FlightDump, FlightGroup, Stacked


def log_pictures(state: RunState, rows: Iterable[RankRow], verdict: Finding | None) -> PictureData:
    """Return the entries ``timeline`` and ``waits`` of a report's data. They are None if unknown."""

    def make() -> dict[str, Any]:
        by_rank = rows_by_rank(rows)
        cause = verdict if verdict is not None and verdict.severity is Severity.ERROR else None
        blamed = blamed_ranks(cause)
        # Who waits for whom by the sources; if they name nobody, those who wait do so for the blamed ranks
        found: dict[int, set[int]] = {}
        for circle in state.all[Circle]:
            for rank, _, other in circle.links:
                found.setdefault(rank, set()).add(other)
        for absent in state.all[Absent]:
            whom = absent.who.rank
            for rank in absent.waiters:
                if whom is not None and whom != rank:
                    found.setdefault(rank, set()).add(whom)
        targets = {rank: frozenset(others) for rank, others in found.items()}
        if not targets and blamed:
            targets = {rank: blamed for rank in state.waiting if rank not in blamed}
        timeline = flight_timeline(state.run.dumps, by_rank, cause)
        return {"timeline": timeline, "waits": fold_waits(targets, by_rank, blamed)}

    return walled(make)


# Our choice: dumps do not say when they were made. What had not ended is drawn for so much of the time before.
AFTER_SHARE = 0.1


def flight_timeline(
    dumps: Iterable[FlightDump], rows: Mapping[int, RankRow], verdict: Finding | None
) -> Timeline | None:
    """Return the timeline of ranks by their hosts' wall clocks, which may differ; None if no dump has times."""
    by_rank = {dump.rank: dump for dump in dumps if dump.rank in rows and dump.rank is not None and _times(dump)}
    if not by_rank:
        return None
    blamed = blamed_ranks(verdict)
    times = {rank: _times(dump) for rank, dump in by_rank.items()}
    firsts = [dump.first_ns for dump in by_rank.values() if dump.first_ns and dump.first_ns > 0]
    every = [time for those in (*times.values(), firsts) for time in those]
    began_ns, last_ns = min(every), max(every)
    after_ns = max(1_000_000, int((last_ns - began_ns) * AFTER_SHARE))
    clock = TimelineClock(began_ns=began_ns, until_ns=last_ns + after_ns)
    # The calls that had not completed; without any, the code after the last one
    ends: dict[int, list[Span]] = {}
    for rank, dump in by_rank.items():
        start_ms, row = clock.ms(max(times[rank])), rows[rank]
        code = Span(kind=SpanKind.HOST, start_ms=start_ms, end_ms=None, label=row.state, place=short_place(row.where))
        ends[rank] = [span for group in dump.groups for span in _pending(group, clock)] or [code]
    classes = classes_of({rank: rows[rank] for rank in by_rank}, blamed)
    shown = choose_detailed(classes, blamed)
    most = min(LANE_DETAIL_SPANS, MOST_DETAIL_SPANS // min(len(shown), MOST_DETAILED))
    details = {rank: _detail(by_rank[rank], ends[rank], clock)[-most:] for rank in shown}
    from_ms = max((spans[0].start_ms for spans in details.values() if len(spans) == most), default=0.0)
    lanes = []
    for rank, dump in sorted(by_rank.items()):
        start_ms, end_ms = clock.ms(dump.first_ns or min(times[rank])), clock.ms(max(times[rank]))
        label = "calls in its flight recorder"
        calls = Span(kind=SpanKind.COLLECTIVE, start_ms=start_ms, end_ms=end_ms, label=label)
        row, coarse, detail = rows[rank], (calls, *ends[rank]), tuple(since(details.get(rank, []), from_ms))
        lane = Lane(rank=rank, host=row.host, state=row.state, blamed=rank in blamed, coarse=coarse, detail=detail)
        lanes.append(lane)
    return Timeline(
        started_at=datetime.fromtimestamp(clock.began_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds"),
        length_ms=clock.until_ms,
        detail_from_ms=from_ms,
        lanes=tuple(lanes),
        classes=classes,
        events=tuple(_fault(by_rank, verdict, clock)),
    )


def _times(dump: FlightDump) -> list[int]:
    columns = [column for group in dump.groups for column in (group.last_made_ns, group.last_ended_ns)]
    columns += [[transfer.created_ns for transfer in group.transfers] for group in dump.groups]
    return [time for column in columns for time in column if time > 0]


def _detail(dump: FlightDump, end: list[Span], clock: TimelineClock) -> list[Span]:
    """Return the last completed calls, without length if their ends are unknown, and the end after them."""
    spans = []
    for group in dump.groups:
        first = len(group.seq) - len(group.last_made_ns)
        times = zip(group.last_made_ns, group.last_ended_ns, strict=True)
        for at, (made_ns, ended_ns) in enumerate(times, start=first):
            if at < group.done and made_ns > 0:
                call = group.calls[group.which[at]][0]
                span = _span(group, call, clock.ms(made_ns), group.seq[at])
                spans.append(replace(span, end_ms=max(span.start_ms, clock.ms(ended_ns))))
    return sorted((*spans, *end), key=lambda span: span.start_ms)


def _pending(group: FlightGroup, clock: TimelineClock) -> Iterator[Span]:
    if group.pending_ns and group.done < len(group.which):
        call = group.calls[group.which[group.done]][0]
        span = _span(group, call, clock.ms(group.pending_ns), group.seq[group.done])
        yield replace(span, kind=SpanKind.WAIT, place=short_place(innermost(group.pending_frames)))
    for transfer in group.transfers[:1]:
        place = short_place(innermost(transfer.frames))
        start_ms = clock.ms(transfer.created_ns)
        yield Span(kind=SpanKind.WAIT, start_ms=start_ms, end_ms=None, label=transfer.op, place=place)


def _span(group: FlightGroup, call: FlightCall, start_ms: float, number: int) -> Span:
    shape = f"{call.dtype} {list(call.shape)}" if call.dtype else ""
    name = "" if group.desc == "default_pg" or group.name == "0" else group.desc or group.name
    kind = SpanKind.COLLECTIVE
    return Span(kind=kind, start_ms=start_ms, end_ms=None, label=call.op, group=name, number=number, shape=shape)


def _fault(dumps: Mapping[int, FlightDump], verdict: Finding | None, clock: TimelineClock) -> Iterator[TimelineEvent]:
    """Yield the last call of the blamed ranks, or without their dumps, when the first of the others began to wait."""
    if verdict is None:
        return
    lasts = [max(_times(dumps[rank])) for rank in verdict.ranks if rank in dumps]
    waits = [group.pending_ns for dump in dumps.values() for group in dump.groups if group.pending_ns]
    at_ns = min(lasts or waits, default=None)
    if at_ns is not None:
        label = f"{verdict.code} {verdict.kind}"
        yield TimelineEvent(at_ms=clock.ms(at_ns), label=label, ranks=tuple(sorted(verdict.ranks)), fault=True)


VERB = "analyze"
MOST_SOURCES = 200  # Our choice: how many files the report lists. All are counted.
MOST_HINTS = 12


def analyze(paths: Sequence[str], command: tuple[str, ...], started_at: str, verb: str = VERB) -> Report:
    """Judge the last run in evidence. Raises ``UserError`` if a path does not exist, or nothing was recognized."""
    logs = read_logs(paths)
    if not any(file.formats for file in logs.read):
        problems = [f"{file.source}: {file.problem}" for file in logs.read if file.problem]
        raise UserError(
            f"nothing was recognized in {count_of(len(logs.read), 'file')}"
            + (f" ({'; '.join(problems[:3])})" if problems else ""),
            help="Give logs of a training job, flight recorder dumps, stacks of py-spy, or folders of them. "
            "`ddpdoctor explain -- LINE` explains a single error, `ddpdoctor explain DD613` lists what to collect.",
        )
    state = build_run_state(logs)
    state = replace(state, ruling=decide(state))
    judged = judge(rules_of("progress", "logs"), {RunState: [state]})
    by_rank: dict[int, list[Fact]] = {rank: [] for rank in state.seen}
    for fact in state.facts:
        if fact.who.rank in by_rank:
            by_rank[fact.who.rank].append(fact)
    inside = {rank: fact for fact in state.all[Inside] for rank in fact.ranks}
    samples = last_samples(state.facts)
    rows = [_row(rank, facts, state, inside.get(rank), samples.get(rank)) for rank, facts in sorted(by_rank.items())]
    pictures, crashed = log_pictures(state, rows, pick_verdict(judged.findings))
    checks, data = (*judged.checks, *crashed), {"verb": verb, "evidence": _about_logs(state), **pictures}
    found = judged.findings
    return make_report(command=command, started_at=started_at, findings=found, checks=checks, data=data, ranks=rows)


def _about_logs(state: RunState) -> dict[str, Any]:
    logs = state.logs
    refused = (refusal.words(ranks) for refusal, ranks in state.refusals())
    told = (fact.words for fact in state.all[Hint] if fact.words)
    hints = dict.fromkeys([*refused, *told, *explain_nccl(state)])
    # The job that `attach` looked at, in words: "slurm-4711, srun, 16 ranks on k01 and k02"; else nothing
    attached = logs.attached
    job_words = ""
    if attached:
        hosts = list(dict.fromkeys(job.host for job in attached))
        ranks = [rank for job in attached for rank in job.ranks]
        launchers = dict.fromkeys(rank.launcher for rank in ranks)
        on = f"{count_of(len(ranks), 'rank')} on {name_list(hosts)}"
        job_words = ", ".join((attached[0].job.name, *launchers, on))
    return {
        **logs.counts,
        "sources": [
            {"source": file.source, "formats": list(file.formats), "lines": file.lines, "bytes": file.bytes,
             "problem": file.problem, "left_out": file.left_out}
            for file in logs.read[:MOST_SOURCES]
        ],
        "not_read": logs.lacking(),
        "job": job_words,
        "formats": list(dict.fromkeys(name for file in logs.read for name in file.formats)),
        "unknown_files": sum(not file.formats and not file.problem for file in logs.read),
        "runs": len(logs.runs),
        "run": state.run.name,
        "world_size": state.world,
        "seen_ranks": sorted(state.seen),
        "moves": state.moves and not state.went_wrong,
        "notes": list(hints)[:MOST_HINTS],
        "unclear": state.ruling.reason,
        "collect": list(state.ruling.collect),
    }  # fmt: skip


def _row(rank: int, facts: list[Fact], state: RunState, inside: Inside | None, sample: Stacked | None) -> RankRow:
    failed = next((fact for fact in facts if isinstance(fact, Failed) and fact.nature is Nature.OWN), None)
    failed = failed or next((fact for fact in facts if isinstance(fact, Failed)), None)
    waiting = next((fact for fact in facts if isinstance(fact, Waiting)), None)
    frames = sample.frames if sample is not None else failed.frames if failed else waiting.frames if waiting else ()
    frame = innermost(frames)
    who = [fact.who for fact in facts]
    # What a rank did, in a phrase. Its own failure says more than a stack, and a stack more than a wait.
    exited = next((fact for fact in facts if isinstance(fact, Exited)), None)
    if failed is not None and failed.nature is Nature.OWN:
        state_words = f"raised {failed.type}" if failed.type else "reported an error"
    elif exited is not None and exited.signal and not exited.by_launcher:
        state_words = f"killed by {exited.signal}"
    elif sample is not None:
        state_words = _DOING[sample.doing]
    elif waiting is not None:
        state_words = f"{'timed out' if waiting.timed_out else 'waits'} in {waiting.operation.words()}"
    elif inside is not None:
        state_words = f"waits in {inside.operation.words()}"
    else:
        state_words = _weak_words(facts, failed, exited)
    return RankRow(
        rank=rank,
        local_rank=next((process.local_rank for process in who if process.local_rank is not None), None),
        host=state.hosts.get(rank, ""),
        pid=next((process.pid for process in who if process.pid is not None), None),
        state=state_words,
        where=None if frame is None else to_place(rank, frame),
        stack=tuple(f"{at.file}:{at.line} {at.function}" for at in (sample.frames if sample is not None else ())),
    )


_DOING = {
    Doing.COLLECTIVE: "waits in a collective", Doing.DEVICE: "waits for its device", Doing.DATA: "waits for a batch",
    Doing.INIT: "in init_process_group", Doing.EXIT: "is ending", Doing.OWN: "in the script",
    Doing.UNKNOWN: "elsewhere",
}  # fmt: skip


# What the state of a process says of its rank.
_LETTERS = {
    "R": "runs", "S": "sleeps", "D": "waits in the kernel", "T": "is stopped", "t": "is stopped", "Z": "has ended",
}  # fmt: skip


def _weak_words(facts: list[Fact], failed: Failed | None, exited: Exited | None) -> str:
    if failed is not None:
        return {Nature.PEER_LOST: "lost another rank", Nature.STOPPED: "was stopped"}.get(failed.nature, "failed")
    if exited is not None:
        return f"status {exited.code}" if exited.code is not None else f"ended by {exited.signal}"
    if any(isinstance(fact, Finished) for fact in facts):
        return "ended well"
    reached = next((fact for fact in reversed(facts) if isinstance(fact, Reached) and fact.enqueued is not None), None)
    if reached is not None:
        return f"had {reached.done_words()} collective #{reached.enqueued}"
    process = next((fact for fact in reversed(facts) if isinstance(fact, ProcessState)), None)
    return _LETTERS.get(process.letter, "seen") if process is not None else "seen"
