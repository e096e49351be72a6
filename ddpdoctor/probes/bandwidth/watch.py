"""Watches a rank of the bench from a thread: for a hang, a signal, an exception, or the death of another rank.

In each case, partial results are reported and all ranks end. In a healthy bench it reads one counter of the store once
a second, and does nothing else that could disturb a timed call.

Keys in the store: ``home/RANK`` says which process a rank is. A rank that suspects a hang asks the others whether they
progress; ``moving/N`` and ``still/N`` count the answers to question N.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ddpdoctor.exchange.conversation import News
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.bandwidth import Ending
from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.bandwidth.processes import Home, LocalRanks, read_home
from ddpdoctor.probes.bandwidth.signals import CaughtSignals
from ddpdoctor.probes.bandwidth.stopping import (
    ANSWER_LIMIT_S,
    Alarm,
    Reporting,
    end_of,
    end_process,
    say_ended,
    stop_alone,
    stop_together,
)
from ddpdoctor.probes.bandwidth.tracker import MainThreadFailure, describe_failure, take_position
from ddpdoctor.probes.lifeline import Lifeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import Member, Position, Stop
    from ddpdoctor.probes.bandwidth.tracker import Tracker

Given = TypeVar("Given")

LOOK_EVERY_S = 1.0
"""Our choice: soon enough for a waiting user, and it can disturb only one call in thousands."""
SIGTERM_LIMIT_S = 2.0
"""Our choice: how long to look for the reason of a SIGTERM. torchrun sends it within 0.1 s of a rank's death."""
ASK_LATER_S, MOST_LATER = 0.25, 16
"""Our choice: how much later each rank asks than the rank before it, so that few ranks ask."""
STILL_SHARE = 0.5
"""Our choice: a rank answers "still" after this share of the hang timeout without progress, because its last call
before the hang may have ended a little later."""
MEET_LIMIT_S = 5.0
"""Our choice: the ranks have just agreed with each other, so all will soon say which process they are."""
SOON_S = 0.05
NO_NEWS = News(alarm=False, questions=0)
GIL_LIMIT_S = 80.0
"""Our choice: if no Python runs for this much longer than the hang timeout, the process ends itself. Starting CUDA may
hold the GIL for a minute, and the timer is reset only every ``PUT_OFF_EVERY_S``."""
PUT_OFF_EVERY_S = 10.0
STOP_LIMIT_S = 200.0
"""Our choice: the same limit while a report is written, which takes 80 s at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a watcher needs to know about its rank."""

    rank: int
    members: tuple[Member, ...]
    tracker: Tracker
    conversation: Conversation
    hang_timeout_s: float
    finish: Callable[[Stop], int]
    """Reports the results so far and returns the exit status. Called on one rank, in the watcher's thread."""
    gil_limit_s: float = GIL_LIMIT_S
    """How long beyond the hang timeout this process may run no Python."""
    clean_up: Callable[[], None]
    """Called on every rank before a stop ends its process, because the main thread's context managers do not exit."""


