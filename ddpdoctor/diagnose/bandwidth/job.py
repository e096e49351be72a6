"""Converts an unfinished bench to the facts of a job, so that the progress rules can judge it.

A rank's position becomes a ``Rank``. The bench's watchers have already confirmed that no rank moved, so their
observations give the time without progress.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.model.bandwidth import Ending
from ddpdoctor.model.facts import Call, GroupState, Job, Life, Raised, Rank
from ddpdoctor.model.stacks import Frame, Stack, StackSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.bandwidth import Bench, Member, Position, Stop

NOW_NS = 10**18
"""The time of the sample, on an artificial clock, because ranks of several hosts share none."""
ENDED_NS = NOW_NS + 1
"""The time at which a rank failed. It is after a stop by the user. Otherwise the order of events is unknown."""
INIT = "init_process_group"
GONE = frozenset({"", "X", "Z"})
_OWN_FOLDER = str(Path(ddpdoctor.__file__).parent) + "/"
_LIBRARY = re.compile(r"/(site|dist)-packages/|/python3(\.\d+)?/|^<")
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)")


def build_job(bench: Bench, stop: Stop) -> Job:
    """Return a stopped bench as a job for the progress rules."""
    positions = {position.rank: position for position in stop.positions}
    states = {int(rank): state for one in stop.positions for rank, state in one.states.items()}
    ends = {int(rank): end for one in stop.positions for rank, end in one.ends.items()}
    interrupted = stop.ending is Ending.INTERRUPTED
    ranks = []
    for member in bench.members:
        position = _without_victims_error(positions.get(member.rank), bench.members, positions)
        if position is None:
            ranks.append(_silent_rank(member, states.get(member.rank), ends.get(member.rank)))
        else:
            rank = _rank(member, position, len(bench.members))
            ranks.append(replace(rank, proc_state=states.get(member.rank)))
    return Job(
        now_ns=NOW_NS,
        hang_timeout_s=_still_s(bench, stop),
        ranks=tuple(ranks),
        world_size=len(bench.members),
        nnodes=len({member.host for member in bench.members}),
        local_ranks_expected=None,
        ended=interrupted,
        stopping_since_ns=NOW_NS if interrupted else None,
        interrupted_by=(stop.signal or "SIGINT") if interrupted else None,
    )


def _still_s(bench: Bench, stop: Stop) -> float:
    """Return how long a rank must have been without progress to be blamed: the shortest such time of all ranks."""
    limit_s = bench.settings.hang_timeout_s
    if stop.ending is Ending.INTERRUPTED:
        return limit_s
    return min([limit_s, *(one.stale_s for one in stop.positions if one.phase != "end")])


def _without_victims_error(
    position: Position | None, members: tuple[Member, ...], positions: Mapping[int, Position]
) -> Position | None:
    """Drop the error of a rank that timed out while waiting for others to connect, so it counts as still waiting."""
    if position is None or position.error is None or position.phase != "connect":
        return position
    late = [one.rank for one in members if one.rank not in positions or not _has_come(positions[one.rank])]
    return replace(position, error=None) if late and late != [position.rank] and _has_come(position) else position


def _has_come(position: Position) -> bool:
    """Return whether a rank has reached the creation of the process group."""
    return position.phase not in {"start", "connect"} or position.op == INIT


def is_in_call(position: Position) -> bool:
    """Return whether a rank is in the call itself: the innermost frame is torch's or ddpdoctor's, which call C++.

    Otherwise a wrapper or hook around the call may block it.
    """
    if not position.inside or not position.stack:
        return position.inside
    file = _frame(position.stack[-1]).file
    return "/torch/" in file or file.startswith(_OWN_FOLDER)


def _rank(member: Member, position: Position, world_size: int) -> Rank:
    frames = tuple(map(_frame, position.stack))
    moved_ns = NOW_NS - int(position.stale_s * 1e9)
    inside = is_in_call(position)
    call = _call(position, frames, moved_ns) if inside else None
    in_group = bool(position.group) and position.op != INIT
    return Rank(
        **_who(member),
        life=Life.RUNNING,
        recorded=True,
        answered=True,
        world_size=world_size,
        initialized=_is_connected(position),
        main_ended_ns=moved_ns if position.phase == "end" else None,
        open_calls=() if call is None else (call,),
        groups=(_group(position, arrived=inside or not position.inside),) if in_group else (),
        samples=(
            StackSample(
                time_ns=NOW_NS,
                by="sampler",
                stacks=(Stack(thread="MainThread", is_main=True, is_daemon=False, frames=frames),),
            ),
        ),
        raised=() if position.error is None else (_raised(position.error, frames, call),),
        last_place=_innermost(frames),
        last_progress_ns=moved_ns if position.error is None else None,
    )


def _silent_rank(member: Member, state: str | None, end: str | None) -> Rank:
    """Return a rank that sent no position. At most its process state and end are known."""
    if state in GONE:
        return Rank(**_who(member), **_end(end), recorded=True, ended_ns=ENDED_NS)
    # A stopped process, or one in uninterruptible sleep, cannot answer.
    explained = state in {"T", "t", "D"}
    return Rank(
        **_who(member),
        life=Life.RUNNING,
        proc_state=state,
        recorded=explained,
        lost=None if explained else "it did not answer",
    )


def _who(member: Member) -> dict[str, Any]:
    return {
        "rank": member.rank,
        "local_rank": member.local_rank,
        "host": member.host,
        "pid": member.pid,
        "attempt": 0,
    }


def _end(end: str | None) -> dict[str, Any]:
    if end is None:
        return {"life": Life.GONE}
    if end.startswith("exit status "):
        return {"life": Life.EXITED, "exit_code": int(end.removeprefix("exit status "))}
    return {"life": Life.SIGNALED, "signal": end}


def _is_connected(position: Position) -> bool:
    return position.phase not in {"start", "connect"} or (position.op == INIT and not position.inside)


def _call(position: Position, frames: tuple[Frame, ...], moved_ns: int) -> Call:
    return Call(
        index=1,
        op=position.op,
        api=position.op,
        group="" if position.op == INIT else _group_name(position),
        seq=None if position.op == INIT else position.calls,
        dtype=None,
        shape=None,
        tensors=1,
        peer=None,
        redop=None,
        site=_innermost(frames),
        started_ns=moved_ns,
        ended_ns=None,
        is_async=False,
        failed=False,
        thread_is_main=True,
    )


def _group(position: Position, *, arrived: bool) -> GroupState:
    return GroupState(
        name=_group_name(position),
        ranks=position.group,
        backend="",
        enqueued=position.calls if arrived else position.calls - 1,
    )


def _group_name(position: Position) -> str:
    return " ".join(map(str, position.group))


def _raised(error: str, frames: tuple[Frame, ...], call: Call | None) -> Raised:
    name, _, message = error.partition(": ")
    return Raised(
        type=name,
        message=message,
        time_ns=ENDED_NS,
        thread_is_main=True,
        uncaught=True,
        in_call=None if call is None else call.op,
        frames=frames,
    )


def _innermost(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost user frame, or the innermost frame of ddpdoctor if there is none."""
    user = [frame for frame in frames if frame.user]
    own = [frame for frame in frames if frame.file.startswith(_OWN_FOLDER)]
    return next(reversed(user or own), None)


def _frame(text: str) -> Frame:
    match = _FRAME.fullmatch(text)
    if match is None:
        return Frame(file=text, line=0, function="", user=False)
    file = match["file"]
    user = not file.startswith(_OWN_FOLDER) and _LIBRARY.search(file) is None
    return Frame(file=file, line=int(match["line"]), function=match["function"], user=user)
