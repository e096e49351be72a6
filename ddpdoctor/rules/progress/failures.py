"""Ranks that ended badly: which failed by themselves, and which because of another rank or of NCCL's watchdog."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import Call, Helper, HelperError, Job, Life, Raised, Rank
from ddpdoctor.rules.progress.states import (
    RankState,
    aborted_at_exit,
    call_at_failure,
    ended_well,
    final_error,
    first_line,
    has_failed,
    innermost_user,
    is_file,
    without_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.stacks import Frame


NEARLY = 0.9
"""Our choice: a call is recorded a little after torch's own clock has started."""
HEARTBEAT_S = 480.0
"""``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``: after that, a monitor aborts a process whose watchdog itself is stuck."""


def waited_its_limit(rank: Rank, call: Call) -> bool:
    """Return whether a rank ended after it had waited in a call for about torch's limit."""
    limit_s, waited_s = _limit_s(rank, call), _waited_s(rank, call)
    return limit_s is not None and waited_s is not None and waited_s >= NEARLY * limit_s


def aborted_by_watchdog(rank: Rank) -> bool:
    """Return whether a rank died as NCCL's watchdog ends one: in a thread that runs no Python, after a long wait."""
    if not _is_outside(rank):
        return False
    last = max((*rank.open_calls, *pack_calls(rank.recent_calls)[-1:]), key=lambda call: call.index, default=None)
    if last is None:
        return False
    return waited_its_limit(rank, last) or (_waited_s(rank, last) or 0.0) >= HEARTBEAT_S


