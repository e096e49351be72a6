"""What each rank does, as far as the others depend on it, at which of the user's lines, and how it ended."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import PHASES, POINT_TO_POINT, Call, DeviceState, Helper, Job, Life, Raised, Rank
from ddpdoctor.model.findings import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import CallKind, Child, HelperError
    from ddpdoctor.model.stacks import Frame, Stack, StackSample

MAX_PLACES = 2  # most places of one rank in a finding
_WAITING_FILES = (
    "/threading.py", "/queue.py", "/selectors.py", "/subprocess.py", "/concurrent/futures/_base.py",
    "/multiprocessing/queues.py", "/multiprocessing/connection.py", "/multiprocessing/popen_fork.py",
    "/multiprocessing/process.py", "/multiprocessing/synchronize.py", "/multiprocessing/pool.py", "/asyncio/",
)  # fmt: skip
_TORCH = "/torch/"
_NO_ERRORS = frozenset({"GeneratorExit", "KeyboardInterrupt", "StopAsyncIteration", "StopIteration"})
_DIGITS = re.compile(r"\d+")
_WAYS = {"send": "to", "isend": "to", "recv": "from", "irecv": "from"}
MAX_TEXT = 300  # characters kept of the text of an exception
# What torch adds about two of the ranks, whose calls a finding names in fewer words.
FINGERPRINTS = re.compile(r"\. Rank \d+ is running (?:inconsistent )?collective: CollectiveFingerPrint.*", re.DOTALL)
_LAST_ERROR = "Last error:"
WORK_WAIT = "work_wait"  # phase: ``Work.wait`` was called, for the oldest open asynchronous call in its group
# Phases in which DDP's C++ reducer makes collectives that no Python function sees.
NATIVE_PHASES = frozenset({"backward", "ddp_init", "ddp_forward", "ddp_forward_no_grad"})
FORWARDS = frozenset({"ddp_forward", "ddp_forward_no_grad"})  # DDP's forward, with gradients and without
NOT_COLLECTIVES = PHASES | POINT_TO_POINT | {WORK_WAIT, "epoch"}
_PASSED_OVER = frozenset({"epoch", "destroy_process_group"})
# Exceptions that no other rank can cause inside a collective. What others cause is a RuntimeError or torch's DistError.
_OWN_ERRORS = frozenset({
    "AssertionError", "AttributeError", "IndexError", "KeyError", "NotImplementedError", "OutOfMemoryError",
    "TypeError", "ValueError",
})  # fmt: skip
_DISTRIBUTED = "/torch/distributed/"
_DDP_FILE = "/torch/nn/parallel/distributed.py"
_AUTOGRAD = ("/torch/autograd/",)
_LOADER = "/torch/utils/data/"
# Signals that an abort can end with: while faulthandler dumps the remaining threads, it may itself fault.
ABORTS = frozenset({"SIGABRT", "SIGBUS", "SIGSEGV"})
GOOD_EXITS = frozenset({"None", "0", "False"})
NEARLY = 0.9  # our choice: a call is recorded a little after torch's own clock has started
# ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``: after that, a monitor aborts a process whose watchdog itself is stuck.
HEARTBEAT_S = 480.0
# Our choice: how long after a limit a host goes on, if torch gives up its call, and how long after that torch ends the
# process. It takes 1 s and 16 s on an idle machine (torch 2.15 gives its dump 15 s), and longer on a crowded one.
LEAVES_S, ENDS_S = 15.0, 60.0
_WORKER_HANDLER = "/torch/utils/data/_utils/signal_handling.py"
# Equal errors on the same line within this time are one bug: ranks in the same step are rarely further apart.
TOGETHER_NS = 5_000_000_000
CHILD_BEFORE_NS = 60_000_000_000  # our choice: a parent learns of its child's end within this time
EXITS_AFTER_NS = 10_000_000_000  # likewise: who exits because of a helper does so within this time
# Exceptions by which a parent learns that its child has ended.
_OF_CHILDREN = frozenset({
    "BrokenPipeError", "BrokenProcessPool", "CalledProcessError", "ConnectionRefusedError", "ConnectionResetError",
    "EOFError", "ProcessExitedException", "ProcessRaisedException", "RemoteDisconnected", "TimeoutExpired",
})  # fmt: skip
# The last is what a call raises after NCCL's watchdog has given up an earlier one, and before it ends the process.
_TIMED_OUT = re.compile(
    r"time[d\-_ ]*out|failed to pass monitoredbarrier in|wait.{0,20}timeout|DEADLINE_EXCEEDED|"
    r"NCCL communicator was aborted",
    re.IGNORECASE,
)
# Matches Gloo's "Timed out waiting 4000ms for recv operation", the monitored barrier's "failed to pass monitoredBarrier
# in 4000 ms", and "Timeout(ms)=600000)" of NCCL's watchdog.
_LIMIT = re.compile(r"(?:waiting |in |Timeout\(ms\)=|timeout: )(\d+) ?(?:ms\b|(?=[,)]))")


def is_file(frame: Frame, *parts: str) -> bool:
    path = frame.file.replace("\\", "/")
    return any(part in path for part in parts)


def main_frames(rank: Rank | Child) -> tuple[Frame, ...]:
    stacks = (stack for sample in reversed(rank.samples) for stack in sample.stacks if stack.is_main)
    return next((stack.frames for stack in stacks if stack.frames), ())


def innermost_user(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in reversed(frames) if frame.user), None)


def waits_in_library(frames: Sequence[Frame]) -> bool:
    return bool(frames) and is_file(frames[-1], *_WAITING_FILES)


def to_place(rank: int, frame: Frame) -> Place:
    return Place(rank=rank, file=frame.file, line=frame.line, function=frame.function)


def lines_seen(samples: tuple[StackSample, ...]) -> tuple[Frame, ...]:
    """Return up to two lines of the function that the main thread was last in, the most frequent first."""
    stacks = [stack.frames for sample in samples for stack in sample.stacks if stack.is_main]
    outside = (next((frame for frame in reversed(seen) if not is_file(frame, _TORCH)), None) for seen in stacks)
    found = (innermost_user(seen) or own for seen, own in zip(stacks, outside, strict=True))
    frames = [frame for frame in found if frame is not None]
    if not frames:
        return ()
    last = frames[-1]
    same = [frame for frame in reversed(frames) if (frame.file, frame.function) == (last.file, last.function)]
    by_line = {frame.line: frame for frame in same}
    return tuple(by_line[line] for line, _ in Counter(frame.line for frame in same).most_common(MAX_PLACES))


def other_threads(rank: Rank | Child, *, skip_idle: bool = True) -> tuple[Stack, ...]:
    """Return the threads other than the main one that run the user's code, except those that wait for work."""
    if not rank.samples:
        return ()
    stacks = [s for s in rank.samples[-1].stacks if not s.is_main and innermost_user(s.frames) is not None]
    return tuple(s for s in stacks if not (skip_idle and waits_in_library(s.frames)))


