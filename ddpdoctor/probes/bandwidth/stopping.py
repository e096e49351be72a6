"""Ends a bench after an alarm: all ranks say where they are, one of them reports, and all exit with its status.

The watchers do this, because the main thread of any rank may be in a call that never returns.

Keys in the store: ``position/RANK`` says where a rank is, ``ended/RANK`` where it was when it ended well. ``reporters``
counts the ranks that want to report.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.exchange.store import StoreError, wait_until
from ddpdoctor.model.bandwidth import Ending, Position, Stop
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.probes.bandwidth.processes import EXITED, FROZEN, GONE
from ddpdoctor.probes.ranks import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.probes.bandwidth.processes import LocalRanks

ANSWER_LIMIT_S = 4.0
"""Our choice: how long a rank may take to answer. Watchers look once a second, a busy machine may delay them by as
much, and a launcher that ends the ranks gives them about thirty seconds."""
TURN_S, NEXT_TURN_S, MOST_TURNS = 3.0, 0.25, 8
"""Our choice: how long a rank waits for lower ranks to report, and how much longer for each of them."""
REPORT_LIMIT_S = 60.0
"""Our choice: how long judging, drawing and writing a report may take. Plotting libraries take long to import."""
HEAR_LIMIT_S = 2.0
"""Our choice: how long the reporter waits for the others to receive the status."""
LOOK_EVERY_S = 0.05
SOON_S = 0.01
"""Often enough to see how a process ended before its parent reaps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Why the bench must end."""

    ending: Ending
    rank: int
    """The rank that raised the alarm."""
    phase: str
    """The phase that rank was in."""
    signal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What a rank needs to end a bench."""

    rank: int
    members: tuple[Member, ...]
    local_ranks: LocalRanks
    finish: Callable[[Stop], int]
    """Reports the results so far and returns the exit status."""


def stop_together(reporting: Reporting, conversation: Conversation, alarm: Alarm, position: Position) -> int:
    """Return the exit status after one rank has reported. Raises ``StoreError`` only before that."""
    conversation.send(f"position/{reporting.rank}", position)
    # If rank 0 has just finished, it has all results and reports them.
    if end_of(conversation, 0) is not None or not _becomes_reporter(reporting, conversation):
        return _hear_status(conversation, alarm)
    others = _gather(reporting, conversation)
    positions = (_look_again(reporting, position), *others)
    status = _report(reporting, alarm, positions)
    with contextlib.suppress(StoreError):  # the report is written
        conversation.say_goodbye(Ended(status=int(status)), lambda: len(others), HEAR_LIMIT_S)
    return status


def say_ended(conversation: Conversation, position: Position) -> None:
    """Record that this rank ended well, so that the others do not take it for dead."""
    conversation.send(f"ended/{position.rank}", position)


def end_of(conversation: Conversation, rank: int) -> Position | None:
    """Return the last position of a rank that ended well, or None."""
    return conversation.get(Position, f"ended/{rank}", f"rank {rank}")


def stop_alone(reporting: Reporting, alarm: Alarm, position: Position) -> int:
    """Stop without a store: on every host, the lowest rank that is able to reports what it knows."""
    local_ranks = reporting.local_ranks
    unable = local_ranks.unable()
    # A rank that exited by itself has reported already, before this rank came here.
    able = {rank for rank in local_ranks.ranks if rank not in unable or _has_exited(local_ranks, rank)}
    before = sorted(rank for rank in able if rank < reporting.rank)
    if all(_dies(local_ranks, rank) for rank in before):
        return _report(reporting, alarm, (_look_again(reporting, position),))
    return _default_status(alarm)


def _look_again(reporting: Reporting, position: Position) -> Position:
    """Return this rank's position with the present states of the processes on this host.

    A killed process closes its connections before it shows as gone, and a call may fail in between.
    """
    states = {str(rank): state for rank, state in reporting.local_ranks.states().items()}
    return replace(position, states=states, ends={str(rank): end for rank, end in reporting.local_ranks.ends.items()})