def without_pulled_down(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Return ranks so that those that only died because of a peer's watchdog do not count as failures.

    They keep the state that they had before, at the line that their final dump shows.
    """
    ranks = tuple(ranks)
    if not any(_is_outside(rank) and any(waited_its_limit(rank, call) for call in _on_device(rank)) for rank in ranks):
        return ranks
    return tuple(
        replace(rank, after_stop=True, last_place=rank.fatal_place or rank.last_place)
        if _is_outside(rank) and not _on_device(rank)
        else rank
        for rank in ranks
    )


def came_late(ranks: Iterable[Rank]) -> dict[int, tuple[Call, Rank, Call]]:
    """Return the ranks that made a collective after another one had waited there until torch's limit.

    The watchdog ends the other one a minute later. Until then the late rank completes that collective with it, and may
    go on to wait in a later one, where it seems to be the waiter. Each comes with its call, that other rank and its
    call.
    """
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
                calls = (*rank.open_calls, *reversed(pack_calls(rank.recent_calls)))
                own = next((one for one in calls if (one.group, one.seq) == (call.group, call.seq)), None)
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
    return (rank.ended_ns - call.started_ns) / 1e9 if known and rank.ended_ns is not None else None


_WORKER_HANDLER = "/torch/utils/data/_utils/signal_handling.py"
TOGETHER_NS = 5_000_000_000
"""Equal errors on the same line within this time are one bug: ranks in the same step are rarely further apart."""
CHILD_BEFORE_NS = 60_000_000_000
"""Our choice: a parent learns of its child's end within this time."""
EXITS_AFTER_NS = 10_000_000_000
"""Likewise: who exits because of a helper does so within this time."""
_OF_CHILDREN = frozenset(
    {
        "BrokenPipeError",
        "BrokenProcessPool",
        "CalledProcessError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "EOFError",
        "ProcessExitedException",
        "ProcessRaisedException",
        "RemoteDisconnected",
        "TimeoutExpired",
    }
)
"""Exceptions by which a parent learns that its child has ended."""
_TIMED_OUT = re.compile(
    r"time[d\-_ ]*out|failed to pass monitoredbarrier in|wait.{0,20}timeout|DEADLINE_EXCEEDED|"
    r"NCCL communicator was aborted",
    re.IGNORECASE,
)
"""The last is what a call raises after NCCL's watchdog has given up an earlier one, and before it ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The end of a rank that did not end well."""

    rank: Rank
    time_ns: int
    error: Raised | None
    call: Call | None
    """The call, needing other ranks, in which it failed, or None if it failed on its own."""
    then: Call | None = None
    """The call that it made while it handled its error, and that the others do not make."""

    @property
    def by_signal(self) -> bool:
        """Whether a signal or an unknown reason ended the process, and no exception was seen."""
        return self.error is None and self.rank.life in (Life.SIGNALED, Life.GONE) and not self.by_own_limit

    @property
    def by_itself(self) -> bool:
        """Whether it failed outside all calls that need others, and not because of another rank's error."""
        if self.by_own_limit:
            return False
        of_ranks = self.error.of_ranks if self.error is not None else ()
        return self.call is None and (not of_ranks or self.rank.rank in of_ranks)

    @property
    def by_own_limit(self) -> bool:
        """Whether another thread of the script ended it, as a watchdog does that finds no progress."""
        return self.error is None and self.rank.ended_by_thread is not None

    @property
    def by_watchdog(self) -> bool:
        """Whether NCCL's watchdog seems to have ended it. Then it only waited in vain, and the cause is elsewhere."""
        return self.error is None and aborted_by_watchdog(self.rank)

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
    """Return all failures, the earliest first. What happened after the stop of the job began does not count."""
    aborts = [s.rank.ended_ns for s in states.values() if aborted_at_exit(s.rank) and s.rank.ended_ns is not None]
    since = min(aborts, default=None)
    found = []
    for rank in (state.rank for state in states.values()):
        # A spawner ends a rank that is on its way out, if another was aborted at its exit.
        on_its_way = rank.signal == "SIGTERM" and rank.main_ended_ns is not None and final_error(rank) is None
        was_fetched = on_its_way and since is not None and (rank.ended_ns or 0) >= since
        failure = _failure_of(facts, rank) if not was_fetched else None
        found += [failure] if failure is not None else []
    return tuple(sorted(found, key=lambda f: (f.time_ns, f.rank.rank)))


def _failure_of(facts: Job, rank: Rank) -> Failure | None:
    if rank.life is Life.NEVER_STARTED or ended_well(rank) or aborted_at_exit(rank):
        return None
    if not has_failed(rank, facts.stopping_since_ns):
        return None
    error = final_error(rank)
    ended_ns = rank.main_ended_ns if rank.life is Life.EXITED and rank.main_ended_ns is not None else rank.ended_ns
    time_ns = error.time_ns if error is not None else ended_ns or facts.now_ns
    stopping = facts.stopping_since_ns
    if facts.interrupted_by is not None and stopping is not None and time_ns >= stopping:
        return None
    if error is not None and error.type == "SystemExit" and error.message in ("", "0", "None"):
        return None
    if error is not None and error.type == "KeyboardInterrupt" and facts.interrupted_by is not None:
        return None
    return Failure(rank=rank, time_ns=time_ns, error=error, call=call_at_failure(rank))


def failure_line(failure: Failure) -> Frame | None:
    """Return the user's line that shows a failure best."""
    rank = failure.rank
    batch = pack_calls(rank.recent_calls).last_of_kinds(lambda kind: kind.op == "next_batch" and kind.site is not None)
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
    """Return the line of the error that a failure followed from: of its cause, or of what worked for the rank."""
    helper = error_of_helper(failure)
    if helper is not None:
        return innermost_user(helper.error.frames)
    first = failure.error.first if failure.error is not None and failure.call is None else None
    return innermost_user(first.frames) if first is not None else None


def error_of_helper(failure: Failure) -> HelperError | None:
    """Return the error of the child whose bad end the rank reports, or of the thread that then ended the rank.

    It is None if the rank reports something else. Of several, it is the one that failed first by itself.
    """
    error = failure.error
    if failure.call is not None or failure.by_signal or failure.by_own_limit:
        return None
    if error is not None and (error.from_child or error.type not in _OF_CHILDREN):
        return None
    if error is not None:
        patience_ns = {Helper.CHILD: CHILD_BEFORE_NS}
    else:  # a wrapper exits with the status of its child, a hook for the errors of threads ends the process
        patience_ns = {Helper.CHILD: EXITS_AFTER_NS, Helper.THREAD: EXITS_AFTER_NS}
    before = [
        one
        for one in failure.rank.helper_errors
        if 0 <= failure.time_ns - one.error.time_ns < patience_ns.get(one.who, 0)
    ]
    return min(before, key=lambda one: (one.error.in_call is not None, one.error.time_ns), default=None)


def is_lost_worker(failure: Failure) -> bool:
    """Return whether a loader worker died: torch raises that from a signal handler, wherever the rank is."""
    frames = failure.error.frames if failure.error is not None else ()
    return bool(frames) and is_file(frames[-1], _WORKER_HANDLER)


def same_bug(root: Failure, failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures that are the root's own bug on other ranks, including the root."""
    return tuple(f for f in failures if f is root or _is_same(root, f))


def _is_same(root: Failure, other: Failure) -> bool:
    ends = [one.error.type if one.error else f"{one.rank.signal}/{one.rank.exit_code}" for one in (root, other)]
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


_LIMIT = re.compile(r"(?:waiting |in |Timeout\(ms\)=|timeout: )(\d+) ?(?:ms\b|(?=[,)]))")
"""Matches Gloo's "Timed out waiting 4000ms for recv operation", the monitored barrier's "failed to pass
monitoredBarrier in 4000 ms", and "Timeout(ms)=600000)" of NCCL's watchdog."""


def all_gave_up(failures: Iterable[Failure], states: Mapping[int, RankState]) -> bool:
    """Return whether every rank was in a call that needs others, and one of them did wait for its time limit.

    The text alone is not enough: Gloo says "failed to pass monitoredBarrier in 1800000 ms" at once if a peer died.
    """
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
