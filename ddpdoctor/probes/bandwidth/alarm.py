"""What the watchers of all ranks leave for each other.

Keys, below ``watch/``: ``state``, a counter in which questions and alarms are told; ``home/RANK``; ``still/N`` and
``moving/N``, counters of the answers to question N; ``alarm``; ``position/RANK`` and ``ended/RANK``; ``reporters``.
``status`` and ``left`` are those of a bench that ends well: a rank that has come to its end hears of the others' stop.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.exchange.store import StoreError, wait_for
from ddpdoctor.model.bandwidth import Ending, Position
from ddpdoctor.probes.bandwidth.processes import Home

if TYPE_CHECKING:
    from ddpdoctor.probes.bandwidth.room import Room

_ALARM = 1_000_000
"""What an alarm adds to ``state``, to which a question adds 1: one look a second tells of both."""
MESSAGE_LIMIT_S = 5.0
"""Ours: how long after it has raised the counter a rank may take to leave what the alarm is about."""
LOOK_EVERY_S = 0.05


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
class Told:
    """What one look at the store says."""

    alarm: bool
    questions: int


class AlarmRoom:
    """One rank's access to the keys. Every call raises ``StoreError`` where the store does not answer as it should."""

    def __init__(self, room: Room, rank: int) -> None:
        """Take the bench's own keys, and who this is."""
        self._room, self._rank = room, rank

    def look(self) -> Told:
        """Return whether there is an alarm, and how many questions have been asked so far."""
        return _told(self._room.add("watch/state", 0))

    def say_home(self, home: Home) -> None:
        """Leave which process this rank is."""
        self._room.send(f"watch/home/{self._rank}", home)

    def home_of(self, rank: int) -> Home | None:
        """Return which process a rank is, once it has said so."""
        return self._room.look_for(Home, f"watch/home/{rank}", f"rank {rank}")

    def ask(self) -> int:
        """Ask all ranks whether anything moves; return the question's number."""
        return _told(self._room.add("watch/state", 1)).questions

    def answer(self, question: int, *, moving: bool) -> None:
        """Answer a question."""
        self._room.add(f"watch/{'moving' if moving else 'still'}/{question}", 1)

    def answers(self, question: int) -> tuple[int, int]:
        """Return how many ranks have answered that they move, and how many that they stand still."""
        return self._room.add(f"watch/moving/{question}", 0), self._room.add(f"watch/still/{question}", 0)

    def raise_alarm(self, alarm: Alarm) -> Alarm:
        """Have all ranks stop; return the alarm that counts, which is another's where that came first."""
        if self._room.add("watch/state", _ALARM) // _ALARM > 1:
            return self.raised()
        self._room.send("watch/alarm", alarm)
        return alarm

    def raised(self) -> Alarm:
        """Return the alarm that was raised."""
        return self._room.receive(Alarm, "watch/alarm", MESSAGE_LIMIT_S, "the rank that raised the alarm")

    def say_position(self, position: Position) -> None:
        """Leave where this rank is."""
        self._room.send(f"watch/position/{self._rank}", position)

    def say_ended(self, position: Position) -> None:
        """Leave word that this rank has come to its end, so that nobody misses it."""
        self._room.send(f"watch/ended/{self._rank}", position)

    def position_of(self, rank: int) -> Position | None:
        """Return where a rank is, or where it ended well, once it has said so."""
        return self._room.look_for(Position, f"watch/position/{rank}", f"rank {rank}") or self.end_of(rank)

    def end_of(self, rank: int) -> Position | None:
        """Return the last position of a rank that has come to its end."""
        return self._room.look_for(Position, f"watch/ended/{rank}", f"rank {rank}")

    def has_reporter(self) -> bool:
        """Return whether a rank has taken it upon itself to report."""
        return self._room.add("watch/reporters", 0) > 0

    def become_reporter(self) -> bool:
        """Take it upon this rank to report; False where another was first."""
        return self._room.add("watch/reporters", 1) == 1

    def say_status(self, status: int, others: int, limit_s: float) -> None:
        """Tell the others with which status to end, and wait until so many have heard it."""
        self._room.set("status", b"%d" % status)
        deadline = time.monotonic() + limit_s
        while self._room.add("left", 0) < others and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)

    def hear_status(self, limit_s: float) -> int | None:
        """Return the status to end with; None where the reporter has not told it in time."""
        message = wait_for(self._room, "status", limit_s)
        if message is None:
            return None
        with suppress(StoreError):  # the reporter ends with that word, and its answer may come no more
            self._room.add("left", 1)
        return int(message)


def _told(state: int) -> Told:
    return Told(alarm=state >= _ALARM, questions=state % _ALARM)