def _dies(local_ranks: LocalRanks, rank: int) -> bool:
    """Wait until a rank that may be reporting has ended. Return whether a signal killed it before it could report."""
    wait_until(lambda: rank in local_ranks.gone(), REPORT_LIMIT_S, SOON_S)
    return rank in local_ranks.ends and not _has_exited(local_ranks, rank)


def _has_exited(local_ranks: LocalRanks, rank: int) -> bool:
    return local_ranks.ends.get(rank, "").startswith(EXITED)


def end_process(status: int) -> NoReturn:
    """End this process from another thread, because the main thread may never return."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any longer
            stream.flush()
    os._exit(status)


def _becomes_reporter(reporting: Reporting, conversation: Conversation) -> bool:
    """Return whether this rank must report. It is always only one rank: the lowest of those that answer."""
    unable = reporting.local_ranks.unable()
    before = sum(member.rank < reporting.rank and member.rank not in unable for member in reporting.members)
    wait_s = TURN_S + NEXT_TURN_S * min(before, MOST_TURNS) if before else 0.0
    wait_until(lambda: conversation.add("reporters", 0) > 0, wait_s, LOOK_EVERY_S)
    return conversation.add("reporters", 1) == 1


def _gather(reporting: Reporting, conversation: Conversation) -> list[Position]:
    """Return the positions of the other ranks that answer in time. Do not wait for ranks that cannot answer."""
    positions: dict[int, Position] = {}
    missing = {member.rank for member in reporting.members} - {reporting.rank}
    deadline = time.monotonic() + ANSWER_LIMIT_S
    with contextlib.suppress(StoreError):  # what has come is reported
        while missing:
            for rank in missing:
                position = conversation.get(Position, f"position/{rank}", f"rank {rank}") or end_of(conversation, rank)
                if position is not None:
                    positions[rank] = position
            missing -= positions.keys()
            if not missing - _unable(reporting, positions.values()) or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_EVERY_S)
    return [positions[rank] for rank in sorted(positions)]


def _unable(reporting: Reporting, positions: Iterable[Position]) -> set[int]:
    """Return the ranks that cannot answer, judged by the process states on this host and in other ranks' positions."""
    reported = {int(rank) for one in positions for rank, state in one.states.items() if state in GONE | FROZEN}
    return reported | reporting.local_ranks.unable()


def _hear_status(conversation: Conversation, alarm: Alarm) -> int:
    word = None
    with contextlib.suppress(StoreError):  # the reporter may have served the store, and be gone
        word = conversation.hear_goodbye(Ended, ANSWER_LIMIT_S + REPORT_LIMIT_S)
    return _default_status(alarm) if word is None else word.status


def _default_status(alarm: Alarm) -> int:
    return ExitStatus.INTERRUPTED if alarm.ending is Ending.INTERRUPTED else ExitStatus.FOUND


def _report(reporting: Reporting, alarm: Alarm, positions: Sequence[Position]) -> int:
    stop = Stop(ending=_ending(alarm, positions), phase=alarm.phase, positions=tuple(positions), signal=alarm.signal)
    try:
        return reporting.finish(stop)
    except Exception as error:  # noqa: BLE001 - the process must end, and nobody else can say why
        print(f"ddpdoctor: the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return ExitStatus.DEFECT


def _ending(alarm: Alarm, positions: Sequence[Position]) -> Ending:
    """Return how the bench ended. A hang because a rank had failed counts as a failure."""
    ended = {one.rank for one in positions if one.phase == "end"}
    gone = {int(rank) for one in positions for rank, state in one.states.items() if state in GONE} - ended
    failed = gone or any(one.error is not None for one in positions)
    return Ending.FAILED if failed and alarm.ending is Ending.HUNG else alarm.ending
