"""Watches a rank of the bench from a thread: for a hang, a signal, an exception, or the death of another rank.

In each case, partial results are reported and all ranks end. In a healthy bench it reads one counter of the store once
a second, and does nothing else that could disturb a timed call.

Keys in the store: ``home/RANK`` says which process a rank is. A rank that suspects a hang asks the others whether they
progress; ``moving/N`` and ``still/N`` count the answers to question N.
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
from dataclasses import dataclass, replace
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
    from collections.abc import Callable, Sequence
    from types import TracebackType

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
    "ddpdoctor: rank {rank} ended itself: no Python could run in it any more, since a call into C++ or CUDA does not "
    "return and holds the interpreter's lock.\n"
    "  In a call of torch.distributed, another rank did not come to it: see what the other ranks report. In "
    "torch.cuda, a GPU or the driver hangs: `ddpdoctor check-env` asks each.\n"
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
class Watched:
    """What a watcher needs to know about its rank."""

    rank: int
    members: tuple[Member, ...]
    tracker: Tracker
    conversation: Conversation
    hang_timeout_s: float
    # Reports the results so far and returns the exit status. Called on one rank, in the watcher's thread.
    finish: Callable[[Stop], int]
    gil_limit_s: float = GIL_LIMIT_S  # how long beyond the hang timeout this process may run no Python
    # Called on every rank before a stop ends its process, because the main thread's context managers do not exit.
    clean_up: Callable[[], None]


class Watcher:
    """A context manager around all phases, for the main thread.

    Inside it, signals and exceptions lead to a report and end the process, so the context is never left.
    ``UserError`` is passed on.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._conversation = watched.conversation
        self._local_ranks = LocalRanks(read_home())
        own_host = next(member.host for member in watched.members if member.rank == watched.rank)
        beside = {member.rank for member in watched.members if member.host == own_host}
        self._unknown = beside - {watched.rank}
        self._meet_until_s = time.monotonic() + MEET_LIMIT_S
        self._lock = threading.Lock()
        self._leaving = self._stopping = False
        self._failure: BaseException | None = None
        self._ended: set[int] = set()
        self._answered = 0
        self._ask_not_before_s = 0.0
        self._lifeline = Lifeline(_NO_PYTHON.format(rank=watched.rank))
        self._put_off_at_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-watch", daemon=True)
        self._signals = CaughtSignals()

    def __enter__(self) -> Self:
        self._put_off()
        # Not in the thread: even a rank that dies at once must have said which process it is.
        home = read_home()
        if home is not None:
            self._try(lambda: self._conversation.send(f"home/{self._watched.rank}", home), None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching. An exception of the bench ends the process instead."""
        if isinstance(error, Exception) and not isinstance(error, UserError):
            self._failure = error
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
            self._conversation.send(f"ended/{self._watched.rank}", replace(self._position(), phase="end"))
        self._signals.close()
        self._lifeline.release()
        self._local_ranks.close()

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
                self._stop(alarm)

    def _put_off(self) -> None:
        """Reset the timer that ends this process if this thread cannot run."""
        now_s = time.monotonic()
        if now_s - self._put_off_at_s >= min(PUT_OFF_EVERY_S, self._watched.gil_limit_s / 2):
            self._put_off_at_s = now_s
            self._lifeline.put_off(self._watched.hang_timeout_s + self._watched.gil_limit_s)

    def _check(self, caught: list[signal.Signals]) -> Alarm | None:
        """Return why the bench must end, which the other ranks then know too, or None."""
        if self._failure is not None:
            return self._alarm(Ending.FAILED)
        if signal.SIGTERM in caught:
            # Find out whether a launcher sent SIGTERM because a rank failed, or somebody wants the bench to end
            deadline = time.monotonic() + SIGTERM_LIMIT_S
            while time.monotonic() < deadline:
                if self._failure is not None or self._somebody_died(where_unknown=True):
                    return self._alarm(Ending.FAILED)
                if self._try(self._conversation.news, NO_NEWS).alarm:
                    return self._alarm(Ending.FAILED, heard=True)
                self._signals.wait(SOON_S)
            return self._alarm(Ending.INTERRUPTED, signal.SIGTERM)
        if caught:
            return self._alarm(Ending.INTERRUPTED, caught[0])
        for rank in sorted(self._unknown):
            home = self._try(partial(self._conversation.get, Home, f"home/{rank}", f"rank {rank}"), None)
            if home is None:
                continue
            self._unknown.discard(rank)
            descriptor = self._local_ranks.add(rank, home)
            if descriptor is not None:
                self._signals.selector.register(descriptor, selectors.EVENT_READ)
        news = self._try(self._conversation.news, NO_NEWS)
        if news.alarm:
            return self._alarm(Ending.FAILED, heard=True)
        self._answer(news.questions)
        if self._somebody_died():
            return self._alarm(Ending.FAILED)
        return self._alarm(Ending.HUNG) if self._all_stand_still() else None

    def _somebody_died(self, *, where_unknown: bool = False) -> bool:
        """Return whether a rank's process on this host is gone without having said that it ended well.

        If the store is lost, nobody knows, and ``where_unknown`` is returned: it may be rank 0, which served the store
        and ended well.
        """
        for rank in self._local_ranks.gone() - self._ended:
            left_word = not where_unknown
            with contextlib.suppress(StoreError):
                left_word = end_of(self._conversation, rank) is not None
            if not left_word:
                return True
            self._ended.add(rank)
        return False

    def _all_stand_still(self) -> bool:
        """Return whether no call has completed for too long, here and on every rank that answers in time."""
        later_s = ASK_LATER_S * min(self._watched.rank, MOST_LATER)
        if self._still_s() < self._watched.hang_timeout_s + later_s or time.monotonic() < self._ask_not_before_s:
            return False
        moving = False
        with contextlib.suppress(StoreError):
            question = self._conversation.ask()
            self._answer(question)
            deadline = time.monotonic() + ANSWER_LIMIT_S
            while time.monotonic() < deadline:
                if moving := bool(self._conversation.add(f"moving/{question}", 0)):
                    break
                still = self._conversation.add(f"still/{question}", 0)
                if still >= len(self._watched.members) - len(self._local_ranks.unable()):
                    break
                news = self._conversation.news()
                if news.alarm:
                    break  # another rank has decided, and answers no more
                self._answer(news.questions)
                time.sleep(SOON_S)
        if moving:
            self._ask_not_before_s = time.monotonic() + self._watched.hang_timeout_s * STILL_SHARE
        return not moving and self._still_s() >= self._watched.hang_timeout_s

    def _answer(self, questions: int) -> None:
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

    def _alarm(self, ending: Ending, number: signal.Signals | None = None, *, heard: bool = False) -> Alarm:
        """Raise an alarm, or return the one that was ``heard``. Without a store, this rank's own counts."""
        name = None if number is None else number.name
        own = Alarm(ending=ending, rank=self._watched.rank, phase=self._watched.tracker.phase, signal=name)
        if heard:
            return self._try(partial(self._conversation.alarm, Alarm), own)
        return self._try(partial(self._conversation.raise_alarm, own), own)

    def _position(self) -> Position:
        return take_position(self._watched.rank, self._watched.tracker, self._failure, self._local_ranks)

    def _stop(self, alarm: Alarm) -> NoReturn:
        watched = self._watched
        self._lifeline.put_off(STOP_LIMIT_S)
        position = self._position()
        try:
            status = stop_together(watched, self._local_ranks, alarm, position)
        except StoreError:
            status = stop_alone(watched, self._local_ranks, alarm, position)
        watched.clean_up()
        end_process(status)

    def _try(self, call: Callable[[], Given], otherwise: Given) -> Given:
        """Return the result of a store call, or ``otherwise`` if the store is lost, for now or for good."""
        try:
            return call()
        except StoreError:
            return otherwise


def take_position(rank: int, tracker: Tracker, error: BaseException | None, local_ranks: LocalRanks) -> Position:
    """Return where the main thread is now, and the states of the other processes on this host.

    With the error that ended the main thread, its stack is that of the error, from where it was caught.
    """
    if error is not None:
        frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    else:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way
        frames = list(islice(traceback.walk_stack(frame), MAX_FRAMES))[::-1] if frame is not None else []
    return Position(
        rank=rank, phase=tracker.phase, what=tracker.what, group=tracker.group, calls=tracker.calls, op=tracker.op,
        inside=tracker.inside, stale_s=max(0.0, time.monotonic() - tracker.moved_s),
        stack=tuple(f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in frames),
        error=None if error is None else typed_line(error), **local_ranks.seen(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Why the bench must end."""

    ending: Ending
    rank: int  # the rank that raised the alarm
    phase: str  # the phase that rank was in
    signal: str | None = None


def stop_together(watched: Watched, local_ranks: LocalRanks, alarm: Alarm, position: Position) -> int:
    """Return the exit status after one rank has reported. Raises ``StoreError`` only before that."""
    conversation = watched.conversation
    conversation.send(f"position/{watched.rank}", position)
    # If rank 0 has just finished, it has all results and reports them. Else the lowest rank that answers reports.
    reports = False
    if end_of(conversation, 0) is None:
        unable = local_ranks.unable()
        before = sum(member.rank < watched.rank and member.rank not in unable for member in watched.members)
        wait_s = TURN_S + NEXT_TURN_S * min(before, MOST_TURNS) if before else 0.0
        wait_until(lambda: conversation.add("reporters", 0) > 0, wait_s, ASK_EVERY_S)
        reports = conversation.add("reporters", 1) == 1
    if not reports:
        word = None
        with contextlib.suppress(StoreError):  # the reporter may have served the store, and be gone
            word = conversation.hear_goodbye(Ended, ANSWER_LIMIT_S + REPORT_LIMIT_S)
        return _default_status(alarm) if word is None else word.status
    others = _gather(watched, local_ranks)
    status = _report(watched, alarm, [replace(position, **local_ranks.seen()), *others])
    with contextlib.suppress(StoreError):  # the report is written
        conversation.say_goodbye(Ended(status=int(status)), lambda: len(others), HEAR_LIMIT_S)
    return status


def end_of(conversation: Conversation, rank: int) -> Position | None:
    """Return the last position of a rank that ended well, or None."""
    return conversation.get(Position, f"ended/{rank}", f"rank {rank}")


def stop_alone(watched: Watched, local_ranks: LocalRanks, alarm: Alarm, position: Position) -> int:
    """Stop without a store: on every host, the lowest rank that is able to reports what it knows."""
    unable = local_ranks.unable()
    # A rank that exited by itself has reported already, before this rank came here.
    able = {rank for rank in local_ranks.ranks if rank not in unable or _has_exited(local_ranks, rank)}
    for rank in sorted(rank for rank in able if rank < watched.rank):
        # Wait until one that may be reporting has ended. If no signal killed it before, it has reported.
        deadline = time.monotonic() + REPORT_LIMIT_S
        while rank not in local_ranks.gone() and time.monotonic() < deadline:
            time.sleep(GONE_EVERY_S)
        if rank not in local_ranks.ends or _has_exited(local_ranks, rank):
            return _default_status(alarm)
    return _report(watched, alarm, [replace(position, **local_ranks.seen())])


def _has_exited(local_ranks: LocalRanks, rank: int) -> bool:
    return local_ranks.ends.get(rank, "").startswith(EXITED)


def end_process(status: int) -> NoReturn:
    """End this process from another thread, because the main thread may never return."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any longer
            stream.flush()
    os._exit(status)


def _gather(watched: Watched, local_ranks: LocalRanks) -> list[Position]:
    """Return the positions of the other ranks that answer in time. Do not wait for ranks that cannot answer."""
    conversation, positions = watched.conversation, dict[int, Position]()
    missing = {member.rank for member in watched.members} - {watched.rank}
    deadline = time.monotonic() + ANSWER_LIMIT_S
    with contextlib.suppress(StoreError):  # what has come is reported
        while missing:
            for rank in missing:
                position = conversation.get(Position, f"position/{rank}", f"rank {rank}") or end_of(conversation, rank)
                if position is not None:
                    positions[rank] = position
            missing -= positions.keys()
            # Those whose processes cannot answer, as seen here and by other ranks
            unable = {
                int(rank) for one in positions.values() for rank, state in one.states.items() if state in GONE | FROZEN
            }
            if not missing - unable - local_ranks.unable() or time.monotonic() >= deadline:
                break
            time.sleep(ASK_EVERY_S)
    return [positions[rank] for rank in sorted(positions)]


def _default_status(alarm: Alarm) -> int:
    return ExitStatus.INTERRUPTED if alarm.ending is Ending.INTERRUPTED else ExitStatus.FOUND


def _report(watched: Watched, alarm: Alarm, positions: Sequence[Position]) -> int:
    ended = {one.rank for one in positions if one.phase == "end"}
    gone = {int(rank) for one in positions for rank, state in one.states.items() if state in GONE} - ended
    # A hang because a rank had failed counts as a failure.
    failed = gone or any(one.error is not None for one in positions)
    ending = Ending.FAILED if failed and alarm.ending is Ending.HUNG else alarm.ending
    stop = Stop(ending=ending, phase=alarm.phase, positions=tuple(positions), signal=alarm.signal)
    try:
        return watched.finish(stop)
    except Exception as error:  # noqa: BLE001 - the process must end, and nobody else can say why
        print(f"ddpdoctor: the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return ExitStatus.DEFECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Which process a rank is. Two pids can be compared only if ``space`` is the same."""

    space: str  # the boot id of the machine, and the pid namespace
    pid: int
    started_ticks: int


def read_home() -> Home | None:
    """Return which process this is, or None if /proc does not say."""
    own = read_process(os.getpid())
    boot, namespace = read_text(PROC / "sys/kernel/random/boot_id").strip(), read_link(PROC / "self/ns/pid")
    if own is None or not boot or not namespace:
        return None
    return Home(space=f"{boot} {namespace}", pid=own.pid, started_ticks=own.start_ticks)


def describe_end(wait_status: int) -> str:
    """Return how a process ended: "SIGKILL", "exit status 3"."""
    code = os.waitstatus_to_exitcode(wait_status)
    try:
        return f"{EXITED}{code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class LocalRanks:
    """The processes of other ranks that this process can see."""

    def __init__(self, own: Home | None) -> None:
        """``own`` is this process. If it is None, no other process can be seen."""
        self._own = own
        self._homes: dict[int, Home] = {}
        self._pidfds: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        """How processes ended, by rank. It can be seen only for a moment, until their parent reaps them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that can be seen, in order."""
        return tuple(sorted(self._homes))

    def add(self, rank: int, home: Home) -> int | None:
        """Add a rank. Return a descriptor that becomes readable when it ends, or None if there is none.

        A rank on another machine or in another pid namespace is not added.
        """
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
        """Return what a ``Position`` says of the processes on this host.

        It is read again for a report: a killed process closes its connections before it shows as gone, and a call may
        fail in between.
        """
        states = {str(rank): state for rank, state in self.states().items()}
        return {"states": states, "ends": {str(rank): end for rank, end in self.ends.items()}}

    def gone(self) -> frozenset[int]:
        """Return the ranks whose processes have ended."""
        return frozenset(rank for rank, state in self.states().items() if state in GONE)

    def unable(self) -> frozenset[int]:
        """Return the ranks whose processes cannot answer: they have ended or are stopped."""
        return frozenset(rank for rank, state in self.states().items() if state in GONE | FROZEN)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()


class CaughtSignals:
    """For the main thread: until ``close``, signals that would end the process wake another thread instead.

    A signal that is ignored stays ignored, such as SIGINT in a shell's background jobs.
    """

    def __init__(self) -> None:
        self._former: dict[signal.Signals, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self.selector = selectors.DefaultSelector()
        """What ``wait`` waits for: a descriptor that becomes readable ends it once."""
        self.selector.register(self._reader, selectors.EVENT_READ)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in CAUGHT:  # Python itself writes the number to the wakeup descriptor
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, lambda *_: None)

    def close(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self.selector.close()
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """End the other thread's ``wait``."""
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
