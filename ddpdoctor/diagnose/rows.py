"""Builds the report's rows of ranks: the state of each, and its usual step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.facts import Life, Rank
from ddpdoctor.model.findings import RankRow
from ddpdoctor.model.steps import Phase, pace_of
from ddpdoctor.rules.progress.places import main_frames, to_place
from ddpdoctor.rules.progress.states import final_error, stack_of

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job

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
    return _describe_call(rank)


def _describe_call(rank: Rank) -> str:
    for call in reversed(rank.open_calls):
        if call.thread_is_main and not call.is_async:
            awaited = next((one.op for one in rank.open_calls if one.index == call.awaits), None)
            return f"in {awaited}" if awaited else PHASE_WORDS.get(call.op, f"in {call.op}")
    if not rank.recorded:
        return "not recorded"
    return "in the script"


def pace_rows(job: Job) -> list[dict[str, Any]]:
    """Return one row per rank that recorded steps: their number, and medians in milliseconds without waiting."""
    return [row for row in map(_pace_row, job.ranks) if row is not None]


def _pace_row(rank: Rank) -> dict[str, Any] | None:
    times = rank.step_times
    pace = pace_of(times) if times is not None else None
    if times is None or pace is None:
        return None
    return {
        "rank": rank.rank,
        "steps": pace.steps,
        "end_with": times.ends_with.value,
        "step_ms": round(pace.step_ms, 3),
        "before_forward_ms": round(pace.busy_ms[Phase.BEFORE], 3),
        "forward_ms": round(pace.busy_ms[Phase.FORWARD], 3),
        "between_ms": round(pace.busy_ms[Phase.BETWEEN], 3),
        "backward_ms": round(pace.busy_ms[Phase.BACKWARD], 3),
        "waited_ms": round(pace.waited_ms, 3),
    }
