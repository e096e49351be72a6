"""Watches a rank of the bench from a thread: for a hang, a signal, an exception, or the death of another rank.

Keys in the store: ``home/RANK`` says which process a rank is; ``moving/N`` and ``still/N`` count answers to question N.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ddpdoctor.collect.proc import read_link, read_process, read_text
from ddpdoctor.exchange.conversation import News
from ddpdoctor.exchange.store import StoreError, wait_until
from ddpdoctor.model.bandwidth import Ending, Position, Stop
from ddpdoctor.model.errors import ExitStatus, UserError, typed_line
from ddpdoctor.probes.loading import Lifeline
from ddpdoctor.probes.ranks import Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.probes.bandwidth.collectives import Tracker

Given = TypeVar("Given")
LOOK_EVERY_S = 1.0  # our choice: soon enough for a waiting user, and it can disturb only one call in thousands
# Our choice: how long to look for the reason of a SIGTERM. torchrun sends it within 0.1 s of a rank's death.
SIGTERM_LIMIT_S = 2.0
# Our choice: how much later each rank asks than the rank before it, so that few ranks ask.
ASK_LATER_S, MOST_LATER = 0.25, 16
# Our choice: a rank answers "still" after this share of the hang timeout without progress, because its last call before
# the hang may have ended a little later.
STILL_SHARE = 0.5
# Our choice: the ranks have just agreed with each other, so all will soon say which process they are.
MEET_LIMIT_S = 5.0
SOON_S = 0.05
NO_NEWS = News(alarm=False, questions=0)
# Our choice: if no Python runs for this much longer than the hang timeout, the process ends itself. Starting CUDA may
# hold the GIL for a minute, and the timer is reset only every ``PUT_OFF_EVERY_S``.
GIL_LIMIT_S = 80.0
PUT_OFF_EVERY_S = 10.0
STOP_LIMIT_S = 200.0  # our choice: the same limit while a report is written, which takes 80 s at most
_NO_PYTHON = (
    "ddpdoctor: rank {rank} ended itself: it could no longer run Python, because a call into C++ or CUDA does not "
    "return and holds the interpreter's lock.\n"
    "  In a torch.distributed call, another rank did not join it: see the reports of the other ranks. In "
    "torch.cuda, a GPU or the driver hangs: `ddpdoctor check-env` tests each.\n"
    "  Its stacks:"
)
# Our choice: how long a rank may take to answer. Watchers look once a second, a busy machine may delay them by as much,
# and a launcher that ends the ranks gives them about thirty seconds.
ANSWER_LIMIT_S = 4.0
# Our choice: how long a rank waits for lower ranks to report, and how much longer for each of them.
TURN_S, NEXT_TURN_S, MOST_TURNS = 3.0, 0.25, 8
# Our choice: how long judging, drawing and writing a report may take. Plotting libraries take long to import.
REPORT_LIMIT_S = 60.0
HEAR_LIMIT_S = 2.0  # our choice: how long the reporter waits for the others to receive the status
ASK_EVERY_S = 0.05
GONE_EVERY_S = 0.01  # often enough to see how a process ended before its parent reaps it
PROC = Path("/proc")
GONE = frozenset({"", "Z", "X"})  # state letters of a process that has ended; "" if it no longer exists
FROZEN = frozenset({"T", "t"})  # state letters of a process that a signal or a debugger has stopped
EXITED = "exit status "  # start of the description of a process that ended by itself
MAX_FRAMES = 60  # our choice: how many innermost frames of a stack are kept
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Why the bench must end."""

    ending: Ending
    rank: int  # the rank that raised the alarm
    phase: str  # the phase that rank was in
    signal: str | None = None