class Watcher:
    """A context manager around all phases, for the main thread.

    Inside it, signals and exceptions lead to a report and end the process, so the context is never left.
    ``UserError`` is passed on.
    """

    def __init__(self, watched: Watched) -> None:
        """``watched`` describes this rank."""
        self._watched = watched
        self._conversation = watched.conversation
        self._local_ranks = LocalRanks(read_home())
        self._unknown = {member.rank for member in watched.members if _lives_beside(watched, member)}
        self._meet_until_s = time.monotonic() + MEET_LIMIT_S
        self._signals = CaughtSignals()
        self._lock = threading.Lock()
        self._leaving = self._stopping = False
        self._failure: MainThreadFailure | None = None
        self._ended: set[int] = set()
        self._answered = 0
        self._ask_not_before_s = 0.0
        self._lifeline = Lifeline(_NO_PYTHON.format(rank=watched.rank))
        self._put_off_at_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-watch", daemon=True)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        self._put_off()
        # Not in the thread: even a rank that dies at once must have said which process it is.
        self._introduce()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching. An exception of the bench ends the process instead."""
        if isinstance(error, Exception) and not isinstance(error, UserError):
            self.failed(error)
        with self._lock:
            self._leaving = not self._stopping
        self._signals.wake()
        # If a stop is under way, the thread ends the process during this join.
        self._thread.join()
        with contextlib.suppress(StoreError):
            say_ended(self._conversation, replace(self._position(), phase="end"))
        self._signals.__exit__()
        self._lifeline.release()
        self._local_ranks.close()

    def failed(self, error: BaseException) -> NoReturn:
        """Report an exception of the main thread and end the process."""
        self._failure = describe_failure(error)
        self._signals.wake()
        self._thread.join()
        end_process(1)

    def _run(self) -> None:
        while True:
            caught = self._signals.wait(self._pause_s())
            if self._leaving:
                return
            self._put_off()
            alarm = self._check(caught)
            if alarm is not None and self._begins_to_stop():
                self._stop(alarm)

    def _pause_s(self) -> float:
        """Return the pause between checks. It is short until this host's ranks have said which processes they are."""
        meets = bool(self._unknown) and time.monotonic() < self._meet_until_s
        return SOON_S if meets else LOOK_EVERY_S

    def _put_off(self) -> None:
        """Reset the timer that ends this process if this thread cannot run."""
        now_s = time.monotonic()
        if now_s - self._put_off_at_s >= min(PUT_OFF_EVERY_S, self._watched.gil_limit_s / 2):
            self._put_off_at_s = now_s
            self._lifeline.put_off(self._watched.hang_timeout_s + self._watched.gil_limit_s)

    def _introduce(self) -> None:
        home = read_home()
        if home is not None:
            self._try(lambda: self._conversation.send(f"home/{self._watched.rank}", home), None)

    def _begins_to_stop(self) -> bool:
        """Return False if the main thread has just finished."""
        with self._lock:
            self._stopping = not self._leaving
        return self._stopping

    def _check(self, caught: list[signal.Signals]) -> Alarm | None:
        if self._failure is not None:
            return self._raise(Ending.FAILED)
        if signal.SIGTERM in caught:
            return self._explain_sigterm()
        if caught:
            return self._raise(Ending.INTERRUPTED, caught[0])
        self._meet_local_ranks()
        news = self._try(self._conversation.news, NO_NEWS)
        if news.alarm:
            return self._hear_alarm()
        self._answer(news.questions)
        if self._somebody_died():
            return self._raise(Ending.FAILED)
        return self._raise(Ending.HUNG) if self._all_stand_still() else None

    def _meet_local_ranks(self) -> None:
        for rank in sorted(self._unknown):
            home = self._try(partial(self._conversation.get, Home, f"home/{rank}", f"rank {rank}"), None)
            if home is None:
                continue
            self._unknown.discard(rank)
            descriptor = self._local_ranks.add(rank, home)
            if descriptor is not None:
                self._signals.listen_to(descriptor)

    def _explain_sigterm(self) -> Alarm:
        """Find out whether a launcher sent SIGTERM because a rank failed, or somebody wants the bench to end."""
        deadline = time.monotonic() + SIGTERM_LIMIT_S
        while time.monotonic() < deadline:
            if self._failure is not None or self._somebody_died(where_unknown=True):
                return self._raise(Ending.FAILED)
            if self._try(self._conversation.news, NO_NEWS).alarm:
                return self._hear_alarm()
            self._signals.wait(SOON_S)
        return self._raise(Ending.INTERRUPTED, signal.SIGTERM)

    def _somebody_died(self, *, where_unknown: bool = False) -> bool:
        """Return whether a rank's process on this host is gone without having said that it ended well.

        If the store is lost, nobody knows, and ``where_unknown`` is returned: it may be rank 0, which served the store
        and ended well.
        """
        for rank in self._local_ranks.gone() - self._ended:
            try:
                left_word = end_of(self._conversation, rank) is not None
            except StoreError:
                left_word = not where_unknown
            if not left_word:
                return True
            self._ended.add(rank)
        return False

    def _all_stand_still(self) -> bool:
        """Return whether no call has completed for too long, here and on every rank that answers."""
        later_s = ASK_LATER_S * min(self._watched.rank, MOST_LATER)
        if self._still_s() < self._watched.hang_timeout_s + later_s or time.monotonic() < self._ask_not_before_s:
            return False
        try:
            moving = self._ask_whether_moving()
        except StoreError:
            moving = False
        if moving:
            self._ask_not_before_s = time.monotonic() + self._watched.hang_timeout_s * STILL_SHARE
        return not moving and self._still_s() >= self._watched.hang_timeout_s

    def _ask_whether_moving(self) -> bool:
        """Ask all ranks whether they progress. Those that do not answer in time count as hanging."""
        question = self._conversation.ask()
        self._answer(question)
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while time.monotonic() < deadline:
            if self._conversation.add(f"moving/{question}", 0):
                return True
            still = self._conversation.add(f"still/{question}", 0)
            if still >= len(self._watched.members) - len(self._local_ranks.unable()):
                return False
            news = self._conversation.news()
            if news.alarm:
                return False  # another rank has decided, and answers no more
            self._answer(news.questions)
            time.sleep(SOON_S)
        return False

    def _answer(self, questions: int) -> None:
        """Answer the questions since the last call."""
        moving = self._still_s() < self._watched.hang_timeout_s * STILL_SHARE
        for question in range(self._answered + 1, questions + 1):
            self._try(partial(self._conversation.add, f"{'moving' if moving else 'still'}/{question}", 1), 0)
            # The rank that asked is about to decide.
            self._ask_not_before_s = time.monotonic() + ANSWER_LIMIT_S
        self._answered = max(self._answered, questions)

    def _still_s(self) -> float:
        """Return how long no call has completed here, minus the time that the next one is expected to take."""
        tracker = self._watched.tracker
        return time.monotonic() - tracker.moved_s - tracker.allowance_s

    def _hear_alarm(self) -> Alarm:
        # If the alarm's reason did not arrive, assume a failure.
        return self._try(partial(self._conversation.alarm, Alarm), self._alarm(Ending.FAILED))

    def _raise(self, ending: Ending, number: signal.Signals | None = None) -> Alarm:
        alarm = self._alarm(ending, number)
        return self._try(lambda: self._conversation.raise_alarm(alarm), alarm)

    def _alarm(self, ending: Ending, number: signal.Signals | None = None) -> Alarm:
        name = None if number is None else number.name
        return Alarm(ending=ending, rank=self._watched.rank, phase=self._watched.tracker.phase, signal=name)

    def _position(self) -> Position:
        states = self._local_ranks.states()
        return take_position(self._watched.rank, self._watched.tracker, self._failure, states, self._local_ranks.ends)

    def _stop(self, alarm: Alarm) -> NoReturn:
        watched = self._watched
        self._lifeline.put_off(STOP_LIMIT_S)
        reporting = Reporting(
            rank=watched.rank, members=watched.members, local_ranks=self._local_ranks, finish=watched.finish
        )
        position = self._position()
        try:
            status = stop_together(reporting, self._conversation, alarm, position)
        except StoreError:
            status = stop_alone(reporting, alarm, position)
        watched.clean_up()
        end_process(status)

    def _try(self, call: Callable[[], Given], otherwise: Given) -> Given:
        """Return the result of a store call, or ``otherwise`` if the store is lost, for now or for good."""
        try:
            return call()
        except StoreError:
            return otherwise


_NO_PYTHON = (
    "ddpdoctor: rank {rank} ended itself: no Python could run in it any more, since a call into C++ or CUDA does not "
    "return and holds the interpreter's lock.\n"
    "  In a call of torch.distributed, another rank did not come to it: see what the other ranks report. In "
    "torch.cuda, a GPU or the driver hangs: `ddpdoctor check-env` asks each.\n"
    "  Its stacks:"
)


def _lives_beside(watched: Watched, member: Member) -> bool:
    own = next(one for one in watched.members if one.rank == watched.rank)
    return member.rank != own.rank and member.host == own.host