def own_error(rank: Rank) -> Raised | None:
    handled = rank.handled
    found = handled and (handled.first if handled.in_call else handled.first or handled)
    return found if found is not None and found.type not in _NO_ERRORS else None


def places(rank: int, frames: Iterable[Frame | None]) -> tuple[Place, ...]:
    return tuple(dict.fromkeys(to_place(rank, frame) for frame in frames if frame is not None))[:MAX_PLACES]


def file_name(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def line_of(frame: Frame | Place | None) -> str:
    return f"{file_name(frame.file)}:{frame.line}" if frame is not None else "an unknown line"


def place_words(frame: Frame | Place | None) -> str:
    """Return "in read_batch (train.py:12)"."""
    if frame is None:
        return "at an unknown line"
    if frame.function.startswith("<"):
        return f"at {line_of(frame)}"
    return f"in {frame.function} ({line_of(frame)})"


def call_words(call: Call | CallKind | None) -> str:
    if call is None:
        return "a collective"
    name = call.op if call.api in ("", call.op) else f"{call.api} ({call.op})"
    if call.shape is None or call.dtype is None:
        return name
    return f"{name} of {call.dtype.replace('torch.', '')}{list(call.shape)}"


def peer_words(call: Call | None) -> str:
    way = _WAYS.get(call.op) if call is not None else None
    return f" {way} rank {call.peer}" if way and call is not None and call.peer is not None else ""


def seconds(duration_ns: int | None) -> str:
    """Return "for 12 s", or "" if the duration is not known or too short to mention."""
    if duration_ns is None or duration_ns < 100_000_000:
        return ""
    value = duration_ns / 1e9
    return f"for {value:.1f} s" if value < 10 else f"for {value:.0f} s"


def first_line(text: str) -> str:
    """Return the first meaningful line of an error's text, cut to ``MAX_TEXT``."""
    # torch's errors of NCCL name their own source first; NCCL's words stand behind "Last error:".
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    quoted = lines.index(_LAST_ERROR) + 1 if _LAST_ERROR in lines[:-1] else 0
    line = lines[quoted] if lines else ""
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def without_numbers(text: str) -> str:
    """Return a text without the ports, times and ranks that make equal errors differ."""
    return _DIGITS.sub("#", text)


class Activity(Enum):
    """What a rank does."""

    MISSING = "never started"
    ENDED = "ended with status 0"
    FAILED = "failed"
    STOPPED = "stopped"
    SHUTTING_DOWN = "at the end of its script"
    COLLECTIVE = "in a collective"
    NATIVE = "in a collective of DDP"
    PEER = "in a point-to-point call"
    INIT = "in init_process_group"
    NEW_GROUP = "in new_group"
    DATA = "waiting for its next batch"
    BACKWARD = "computing in backward"
    USER = "in the user's code"


# States in which a rank can go on only if other ranks do their part.
WAITING = frozenset({Activity.COLLECTIVE, Activity.NATIVE, Activity.PEER, Activity.INIT, Activity.NEW_GROUP})
OVER = frozenset({Activity.MISSING, Activity.ENDED, Activity.FAILED})  # states of ranks that no longer have a process


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank does, and in which call."""

    rank: Rank
    doing: Activity
    call: Call | None = None  # the call it waits in, or the phase it is in
    # Whether torch checks each collective on all ranks before it runs (TORCH_DISTRIBUTED_DEBUG=DETAIL).
    detail: bool = False
    op: str = field(init=False)  # the operation of its call; every rank that waits is in one
    waiting: bool = field(init=False)  # whether it can go on only if other ranks do their part
    error: Raised | None = field(init=False)  # the exception that ended its main thread
    frames: tuple[Frame, ...] = field(init=False)  # of its main thread, as in ``main_frames``

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", self.call.op if self.call is not None else "")
        object.__setattr__(self, "waiting", self.doing in WAITING)
        object.__setattr__(self, "error", final_error(self.rank))
        object.__setattr__(self, "frames", main_frames(self.rank))

    def since(self, now_ns: int) -> int | None:
        return None if self.call is None or self.call.started_ns <= 0 else max(0, now_ns - self.call.started_ns)


def final_error(rank: Rank) -> Raised | None:
    return next((r for r in reversed(rank.raised) if r.uncaught and r.thread_is_main), None)


def stack_of(rank: Rank) -> tuple[Frame, ...]:
    """Return the main thread's stack, or the stack from which an exception threw it."""
    error = final_error(rank)
    if error is not None and error.frames:
        return error.frames
    return main_frames(rank)


def is_over(rank: Rank) -> bool:
    """Return whether the rank's process ended by itself or from outside, rather than by the job's teardown."""
    return rank.life in (Life.EXITED, Life.SIGNALED, Life.GONE) and not rank.after_stop


def ended_well(rank: Rank) -> bool:
    """Return whether the rank's process ended with status 0, or in an unknown way after its script had ended."""
    if not is_over(rank) or final_error(rank) is not None or rank.ended_by_thread is not None:
        return False
    if rank.life is Life.EXITED:
        return rank.exit_code in (0, None)
    return rank.life is Life.GONE and (rank.main_ended_ns is not None or rank.exit_call is not None)


def aborted_at_exit(rank: Rank) -> bool:
    """Return whether the rank died of an abort after its script's own code had ended without an error."""
    aborted = rank.life is Life.SIGNALED and rank.signal in ABORTS and not rank.after_stop
    return aborted and rank.ended_by_thread is None and rank.main_ended_ns is not None and final_error(rank) is None


def settle(rank: Rank) -> Rank:
    # On crowded cores a rank may not answer in time, so its last answer may belong to an earlier request.
    calls = (*rank.open_calls, *rank.recent_calls[-1:])
    last = max((call.started_ns for call in calls if call.thread_is_main), default=0)
    fresh = tuple(sample for sample in rank.samples if sample.time_ns >= last)
    rank = rank if len(fresh) == len(rank.samples) else replace(rank, samples=fresh)
    # A rank that asked for an error status and was aborted while it ended becomes one that left with that status.
    asked = rank.exit_asked
    if asked is None or asked in GOOD_EXITS or not aborted_at_exit(rank):
        return rank
    status = int(asked) if asked.isdecimal() else 1
    return replace(rank, life=Life.EXITED, exit_code=status, signal=None)


def has_failed(rank: Rank, stopping_since_ns: int | None) -> bool:
    """Return whether the rank failed by itself; what a stop of the job does to it does not count."""
    error = final_error(rank)
    if is_over(rank):
        return True
    if error is not None:
        return not rank.after_stop or stopping_since_ns is None or error.time_ns <= stopping_since_ns
    # It was leaving with an error status when the stop began. The interpreter takes a while to end, so its peers may
    # fail and the launcher may react before the process is gone.
    if rank.life is not Life.EXITED or rank.exit_code in (0, None) or rank.main_ended_ns is None:
        return False
    return stopping_since_ns is None or rank.main_ended_ns <= stopping_since_ns


def state_of(rank: Rank, stopping_since_ns: int | None) -> RankState:
    """Classify one rank. A rank that was stopped is classified by what it did before."""
    if rank.life is Life.NEVER_STARTED:
        return RankState(rank=rank, doing=Activity.MISSING)
    if ended_well(rank) or aborted_at_exit(rank):
        return RankState(rank=rank, doing=Activity.ENDED)
    if has_failed(rank, stopping_since_ns):
        if rank.ended_by_thread is not None and final_error(rank) is None:  # its main thread still did this
            return _living_state(rank, _innermost_call(rank.open_calls))
        return _failed_state(rank)
    if rank.proc_state in ("T", "t") or (rank.proc_state == "D" and rank.recorded and not rank.answered):
        # Frozen: by a signal, by a debugger, or in the kernel with no thread answering.
        return RankState(rank=rank, doing=Activity.STOPPED, call=_innermost_call(rank.open_calls))
    if rank.main_ended_ns is not None:
        if final_error(rank) is not None:
            state = _failed_state(rank)
            if state.waiting:
                return state
        return RankState(rank=rank, doing=Activity.SHUTTING_DOWN)
    return _living_state(rank, _innermost_call(rank.open_calls))


def _living_state(rank: Rank, call: Call | None) -> RankState:
    frames = main_frames(rank)
    if call is None and frames and is_file(frames[-1], _DISTRIBUTED):
        # The asynchronous call that the main thread is still inside. Under DETAIL torch compares the call on all ranks
        # before it begins, and a backend may connect to them at its first call.
        op = frames[-1].function
        inside = [call for call in rank.open_calls if call.is_async and call.thread_is_main and call.op == op]
        call = max(inside, key=lambda call: call.index, default=None)
    if call is None and waits_in_library(frames):  # in a join, a lock or a queue, while another thread is in a call
        other = _innermost_call(rank.open_calls, main=False)
        call = other if other is not None and other.op not in NOT_COLLECTIVES - POINT_TO_POINT else None
    if call is None:
        return RankState(rank=rank, doing=Activity.USER)
    if call.op == WORK_WAIT:
        awaited = _awaited(rank.open_calls, call)
        doing = Activity.COLLECTIVE if awaited.op not in NOT_COLLECTIVES else Activity.PEER
        return RankState(rank=rank, doing=doing, call=awaited)
    doing = _doing_in(call)
    if call.op == "backward":
        log = rank.recent_calls
        before = log[: bisect_left(log.indexes, call.index)]
        reduces = not before or any(kind.op == "ddp_forward" and not kind.failed for kind in before.counts)
        in_engine = not frames or is_file(frames[-1], *_AUTOGRAD)
        doing = Activity.NATIVE if reduces and in_engine else Activity.BACKWARD
    elif call.op in NATIVE_PHASES:
        in_ddp = is_file(frames[-1], _DISTRIBUTED, _DDP_FILE) if frames else call.op == "ddp_init"
        doing = Activity.NATIVE if in_ddp else Activity.USER
    return RankState(rank=rank, doing=doing, call=call)


def _doing_in(call: Call) -> Activity:
    by_phase = {"init_process_group": Activity.INIT, "new_group": Activity.NEW_GROUP, "next_batch": Activity.DATA}
    if call.op in POINT_TO_POINT or call.op in NATIVE_PHASES:
        return Activity.PEER if call.op in POINT_TO_POINT else Activity.NATIVE
    return by_phase.get(call.op, Activity.COLLECTIVE if call.op not in NOT_COLLECTIVES else Activity.USER)


def _innermost_call(open_calls: Iterable[Call], *, main: bool = True) -> Call | None:
    calls = [call for call in open_calls if call.thread_is_main is main and call.op not in _PASSED_OVER]
    calls = [call for call in calls if not call.is_async or call.op == WORK_WAIT]
    return max(reversed(calls), key=lambda call: call.index, default=None)


def _awaited(open_calls: Iterable[Call], wait: Call) -> Call:
    """Return the call that ``Work.wait`` waits for; if not recorded, the oldest open call that it can mean."""
    works = [call for call in open_calls if call.is_async and call.op != WORK_WAIT]
    exactly = [call for call in works if call.index == wait.awaits]
    if exactly:
        return exactly[0]
    of_group = [call for call in works if not wait.group or call.group == wait.group]
    return min(of_group or works, key=lambda call: call.index, default=wait)


def _failed_state(rank: Rank) -> RankState:
    call = call_at_failure(rank)
    doing = _doing_in(call) if call is not None else Activity.FAILED
    return RankState(rank=rank, doing=doing if doing in WAITING else Activity.FAILED, call=call)


def call_at_failure(rank: Rank) -> Call | None:
    """Return the call, needing other ranks, in which a failed rank failed, or None if it failed on its own."""
    error = final_error(rank)
    if error is None:
        call = _innermost_call(rank.open_calls)
        if rank.ended_by_thread is None:
            if rank.life is not Life.SIGNALED or rank.signal != "SIGABRT":
                return None
            call = call or _innermost_call(rank.open_calls, main=False)
        state = _living_state(rank, call)
        return state.call if state.waiting else None
    in_call = error.in_call
    if error.reducer is not None:  # DDP raises it without talking to anyone
        return None
    if in_call is None or error.from_child or error.type in _OWN_ERRORS or not _raised_by_torch(error):
        return None
    failed = rank.recent_calls.of_kinds(lambda kind: kind.failed)
    failing = [call for call in (*failed, *rank.open_calls) if call.failed or call.ended_ns is None]
    calls = [call for call in failing if call.op == in_call or {call.op, in_call} <= FORWARDS]
    call = max(calls, key=lambda c: c.index, default=None)
    if call is not None and call.op == WORK_WAIT:
        index = call.awaits
        log = rank.recent_calls
        at = bisect_left(log.indexes, index) if index is not None else len(log)
        awaited = (log[at],) if at < len(log) and log.indexes[at] == index else ()
        return _awaited([*rank.open_calls, *failed, *awaited], call)
    return call if call is not None and _doing_in(call) in WAITING else None


def _raised_by_torch(error: Raised) -> bool:
    # A recorded collective leaves frames of torch.distributed. DDP's forward leaves frames of its own file. A backward
    # leaves autograd's, under which C++ does everything. The end of a loader worker is raised wherever the rank is.
    if not error.frames:
        return True
    last = error.frames[-1]
    if error.in_call == "backward":
        return is_file(last, *_AUTOGRAD)
    if error.in_call in NATIVE_PHASES:
        return is_file(last, _DISTRIBUTED, _DDP_FILE)
    return not is_file(last, _LOADER)


def waited_its_limit(rank: Rank, call: Call) -> bool:
    limit_s, waited_s = _limit_s(rank, call), _waited_s(rank, call)
    return limit_s is not None and waited_s is not None and waited_s >= NEARLY * limit_s


def without_pulled_down(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
    """Return ranks so that those that only died because of a peer's watchdog do not count as failures."""
    # They keep the state that they had before, at the line that their final dump shows.
    if not any(_is_outside(rank) and any(waited_its_limit(rank, call) for call in _on_device(rank)) for rank in ranks):
        return ranks
    return tuple(
        replace(rank, after_stop=True, last_place=rank.fatal_place or rank.last_place)
        if _is_outside(rank) and not _on_device(rank)
        else rank
        for rank in ranks
    )


def with_given_up(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
    """Return ranks so that they wait in the collective that torch gave up at its limit, if it ended them for that."""
    # At the limit nccl2, which is NCCL's backend in torch 2.15, aborts the communicator, so that the host goes on to
    # the next call, and some seconds later the process. Under DETAIL it writes no dump of what was pending. But the
    # host of each rank then left the same collective for the next one just when that limit had passed, and soon after
    # that a thread without Python ended a rank. Unless all of that holds for all ranks, they are returned unchanged.
    given_up = [_given_up(rank) for rank in ranks]
    if not any(map(_is_outside, ranks)) or len({(call.group, call.seq) if call else None for call in given_up}) > 1:
        return ranks
    return tuple(
        replace(rank, open_calls=(replace(call, ended_ns=None, device_state=DeviceState.GIVEN_UP),)) if call else rank
        for rank, call in zip(ranks, given_up, strict=True)
    )


def _given_up(rank: Rank) -> Call | None:
    after = min(rank.open_calls, default=None, key=lambda call: call.index)
    if after is None or after.seq is None or rank.ended_ns is None:
        return None
    calls = reversed(rank.recent_calls)
    call = next((call for call in calls if (call.group, call.seq) == (after.group, after.seq - 1)), None)
    limit_s = _limit_s(rank, call) if call is not None else None
    if call is None or limit_s is None:
        return None
    left_s, ended_s = ((at_ns - call.started_ns) / 1e9 - limit_s for at_ns in (after.started_ns, rank.ended_ns))
    return call if 0 <= left_s <= LEAVES_S and ended_s <= ENDS_S else None


def came_late(ranks: Iterable[Rank]) -> dict[int, tuple[Call, Rank, Call]]:
    """Return the ranks that made a collective after another one had waited there until torch's limit."""
    # The watchdog ends the other one a minute later. Until then the late rank completes that collective with it, and
    # may go on to wait in a later one, where it seems to be the waiter. Each comes with its call, that other rank and
    # its call.
    ranks = tuple(ranks)
    found: dict[int, tuple[Call, Rank, Call]] = {}
    for waiter in ranks:
        pending = _on_device(waiter) if _is_outside(waiter) else ()
        for call in pending:
            limit_s = _limit_s(waiter, call)
            if call.seq is None or limit_s is None or not waited_its_limit(waiter, call):
                continue
            since_ns = call.started_ns + limit_s * 1e9
            for rank in ranks:
                calls = (*rank.open_calls, *reversed(rank.recent_calls))
                own = next((own for own in calls if (own.group, own.seq) == (call.group, call.seq)), None)
                if rank is not waiter and own is not None and own.started_ns > since_ns:
                    found.setdefault(rank.rank, (own, waiter, call))
    return found


def _is_outside(rank: Rank) -> bool:
    aborted = rank.life is Life.SIGNALED and rank.signal == "SIGABRT" and not rank.after_stop
    return aborted and rank.fatal_outside


def _on_device(rank: Rank) -> tuple[Call, ...]:
    return tuple(call for call in rank.open_calls if call.device_state is not None)


def _limit_s(rank: Rank, call: Call) -> float | None:
    of_group = next((group.timeout_s for group in rank.groups if group.name == call.group), None)
    return of_group if of_group is not None else rank.init_timeout_s


def _waited_s(rank: Rank, call: Call) -> float | None:
    known = rank.ended_ns is not None and call.started_ns > 0
    return ((rank.ended_ns or 0) - call.started_ns) / 1e9 if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The end of a rank that failed."""

    rank: Rank
    time_ns: int
    error: Raised | None
    call: Call | None  # the call, needing other ranks, in which it failed, or None if it failed on its own
    then: Call | None = None  # the call that it made while it handled its error, and that the others do not make

    @property
    def by_own_limit(self) -> bool:
        """Whether another thread of the script ended it, as a watchdog does that finds no progress."""
        return self.error is None and self.rank.ended_by_thread is not None

    @property
    def by_signal(self) -> bool:
        """Whether a signal or an unknown reason ended the process, and no exception was seen."""
        return self.error is None and self.rank.life in (Life.SIGNALED, Life.GONE) and not self.by_own_limit

    @property
    def by_itself(self) -> bool:
        """Whether it failed outside all calls that need others, without an error of another rank behind it."""
        of_ranks = self.error.of_ranks if self.error is not None else ()
        return self.call is None and (not of_ranks or self.rank.rank in of_ranks) and not self.by_own_limit

    @property
    def by_watchdog(self) -> bool:
        """Whether NCCL's watchdog seems to have ended it: in a thread that runs no Python, after a long wait."""
        # Then it only waited in vain, and the cause is elsewhere.
        rank = self.rank
        if self.error is not None or not _is_outside(rank):
            return False
        last = max((*rank.open_calls, *rank.recent_calls[-1:]), key=lambda call: call.index, default=None)
        waited = last is not None and waited_its_limit(rank, last)
        return waited or (last is not None and (_waited_s(rank, last) or 0.0) >= HEARTBEAT_S)

    @property
    def timed_out(self) -> bool:
        """Whether it failed only because it had waited too long: a hang, not a crash."""
        if self.by_own_limit:
            return True
        if self.call is None:
            return False
        if self.error is None and self.call.device_state is not None:
            return waited_its_limit(self.rank, self.call)
        text = self.error.message if self.error is not None else ""
        return self.error is None or (bool(_TIMED_OUT.search(text)) and "Connection refused" not in text)


def find_failures(facts: Job, states: Mapping[int, RankState]) -> tuple[Failure, ...]:
    aborts = [s.rank.ended_ns for s in states.values() if aborted_at_exit(s.rank) and s.rank.ended_ns is not None]
    since = min(aborts, default=None)
    stopping, interrupted = facts.stopping_since_ns, facts.interrupted_by is not None
    found = []
    for state in states.values():
        rank, error = state.rank, state.error
        # A spawner ends a rank that is on its way out, if another was aborted at its exit.
        on_its_way = rank.signal == "SIGTERM" and rank.main_ended_ns is not None and error is None
        was_fetched = on_its_way and since is not None and (rank.ended_ns or 0) >= since
        if was_fetched or rank.life is Life.NEVER_STARTED or ended_well(rank) or aborted_at_exit(rank):
            continue
        by_script = rank.life is Life.EXITED and rank.main_ended_ns is not None
        ended_ns = rank.main_ended_ns if by_script else rank.ended_ns
        time_ns = error.time_ns if error is not None else ended_ns or facts.now_ns
        if not has_failed(rank, stopping) or (interrupted and stopping is not None and time_ns >= stopping):
            continue
        exits = error is not None and error.type == "SystemExit" and error.message in ("", "0", "None")
        if not exits and not (interrupted and error is not None and error.type == "KeyboardInterrupt"):
            found.append(Failure(rank=rank, time_ns=time_ns, error=error, call=call_at_failure(rank)))
    return tuple(sorted(found, key=lambda f: (f.time_ns, f.rank.rank)))


def failure_line(failure: Failure) -> Frame | None:
    rank = failure.rank
    batch = rank.recent_calls.last_of_kinds(lambda kind: kind.op == "next_batch" and kind.site is not None)
    if batch is not None and is_lost_worker(failure):
        return batch.site
    if failure.error is not None and failure.error.frames:
        user = innermost_user(failure.error.frames)
        if user is not None:
            return user
    if failure.error is None and failure.by_signal:
        return rank.fatal_place or rank.last_place
    site = failure.call.site if failure.call is not None else None
    return rank.exit_call or site or rank.last_place


def first_line_of(failure: Failure) -> Frame | None:
    """Return the line of the error that a failure followed from: of its cause, or of its helper."""
    helper = error_of_helper(failure)
    if helper is not None:
        return innermost_user(helper.error.frames)
    first = failure.error.first if failure.error is not None and failure.call is None else None
    return innermost_user(first.frames) if first is not None else None


def error_of_helper(failure: Failure) -> HelperError | None:
    """Return the error of the child whose failure the rank reports, or of the thread that then ended the rank."""
    # It is None if the rank reports something else. Of several, it is the one that failed first by itself.
    error = failure.error
    if failure.call is not None or failure.by_signal or failure.by_own_limit:
        return None
    if error is not None and (error.from_child or error.type not in _OF_CHILDREN):
        return None
    if error is not None:
        patience_ns = {Helper.CHILD: CHILD_BEFORE_NS}
    else:  # a wrapper exits with the status of its child, a hook for the errors of threads ends the process
        patience_ns = {Helper.CHILD: EXITS_AFTER_NS, Helper.THREAD: EXITS_AFTER_NS}
    ages_ns = [(helper, failure.time_ns - helper.error.time_ns) for helper in failure.rank.helper_errors]
    before = [helper for helper, age_ns in ages_ns if 0 <= age_ns < patience_ns.get(helper.who, 0)]
    return min(before, key=lambda helper: (helper.error.in_call is not None, helper.error.time_ns), default=None)


def is_lost_worker(failure: Failure) -> bool:
    frames = failure.error.frames if failure.error is not None else ()
    return bool(frames) and is_file(frames[-1], _WORKER_HANDLER)


def is_same_bug(root: Failure, other: Failure) -> bool:
    ends = [f.error.type if f.error else f"{f.rank.signal}/{f.rank.exit_code}" for f in (root, other)]
    if other.time_ns - root.time_ns > TOGETHER_NS or ends[0] != ends[1]:
        return False
    first, second = failure_line(root), failure_line(other)
    if first is None or second is None or (first.file, first.line) != (second.file, second.line):
        return False
    if root.call is None and other.call is None:
        return True
    if root.error is None or other.error is None:
        return False
    # The victims of one rank fail inside a call of torch too, but with another text.
    mine, theirs = (without_numbers(first_line(error.message)) for error in (root.error, other.error))
    return mine == theirs


def all_gave_up(failures: Iterable[Failure], states: Mapping[int, RankState]) -> bool:
    """Return whether every rank was in a call that needs others, and one of them did wait for its time limit."""
    # The text alone is not enough: Gloo says "failed to pass monitoredBarrier in 1800000 ms" at once if a peer died.
    if not all(state.waiting for state in states.values()):
        return False
    for failure in failures:
        call, error = failure.call, failure.error
        if call is None:
            continue
        match = _LIMIT.search(error.message) if error is not None else None
        waited_ns = failure.time_ns - call.started_ns
        on_device = error is None and call.device_state is not None and failure.timed_out
        if on_device or (match is not None and waited_ns >= NEARLY * int(match[1]) * 1e6):
            return True
    return False
