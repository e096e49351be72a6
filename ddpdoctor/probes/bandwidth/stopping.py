"""Ends a bench after an alarm: all ranks say where they are, one of them reports, and all end with its status.

The main thread may sit in a call that never returns, and so may that of any other rank: the watchers do all this.

Keys: ``position/RANK`` and ``ended/RANK`` say where a rank is, or was when it ended well; ``reporters`` counts the
ranks that took it upon themselves to report.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.bandwidth import Ending, Position, Stop
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.probes.bandwidth.processes import EXITED, FROZEN, GONE
from ddpdoctor.probes.ranks import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.probes.bandwidth.processes import Neighbours

ANSWER_LIMIT_S = 4.0
"""Ours: how long a rank may take to answer. Watchers look once a second; a busy machine may delay them for as long
again, and a launcher that ends the ranks gives them some thirty seconds."""
TURN_S, NEXT_TURN_S, MOST_TURNS = 3.0, 0.25, 8
"""Ours: how long a rank leaves it to lower ones to report, and how much longer each further one does."""
REPORT_LIMIT_S = 60.0
"""Ours: how long a report may take to be judged, drawn and written; plotting libraries take long to import."""
HEAR_LIMIT_S = 2.0
"""Ours: how long the reporter stays for the others to hear how it went."""
LOOK_EVERY_S = 0.05
SOON_S = 0.01
"""Often enough to see how a process ended, before its parent has taken notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Why the bench is to end."""

    ending: Ending
    rank: int
    """Who raised it."""
    phase: str
    """In which phase that rank was."""
    signal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What is needed to end a bench."""

    rank: int
    members: tuple[Member, ...]
    neighbours: Neighbours
    finish: Callable[[Stop], int]
    """Writes the report of what there is, and returns the exit status."""


def stop_together(reporting: Reporting, conversation: Conversation, alarm: Alarm, position: Position) -> int:
    """Return the status to end with, after one rank has reported; raises ``StoreError`` before that."""
    conversation.send(f"position/{reporting.rank}", position)
    # Rank 0 may have come to its end just now: then it has all there is, and reports that.
    if end_of(conversation, 0) is not None or not _becomes_reporter(reporting, conversation):
        return _hear_status(conversation, alarm)
    others = _gather(reporting, conversation)
    positions = (_look_again(reporting, position), *others)
    status = _report(reporting, alarm, positions)
    with contextlib.suppress(StoreError):  # the report is written
        conversation.say_goodbye(Ended(status=int(status)), lambda: len(others), HEAR_LIMIT_S)
    return status


def say_ended(conversation: Conversation, position: Position) -> None:
    """Leave word that this rank has come to its end, so that nobody misses it."""
    conversation.send(f"ended/{position.rank}", position)


def end_of(conversation: Conversation, rank: int) -> Position | None:
    """Return the last position of a rank that has come to its end."""
    return conversation.look(Position, f"ended/{rank}", f"rank {rank}")


def stop_alone(reporting: Reporting, alarm: Alarm, position: Position) -> int:
    """Do the same where the store is lost: on every host the lowest rank that can reports what it knows."""
    neighbours = reporting.neighbours
    unable = neighbours.unable()
    # A rank that exited by itself has reported: this one may come here only after that.
    able = {rank for rank in neighbours.ranks if rank not in unable or _has_exited(neighbours, rank)}
    before = sorted(rank for rank in able if rank < reporting.rank)
    if all(_dies(neighbours, rank) for rank in before):
        return _report(reporting, alarm, (_look_again(reporting, position),))
    return _untold(alarm)


def _look_again(reporting: Reporting, position: Position) -> Position:
    """Return this rank's position with what is known of the processes beside it by now.

    A process that is killed closes its connections before it shows as gone, so that a call may fail in between.
    """
    states = {str(rank): state for rank, state in reporting.neighbours.states().items()}
    return replace(position, states=states, ends={str(rank): end for rank, end in reporting.neighbours.ends.items()})


def _dies(neighbours: Neighbours, rank: int) -> bool:
    """Wait for the end of a rank that is about to report; return whether a signal kept it from that."""
    deadline = time.monotonic() + REPORT_LIMIT_S
    while rank not in neighbours.gone() and time.monotonic() < deadline:
        time.sleep(SOON_S)
    return rank in neighbours.ends and not _has_exited(neighbours, rank)


def _has_exited(neighbours: Neighbours, rank: int) -> bool:
    return neighbours.ends.get(rank, "").startswith(EXITED)


def end_process(status: int) -> NoReturn:
    """End this process without its main thread, which cannot be asked to."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any longer
            stream.flush()
    os._exit(status)


def _becomes_reporter(reporting: Reporting, conversation: Conversation) -> bool:
    """Return whether this rank is to report: the lowest of those that answer. Only one ever is."""
    unable = reporting.neighbours.unable()
    before = sum(member.rank < reporting.rank and member.rank not in unable for member in reporting.members)
    wait_s = TURN_S + NEXT_TURN_S * min(before, MOST_TURNS) if before else 0.0
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if conversation.add("reporters", 0) > 0:
            return False
        time.sleep(LOOK_EVERY_S)
    return conversation.add("reporters", 1) == 1


def _gather(reporting: Reporting, conversation: Conversation) -> list[Position]:
    """Return the positions of the others that answer in time. Those whose process cannot are not waited for."""
    positions: dict[int, Position] = {}
    missing = {member.rank for member in reporting.members} - {reporting.rank}
    deadline = time.monotonic() + ANSWER_LIMIT_S
    with contextlib.suppress(StoreError):  # what has come is reported
        while missing:
            for rank in missing:
                position = conversation.look(Position, f"position/{rank}", f"rank {rank}") or end_of(conversation, rank)
                if position is not None:
                    positions[rank] = position
            missing -= positions.keys()
            if not missing - _unable(reporting, positions.values()) or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_EVERY_S)
    return [positions[rank] for rank in sorted(positions)]


def _unable(reporting: Reporting, positions: Iterable[Position]) -> set[int]:
    """Return the ranks that cannot answer, by what is seen on this host and reported from others."""
    reported = {int(rank) for one in positions for rank, state in one.states.items() if state in GONE | FROZEN}
    return reported | reporting.neighbours.unable()


def _hear_status(conversation: Conversation, alarm: Alarm) -> int:
    word = None
    with contextlib.suppress(StoreError):  # the reporter may have served the store, and be gone
        word = conversation.hear_goodbye(Ended, ANSWER_LIMIT_S + REPORT_LIMIT_S)
    return _untold(alarm) if word is None else word.status


def _untold(alarm: Alarm) -> int:
    return ExitStatus.INTERRUPTED if alarm.ending is Ending.INTERRUPTED else ExitStatus.FOUND


def _report(reporting: Reporting, alarm: Alarm, positions: Sequence[Position]) -> int:
    stop = Stop(ending=_ending(alarm, positions), phase=alarm.phase, positions=tuple(positions), signal=alarm.signal)
    try:
        return reporting.finish(stop)
    except Exception as error:  # noqa: BLE001 - the process must end, and nobody else can say why
        print(f"ddpdoctor: the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return ExitStatus.DEFECT


def _ending(alarm: Alarm, positions: Sequence[Position]) -> Ending:
    """Return how the bench ended: where nothing moved because a rank had failed, it failed."""
    ended = {one.rank for one in positions if one.phase == "end"}
    gone = {int(rank) for one in positions for rank, state in one.states.items() if state in GONE} - ended
    failed = gone or any(one.error is not None for one in positions)
    return Ending.FAILED if failed and alarm.ending is Ending.HUNG else alarm.ending
