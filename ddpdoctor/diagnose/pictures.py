"""The rows of ranks in a report, and what its pictures show: the fault, waits, classes of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.facts import Life, Rank
from ddpdoctor.model.findings import RankRow
from ddpdoctor.model.pictures import RankWaits, WaitingRanks
from ddpdoctor.model.steps import Phase, pace_of
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.progress.states import final_error, is_over, main_frames, stack_of, to_place

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from ddpdoctor.model.facts import Call, Job, Rank
    from ddpdoctor.model.findings import Finding, Place
    from ddpdoctor.model.stacks import Frame


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

    ``stopped_ns`` is when a hung job was stopped. Errors after that are left out: when several nodes are stopped, the
    ranks of one node fail because those of another are gone.
    """
    if stopped_ns is not None and rank.samples:
        rank = replace(rank, raised=tuple(error for error in rank.raised if error.time_ns <= stopped_ns))
    frames = main_frames(rank)
    error = final_error(rank)
    user = [frame for frame in (error.frames if error else frames) if frame.user]
    frame = user[-1] if user else rank.fatal_place or rank.exit_call or rank.last_place
    return RankRow(
        rank=rank.rank,
        local_rank=rank.local_rank,
        host=rank.host,
        pid=rank.pid,
        state=describe_state(rank),
        where=to_place(rank.rank, frame) if frame is not None else None,
        step=rank.steps or None,
        starved_s=round(rank.starved_ns / 1e9, 1),
        stack=tuple(f"{f.file}:{f.line} {f.function}" for f in stack_of(rank)[-MAX_STACK:]),
    )


def describe_state(rank: Rank) -> str:
    """Return one phrase for what a rank does, how it ended, or what it did until the job was stopped."""
    error = final_error(rank)
    if error is not None:
        where = "a wait" if error.in_call == "work_wait" else error.in_call
        return f"raised {error.type}" + (f" in {where}" if where else "")
    if rank.after_stop and (rank.samples or _is_frozen(rank)):
        return _describe_alive(rank)
    if rank.life is Life.EXITED:
        return f"exit status {rank.exit_code}"
    if rank.life is Life.SIGNALED:
        return "running until the job was stopped" if rank.after_stop else f"killed by {rank.signal}"
    if rank.life is Life.NEVER_STARTED:
        return "never started"
    if rank.life is Life.GONE:
        return "gone"
    return _describe_alive(rank)


def _is_frozen(rank: Rank) -> bool:
    """Return whether a signal or a debugger had stopped the process when it was last checked."""
    return rank.proc_state in ("T", "t")


def _describe_alive(rank: Rank) -> str:
    if _is_frozen(rank):
        return "frozen"
    if rank.main_ended_ns:
        return "exiting"
    for call in reversed(rank.open_calls):
        if call.thread_is_main and not call.is_async:
            awaited = next((one.op for one in rank.open_calls if one.index == call.awaits), None)
            return f"in {awaited}" if awaited else PHASE_WORDS.get(call.op, f"in {call.op}")
    if not rank.recorded:
        return "not recorded"
    return "in the script"


def pace_rows(job: Job) -> list[dict[str, Any]]:
    """Return one row per rank that recorded steps: their number, and medians in milliseconds without waiting."""
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
    """Return the ranks that a verdict blames."""
    return frozenset(verdict.ranks) if verdict is not None else frozenset()


def classes_of(rows: Mapping[int, RankRow], blamed: frozenset[int]) -> tuple[tuple[int, ...], ...]:
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
    """Return when the first rank started, or the launch if no rank was recorded."""
    return min((rank.started_ns for rank in job.ranks if rank.started_ns), default=job.launched_ns)


def until_ns(job: Job) -> int:
    """Return when the last rank ended, or now if one still runs. It is not before any recorded call."""
    seen = [rank.ended_ns or job.now_ns for rank in job.ranks if rank.life is not Life.NEVER_STARTED]
    return max([*seen, *(last_call_ns(rank) for rank in job.ranks), began_ns(job)])


def last_call_ns(rank: Rank) -> int:
    """Return when the rank's last recorded call began or ended, or 0 if none was recorded."""
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
    """Return when the first of the blamed ranks failed, ended, was frozen, or was last seen to do something."""
    stopped_ns, times = job.stopping_since_ns, []
    for rank in job.ranks:
        if rank.rank in set(blamed) and rank.life is not Life.NEVER_STARTED:
            ended = rank.ended_ns if is_over(rank) else None
            known = filter(None, (failed_ns(rank), ended, rank.frozen_since_ns, rank.main_ended_ns))
            at_ns = min((one for one in known if stopped_ns is None or one <= stopped_ns), default=None)
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


def failures(job: Job, rows: Mapping[int, RankRow]) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return the time, the words and the ranks of all failures; ranks that failed alike are one, at the first time."""
    before_ns = job.stopping_since_ns
    found = [(rank, at) for rank in job.ranks if rank.rank in rows and (at := failed_ns(rank))]
    alike = grouped(
        (rows[rank.rank].state, (at, rank.rank)) for rank, at in found if before_ns is None or at <= before_ns
    )
    return [(min(times)[0], state, tuple(sorted(one for _, one in times))) for state, times in alike.items()]


# Our choice: a graph with more nodes cannot be read. Ranks are then folded even if they wait for different ranks.
MOST_CLASSES = 40


def fold_waits(
    targets: Mapping[int, frozenset[int]], rows: Mapping[int, RankRow], blamed: frozenset[int]
) -> RankWaits | None:
    """Return the waits of all ranks by class, or None if nobody waits for anybody.

    Ranks of one class are in the same state at the same line and wait for the same ranks, so that a circle stays one.
    """
    if not targets:
        return None
    taking_part = sorted({*targets}.union(*set(targets.values())))
    ids = {whom: number for number, whom in enumerate(dict.fromkeys(targets.values()))}

    def looks(rank: int) -> Hashable:
        row = rows.get(rank)
        return (row.state if row else "", place_words(row.where) if row else "", rank in blamed)

    alike: dict[Hashable, list[int]] = grouped(
        ((looks(rank), ids.get(targets.get(rank, frozenset()))), rank) for rank in taking_part
    )
    if len(alike) > MOST_CLASSES:
        alike = grouped((looks(rank), rank) for rank in taking_part)
    classes = list(alike.values())[:MOST_CLASSES]
    number_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    pairs = {(number_of[rank], whom) for rank, whom in targets.items() if rank in number_of}
    links = {(number, number_of[one]) for number, whom in pairs for one in whom if one in number_of}
    made = []
    for ranks in classes:
        row = rows.get(ranks[0])
        made.append(
            WaitingRanks(
                ranks=tuple(ranks),
                state=row.state if row is not None else "never started",
                place=place_words(row.where) if row is not None else "",
                blamed=ranks[0] in blamed,
            )
        )
    return RankWaits(classes=tuple(made), links=tuple(sorted(links)))