@dataclass(kw_only=True, eq=False)
class Watcher:
    """A context manager around all phases of one rank, for the main thread.

    Inside it, signals and exceptions lead to a report and end the process, so the context is never left.
    ``UserError`` is passed on.
    """

    rank: int
    members: tuple[Member, ...]
    tracker: Tracker
    conversation: Conversation
    hang_timeout_s: float
    # Reports the results so far and returns the exit status. Called on one rank, in the watcher's thread.
    finish: Callable[[Stop], int]
    # Called on every rank before a stop ends its process, because the main thread's context managers do not exit.
    clean_up: Callable[[], None]
    gil_limit_s: float = GIL_LIMIT_S  # how long beyond the hang timeout this process may run no Python
    local_ranks: LocalRanks = field(default_factory=lambda: LocalRanks(read_home()))
    failure: BaseException | None = None  # what the bench raised
    _answered: int = 0  # how many questions of other ranks
    _ask_not_before_s: float = 0.0

    def __enter__(self) -> Self:
        own_host = next(member.host for member in self.members if member.rank == self.rank)
        self._unknown = {member.rank for member in self.members if member.host == own_host} - {self.rank}
        self._meet_until_s = time.monotonic() + MEET_LIMIT_S
        self._lock = threading.Lock()
        self._leaving = self._stopping = False
        self._ended: set[int] = set()
        self._lifeline = Lifeline(_NO_PYTHON.format(rank=self.rank))
        self._put_off_at_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-watch", daemon=True)
        self._signals = CaughtSignals()
        self._put_off()
        # Not in the thread: even a rank that dies at once must have said which process it is.
        home = read_home()
        if home is not None:
            self._try(lambda: self.conversation.send(f"home/{self.rank}", home), None)
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            self.failure = error
            self._signals.wake()
            self._thread.join()
            end_process(1)
        with self._lock:
            self._leaving = not self._stopping
        self._signals.wake()
        # If a stop is under way, the thread ends the process during this join.
        self._thread.join()
        with contextlib.suppress(StoreError):
            # So that the others do not take this rank for dead
            self.conversation.send(f"ended/{self.rank}", replace(self.position(), phase="end"))
        self._signals.close()
        self._lifeline.release()
        self.local_ranks.close()

    def _run(self) -> None:
        while True:
            # The pause is short until this host's ranks have said which processes they are.
            meets = bool(self._unknown) and time.monotonic() < self._meet_until_s
            caught = self._signals.wait(SOON_S if meets else LOOK_EVERY_S)
            if self._leaving:
                return
            self._put_off()
            alarm = self._check(caught)
            if alarm is None:
                continue
            with self._lock:
                self._stopping = not self._leaving  # the main thread may have just finished
            if self._stopping:
                self._lifeline.put_off(STOP_LIMIT_S)
                position = self.position()
                try:
                    status = self._stop_together(alarm, position)
                except StoreError:
                    status = self.stop_alone(alarm, position)
                self.clean_up()
                end_process(status)

    def _put_off(self) -> None:
        """Reset the timer that ends this process if this thread cannot run."""
        now_s = time.monotonic()
        if now_s - self._put_off_at_s >= min(PUT_OFF_EVERY_S, self.gil_limit_s / 2):
            self._put_off_at_s = now_s
            self._lifeline.put_off(self.hang_timeout_s + self.gil_limit_s)

    def _check(self, caught: list[signal.Signals]) -> Alarm | None:
        """Return why the bench must end, which the other ranks then know too, or None."""
        if self.failure is not None:
            return self._alarm(Ending.FAILED)
        if signal.SIGTERM in caught:
            # Find out whether a launcher sent SIGTERM because a rank failed, or somebody wants the bench to end
            deadline = time.monotonic() + SIGTERM_LIMIT_S
            while time.monotonic() < deadline:
                if self.failure is not None or self._somebody_died(where_unknown=True):
                    return self._alarm(Ending.FAILED)
                if self._try(self.conversation.news, NO_NEWS).alarm:
                    return self._alarm(Ending.FAILED, heard=True)
                self._signals.wait(SOON_S)
            return self._alarm(Ending.INTERRUPTED, signal.SIGTERM)
        if caught:
            return self._alarm(Ending.INTERRUPTED, caught[0])
        for rank in sorted(self._unknown):
            home = self._try(partial(self.conversation.get, Home, f"home/{rank}", f"rank {rank}"), None)
            if home is None:
                continue
            self._unknown.discard(rank)
            descriptor = self.local_ranks.add(rank, home)
            if descriptor is not None:
                self._signals.selector.register(descriptor, selectors.EVENT_READ)
        news = self._try(self.conversation.news, NO_NEWS)
        if news.alarm:
            return self._alarm(Ending.FAILED, heard=True)
        self._answer(news.questions)
        if self._somebody_died():
            return self._alarm(Ending.FAILED)
        return self._alarm(Ending.HUNG) if self._all_stand_still() else None

    def _somebody_died(self, *, where_unknown: bool = False) -> bool:
        """Return whether a rank's process on this host is gone without having said that it ended well."""
        # If the store is lost, nobody knows, and ``where_unknown`` is returned: it may be rank 0, which served the
        # store and ended well.
        for rank in self.local_ranks.gone() - self._ended:
            left_word = not where_unknown
            with contextlib.suppress(StoreError):
                left_word = self._end_of(rank) is not None
            if not left_word:
                return True
            self._ended.add(rank)
        return False

    def _all_stand_still(self) -> bool:
        """Return whether no call has completed for too long, here and on every rank that answers in time."""
        later_s = ASK_LATER_S * min(self.rank, MOST_LATER)
        if self._still_s() < self.hang_timeout_s + later_s or time.monotonic() < self._ask_not_before_s:
            return False
        moving = False
        with contextlib.suppress(StoreError):
            question = self.conversation.ask()
            self._answer(question)
            deadline = time.monotonic() + ANSWER_LIMIT_S
            while time.monotonic() < deadline:
                if moving := bool(self.conversation.add(f"moving/{question}", 0)):
                    break
                still = self.conversation.add(f"still/{question}", 0)
                if still >= len(self.members) - len(self.local_ranks.unable()):
                    break
                news = self.conversation.news()
                if news.alarm:
                    break  # another rank has decided, and answers no more
                self._answer(news.questions)
                time.sleep(SOON_S)
        if moving:
            self._ask_not_before_s = time.monotonic() + self.hang_timeout_s * STILL_SHARE
        return not moving and self._still_s() >= self.hang_timeout_s

    def _answer(self, questions: int) -> None:
        moving = self._still_s() < self.hang_timeout_s * STILL_SHARE
        for question in range(self._answered + 1, questions + 1):
            self._try(partial(self.conversation.add, f"{'moving' if moving else 'still'}/{question}", 1), 0)
            # The rank that asked is about to decide.
            self._ask_not_before_s = time.monotonic() + ANSWER_LIMIT_S
        self._answered = max(self._answered, questions)

    def _still_s(self) -> float:
        """Return how long no call has completed here, minus the time that the next one is expected to take."""
        return time.monotonic() - self.tracker.moved_s - self.tracker.allowance_s

    def _alarm(self, ending: Ending, number: signal.Signals | None = None, *, heard: bool = False) -> Alarm:
        """Raise an alarm, or return the one that was ``heard``. Without a store, this rank's own counts."""
        name = None if number is None else number.name
        own = Alarm(ending=ending, rank=self.rank, phase=self.tracker.phase, signal=name)
        if heard:
            return self._try(partial(self.conversation.alarm, Alarm), own)
        return self._try(partial(self.conversation.raise_alarm, own), own)

    def _try(self, call: Callable[[], Given], otherwise: Given) -> Given:
        """Return the result of a store call, or ``otherwise`` if the store is lost, for now or for good."""
        try:
            return call()
        except StoreError:
            return otherwise

    def position(self) -> Position:
        """Return where the main thread is, or where its error arose, and the states of this host's processes."""
        error, tracker = self.failure, self.tracker
        if error is not None:
            frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
        else:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way
            frames = list(islice(traceback.walk_stack(frame), MAX_FRAMES))[::-1] if frame is not None else []
        return Position(
            rank=self.rank, phase=tracker.phase, what=tracker.what, group=tracker.group, calls=tracker.calls,
            op=tracker.op, inside=tracker.inside, stale_s=max(0.0, time.monotonic() - tracker.moved_s),
            stack=tuple(f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in frames),
            error=None if error is None else typed_line(error), **self.local_ranks.seen(),
        )  # fmt: skip

    def _stop_together(self, alarm: Alarm, position: Position) -> int:
        """Return the exit status after one rank has reported. Raises ``StoreError`` only before that."""
        self.conversation.send(f"position/{self.rank}", position)
        # If rank 0 has just finished, it has all results and reports them. Else the lowest rank that answers reports.
        reports = False
        if self._end_of(0) is None:
            unable = self.local_ranks.unable()
            before = sum(member.rank < self.rank and member.rank not in unable for member in self.members)
            wait_s = TURN_S + NEXT_TURN_S * min(before, MOST_TURNS) if before else 0.0
            wait_until(lambda: self.conversation.add("reporters", 0) > 0, wait_s, ASK_EVERY_S)
            reports = self.conversation.add("reporters", 1) == 1
        if not reports:
            word = None
            with contextlib.suppress(StoreError):  # the reporter may have served the store, and be gone
                word = self.conversation.hear_goodbye(Ended, ANSWER_LIMIT_S + REPORT_LIMIT_S)
            return _default_status(alarm) if word is None else word.status
        others = self._gather()
        status = self._report(alarm, position, others)
        with contextlib.suppress(StoreError):  # the report is written
            self.conversation.say_goodbye(Ended(status=int(status)), lambda: len(others), HEAR_LIMIT_S)
        return status

    def _end_of(self, rank: int) -> Position | None:
        return self.conversation.get(Position, f"ended/{rank}", f"rank {rank}")

    def stop_alone(self, alarm: Alarm, position: Position) -> int:
        """Stop without a store: on every host, the lowest rank that is able to reports what it knows."""
        local_ranks = self.local_ranks

        def has_exited(rank: int) -> bool:
            return local_ranks.ends.get(rank, "").startswith(EXITED)

        unable = local_ranks.unable()
        # A rank that exited by itself has reported already, before this rank came here.
        able = (rank for rank in local_ranks.ranks if rank not in unable or has_exited(rank))
        for rank in [rank for rank in able if rank < self.rank]:
            # Wait until one that may be reporting has ended. If no signal killed it before, it has reported.
            deadline = time.monotonic() + REPORT_LIMIT_S
            while rank not in local_ranks.gone() and time.monotonic() < deadline:
                time.sleep(GONE_EVERY_S)
            if rank not in local_ranks.ends or has_exited(rank):
                return _default_status(alarm)
        return self._report(alarm, position, [])

    def _gather(self) -> list[Position]:
        """Return the positions of the other ranks that answer in time. Do not wait for ranks that cannot answer."""
        positions: dict[int, Position] = {}
        missing = {member.rank for member in self.members} - {self.rank}
        deadline = time.monotonic() + ANSWER_LIMIT_S
        with contextlib.suppress(StoreError):  # what has come is reported
            while missing:
                for rank in missing:
                    position = self.conversation.get(Position, f"position/{rank}", f"rank {rank}") or self._end_of(rank)
                    if position is not None:
                        positions[rank] = position
                missing -= positions.keys()
                # Those whose processes cannot answer, as seen here and by other ranks
                seen = (position.states.items() for position in positions.values())
                unable = {int(rank) for states in seen for rank, state in states if state in GONE | FROZEN}
                if not missing - unable - self.local_ranks.unable() or time.monotonic() >= deadline:
                    break
                time.sleep(ASK_EVERY_S)
        return [positions[rank] for rank in sorted(positions)]

    def _report(self, alarm: Alarm, position: Position, others: list[Position]) -> int:
        positions = (replace(position, **self.local_ranks.seen()), *others)
        ended = {place.rank for place in positions if place.phase == "end"}
        gone = {int(rank) for place in positions for rank, state in place.states.items() if state in GONE} - ended
        # A hang because a rank had failed counts as a failure.
        failed = gone or any(place.error is not None for place in positions)
        ending = Ending.FAILED if failed and alarm.ending is Ending.HUNG else alarm.ending
        try:
            return self.finish(Stop(ending=ending, phase=alarm.phase, positions=positions, signal=alarm.signal))
        except Exception as error:  # noqa: BLE001 - the process must end, and nobody else can say why
            print(f"ddpdoctor: the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            return ExitStatus.DEFECT


def _default_status(alarm: Alarm) -> int:
    return ExitStatus.INTERRUPTED if alarm.ending is Ending.INTERRUPTED else ExitStatus.FOUND


def end_process(status: int) -> NoReturn:
    """End this process from another thread, because the main thread may never return."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any longer
            stream.flush()
    os._exit(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Which process a rank is. Two pids can be compared only if ``space`` is the same."""

    space: str  # the boot id of the machine, and the pid namespace
    pid: int
    started_ticks: int


def read_home() -> Home | None:
    own = read_process(os.getpid())
    boot, namespace = read_text(PROC / "sys/kernel/random/boot_id").strip(), read_link(PROC / "self/ns/pid")
    if own is None or not boot or not namespace:
        return None
    return Home(space=f"{boot} {namespace}", pid=own.pid, started_ticks=own.start_ticks)


def describe_end(wait_status: int) -> str:
    """Return how a process ended: "SIGKILL" or "exit status 3"."""
    code = os.waitstatus_to_exitcode(wait_status)
    try:
        return f"{EXITED}{code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class LocalRanks:
    """The processes of other ranks that this process can see: none if it does not know itself."""

    def __init__(self, own: Home | None) -> None:
        self._own = own
        self._homes: dict[int, Home] = {}
        self._pidfds: dict[int, int] = {}
        # How processes ended. It can be seen only for a moment, until their parent reaps them.
        self.ends: dict[int, str] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._homes))

    def add(self, rank: int, home: Home) -> int | None:
        """Add a rank of our pid namespace. Return a descriptor that becomes readable when it ends, if any."""
        if self._own is None or home.space != self._own.space:
            return None
        self._homes[rank] = home
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            self._pidfds[rank] = os.pidfd_open(home.pid)
            return self._pidfds[rank]
        return None

    def states(self) -> dict[int, str]:
        """Return the state letter of each rank's process, "" if it is gone. Remember how processes ended."""
        states = {}
        for rank, home in self._homes.items():
            seen = read_process(home.pid)
            if seen is None or seen.start_ticks != home.started_ticks:
                states[rank] = ""
                continue
            states[rank] = seen.state
            if seen.state in GONE and rank not in self.ends:
                self.ends[rank] = describe_end(seen.exit_status or 0)
        return states

    def seen(self) -> dict[str, Any]:
        """Return what a ``Position`` says of the processes on this host."""
        # It is read again for a report: a killed process closes its connections before it shows as gone, and a call may
        # fail in between.
        states = {str(rank): state for rank, state in self.states().items()}
        return {"states": states, "ends": {str(rank): end for rank, end in self.ends.items()}}

    def gone(self) -> frozenset[int]:
        return frozenset(rank for rank, state in self.states().items() if state in GONE)

    def unable(self) -> frozenset[int]:
        """Return the ranks whose processes cannot answer: they have ended or are stopped."""
        return frozenset(rank for rank, state in self.states().items() if state in GONE | FROZEN)

    def close(self) -> None:
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()


class CaughtSignals:
    """Until ``close``, signals that would end the process wake another thread instead."""

    # A signal that is ignored stays ignored, such as SIGINT in a shell's background jobs.

    def __init__(self) -> None:
        self._former: dict[signal.Signals, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self.selector = selectors.DefaultSelector()  # a descriptor in it that becomes readable ends ``wait`` once
        self.selector.register(self._reader, selectors.EVENT_READ)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in CAUGHT:  # Python itself writes the number to the wakeup descriptor
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, lambda *_: None)

    def close(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self.selector.close()
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def wait(self, limit_s: float) -> list[signal.Signals]:
        """Wait, and return the signals that have come; [] after the limit or a wake-up."""
        for key, _ in self.selector.select(limit_s):
            if key.fileobj is not self._reader:
                self.selector.unregister(key.fileobj)
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in CAUGHT]
