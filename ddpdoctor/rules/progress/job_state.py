"""All that the rules look at: nodes, ranks, waits, conflicts and failures of a job, and what its trouble is."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import Call, DeviceState, Helper, HelperError, Job, Life, Presence, Raised, Rank
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.words import name_list, rank_list
from ddpdoctor.rules.answers import Answer, passed, skipped
from ddpdoctor.rules.network import EPHEMERAL
from ddpdoctor.rules.progress.branches import blame_guarded, find_lone_call
from ddpdoctor.rules.progress.calls import (
    ANY_SHAPE,
    EVEN_SHAPE,
    ROOTED,
    Conflict,
    ModelDifference,
    find_conflict,
    find_difference,
)
from ddpdoctor.rules.progress.states import (
    NATIVE_PHASES,
    OVER,
    Activity,
    RankState,
    aborted_at_exit,
    call_at_failure,
    ended_well,
    final_error,
    first_line,
    has_failed,
    innermost_user,
    is_file,
    own_error,
    settle,
    states_of,
    without_numbers,
)
from ddpdoctor.rules.progress.waits import CallPosition, Waits, find_waits, group_table, position_of, world_of
from ddpdoctor.rules.rendezvous.mesh import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import HostCauses, NodeSeen
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.reaching import Connecting
    from ddpdoctor.model.stacks import Frame


NEARLY = 0.9
"""Our choice: a call is recorded a little after torch's own clock has started."""
HEARTBEAT_S = 480.0
"""``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``: after that, a monitor aborts a process whose watchdog itself is stuck."""
LEAVES_S, ENDS_S = 15.0, 60.0
"""Our choice: how long after a limit a host goes on, if torch gives up its call, and how long after that torch ends the
process. It takes 1 s and 16 s on an idle machine (torch 2.15 gives its dump 15 s), and longer on a crowded one."""
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
_LIMIT = re.compile(r"(?:waiting |in |Timeout\(ms\)=|timeout: )(\d+) ?(?:ms\b|(?=[,)]))")
"""Matches Gloo's "Timed out waiting 4000ms for recv operation", the monitored barrier's "failed to pass
monitoredBarrier in 4000 ms", and "Timeout(ms)=600000)" of NCCL's watchdog."""
BEATS_NS = 5_000_000_000
"""Our choice: a living node is heard from once a second, or up to this much later if it is crowded."""
CHECK = "run `ddpdoctor check-rendezvous` on every node to see which nodes cannot connect"
OTHERS_PATIENCE_NS = 30_000_000_000
"""Our choice: how long ranks must have made no progress if something outside, such as `timeout 60`, ended the launcher.
A healthy job makes progress in that time."""
_DETAIL_SAYS = "Detected mismatch between collectives on ranks"
"""The beginning of the error that torch raises on all ranks under DETAIL. It does not say who is to blame."""


def waited_its_limit(rank: Rank, call: Call) -> bool:
    """Return whether a rank ended after it had waited in a call for about torch's limit."""
    limit_s, waited_s = _limit_s(rank, call), _waited_s(rank, call)
    return limit_s is not None and waited_s is not None and waited_s >= NEARLY * limit_s


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


def with_given_up(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Return ranks so that they wait in the collective that torch gave up at its limit, if it ended them for that.

    At the limit nccl2, which is NCCL's backend in torch 2.15, aborts the communicator, so that the host goes on to the
    next call, and some seconds later the process. Under DETAIL it writes no dump of what was pending. But the host of
    each rank then left the same collective for the next one just when that limit had passed, and soon after that a
    thread without Python ended a rank. Unless all of that holds for all ranks, they are returned unchanged.
    """
    ranks = tuple(ranks)
    given_up = [_given_up(rank) for rank in ranks]
    if not any(map(_is_outside, ranks)) or len({(call.group, call.seq) if call else None for call in given_up}) > 1:
        return ranks
    return tuple(
        replace(rank, open_calls=(replace(call, ended_ns=None, device_state=DeviceState.GIVEN_UP),)) if call else rank
        for rank, call in zip(ranks, given_up, strict=True)
    )


def _given_up(rank: Rank) -> Call | None:
    """Return the collective before the one that a rank ended in, if the host left it at its limit."""
    after = min(rank.open_calls, default=None, key=lambda call: call.index)
    if after is None or after.seq is None or rank.ended_ns is None:
        return None
    calls = reversed(pack_calls(rank.recent_calls))
    call = next((one for one in calls if (one.group, one.seq) == (after.group, after.seq - 1)), None)
    limit_s = _limit_s(rank, call) if call is not None else None
    if call is None or limit_s is None:
        return None
    left_s, ended_s = ((at_ns - call.started_ns) / 1e9 - limit_s for at_ns in (after.started_ns, rank.ended_ns))
    return call if 0 <= left_s <= LEAVES_S and ended_s <= ENDS_S else None


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
        """Whether NCCL's watchdog seems to have ended it: in a thread that runs no Python, after a long wait.

        Then it only waited in vain, and the cause is elsewhere.
        """
        rank = self.rank
        if self.error is not None or not _is_outside(rank):
            return False
        last = max((*rank.open_calls, *pack_calls(rank.recent_calls)[-1:]), key=lambda call: call.index, default=None)
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


def is_same_bug(root: Failure, other: Failure) -> bool:
    """Return whether a failure is the root's own bug on another rank."""
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


def others_of(facts: Job) -> tuple[NodeSeen, ...]:
    """Return all members but the one whose view this is."""
    members = facts.members
    return tuple(node for node in members.nodes if node.number != members.own) if members is not None else ()


def never_came(facts: Job) -> tuple[NodeSeen, ...]:
    """Return the members that have not come, or none if all nodes have met: then a silent one was only not seen."""
    # A launcher that joins nodes starts no rank before that, and ``init_process_group`` returns on no rank before that.
    by_launcher = facts.members is not None and not facts.members.of_ranks
    if any(rank.initialized for rank in facts.ranks) or (by_launcher and bool(facts.ranks)):
        return ()
    return tuple(node for node in others_of(facts) if node.presence is Presence.ABSENT)


def lost_nodes(facts: Job, time_ns: int) -> tuple[NodeSeen, ...]:
    """Return the members that went silent, or left with an error without sending what their ranks did.

    A node that was lost before the ranks of this attempt began does not count, unless its ranks are still missing.
    If it is not known which ranks it has, any missing rank may be one of them.
    """
    began_ns = min((rank.started_ns for rank in facts.ranks if rank.started_ns is not None), default=0) - BEATS_NS
    missing = set(range(world_of(facts))) - {rank.rank for rank in facts.ranks}

    found = []
    for node in others_of(facts):
        own, heard_ns = missing & set(node.ranks), node.heard_ns or 0
        # A node that has ranks to start and sends nothing counts, though it is not given up yet.
        late = node.heard_ns is not None and heard_ns + BEATS_NS < time_ns
        overdue = node.presence is Presence.HERE and late and not node.gathered and bool(own)
        left = node.presence is Presence.LEFT and not node.gathered and node.status not in (0, None)
        gone = node.presence is Presence.SILENT or left
        has_part = heard_ns <= time_ns and (began_ns <= heard_ns or bool(own if node.ranks else missing))
        found += [node] if overdue or (gone and has_part) else []
    return tuple(found)


def is_alone(facts: Job) -> bool:
    """Return whether this is the view of one node that hears nothing from any other."""
    return facts.members is not None and facts.members.alone_since_ns is not None


def without_stale(facts: Job, lost: Iterable[NodeSeen]) -> Job:
    """Return a job without the ranks that were last seen alive on nodes that were lost since."""
    lost = tuple(lost)
    reported = {number for node in lost for number in _reported_ranks(facts, node)}
    hosts = {node.host for node in lost if not _reported_ranks(facts, node)}
    left = tuple(
        rank
        for rank in facts.ranks
        if rank.life is not Life.RUNNING or (rank.rank not in reported and rank.host not in hosts)
    )
    return replace(facts, ranks=left) if lost else facts


def _reported_ranks(facts: Job, node: NodeSeen) -> tuple[int, ...]:
    """Return the ranks that a member is known to have."""
    is_rank = facts.members is not None and facts.members.of_ranks
    return node.ranks or ((node.number,) if is_rank else ())


def ranks_of(facts: Job, nodes: Sequence[NodeSeen], unseen: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of nodes: those they reported, else those by their numbers, else all ranks that nobody has seen.

    A node's number is its node rank if the launch gave one. Nodes that never came have the last numbers anyway.
    """
    found: set[int] = set()
    each = facts.local_ranks_expected
    for node in nodes:
        reported = _reported_ranks(facts, node)
        if not reported and each and (facts.node_rank is not None or node.presence is Presence.ABSENT):
            reported = tuple(range(node.number * each, (node.number + 1) * each))
        found.update(reported or unseen)
    return tuple(sorted(found))


def causes_at(facts: Job, host: str) -> HostCauses | None:
    """Return what all processes of a host share."""
    seen = next((one.causes for one in facts.elsewhere if one.host == host), None)
    return seen if seen is not None or (facts.host and host != facts.host) else facts.host_causes


def machines_of(facts: Job) -> tuple[Node, ...]:
    """Return the machines that were read, starting with the machine of the node whose view this is."""
    machines = (facts.machine, *(seen.machine for seen in facts.elsewhere))
    return tuple(machine for machine in machines if machine is not None)


def hosts_of_nodes(nodes: Iterable[NodeSeen]) -> tuple[str, ...]:
    """Return the known hosts of nodes, each once."""
    return tuple(dict.fromkeys(node.host for node in nodes if node.host))


def node_words(facts: Job, nodes: Sequence[NodeSeen]) -> str:
    """Return "node 1 (dd1)", "node 1", "nodes dd1 and dd2", or for single ranks "rank 3 on dd1"."""
    hosts = hosts_of_nodes(nodes)
    if facts.members is not None and facts.members.of_ranks:
        return rank_list(node.number for node in nodes) + (f" on {name_list(hosts)}" if hosts else "")
    if len(nodes) == 1:
        return f"node {nodes[0].number}" + (f" ({hosts[0]})" if hosts else "")
    return f"nodes {name_list([node.host or str(node.number) for node in nodes])}"


def attempts_at(reached: Iterable[Connecting], host: str) -> tuple[Connecting, ...]:
    """Return the attempts to connect to a host."""
    return tuple(attempt for attempt in reached if host and host in (attempt.host, attempt.address))


def reached_words(reached: Iterable[Connecting]) -> list[str]:
    """Return one sentence for each attempt to connect."""
    return [f"connecting from here to {describe(attempt)}" for attempt in reached]


def failing(reached: Iterable[Connecting]) -> Connecting | None:
    """Return the first attempt that did not get through."""
    return next((attempt for attempt in reached if attempt.contact is not Contact.CONNECTED), None)


def reach_fix(attempt: Connecting, here: str) -> str:
    """Return what to do about an address that ``here`` cannot reach."""
    place = f"{attempt.host}:{attempt.port}"
    if attempt.contact is Contact.UNRESOLVED:
        return f"run `getent hosts {attempt.host}` on {here}; add the name to DNS or /etc/hosts"
    if attempt.contact is Contact.REFUSED:
        return (
            f"check that the job was started on {attempt.host}: run `ss -ltnp 'sport = :{attempt.port}'` there; {CHECK}"
        )
    if attempt.contact is Contact.NO_STORE:
        return f"another program uses {place}: choose another port (--rdzv-endpoint, --master-port)"
    ports = f"{EPHEMERAL[0]}-{EPHEMERAL[1]}"
    return f"allow {here} to reach {place} and ports {ports} (nft list ruleset on {attempt.host}); {CHECK}"


class Cause(Enum):
    """What kind of trouble a job is in. It decides which rules apply."""

    NONE = "no rank failed or hung"
    MODEL = "ranks passed different models to DDP"
    EARLY_EXIT = "a rank exited while others were waiting for it"
    FAILURE = "a rank failed on its own"
    CONFLICT = "ranks disagree about a collective"
    NODE_LOST = "a node stopped sending messages"
    HANG = "ranks are waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything that the rules look at."""

    facts: Job
    world: int
    states: Mapping[int, RankState]
    positions: Mapping[int, CallPosition]
    waits: Waits
    conflict: Conflict | None
    difference: ModelDifference | None
    failures: tuple[Failure, ...]
    quiet: frozenset[int]
    """Living ranks that have made no progress for long. If a rank has failed, all living ranks count, whatever their
    progress."""
    early: tuple[int, ...]
    lost: tuple[NodeSeen, ...]
    """Nodes that came and then went silent."""
    cause: Cause

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that have a process, or had one when the job was stopped."""
        return tuple(n for n, state in sorted(self.states.items()) if state.doing not in OVER)

    @property
    def root_failure(self) -> Failure | None:
        """The earliest failure that a rank caused by itself, else that its own time limit caused, else of all."""
        own = [f for f in self.failures if f.by_itself] or [f for f in self.failures if f.by_own_limit]
        return next(iter(own or self.failures), None)

    @property
    def sees_all(self) -> bool:
        """Whether all ranks are visible here, so that a missing one cannot be on another node."""
        if len(self.states) >= self.world:
            return True
        if self.facts.members is not None:
            facts = self.facts
            gone = {node.number for node in never_came(facts)}
            return not is_alone(facts) and all(node.gathered or node.number in gone for node in others_of(facts))
        return self.facts.nnodes <= 1 and not self.facts.may_run_elsewhere

    def rank(self, number: int) -> Rank:
        """Return the facts of a rank."""
        return self.states[number].rank

    def stands_still(self, blamed: Iterable[int]) -> bool:
        """Return whether the job cannot go on: each living rank waits, makes no progress, or is to blame."""
        at_rest = self.quiet | set(self.waits.waiters) | set(blamed)
        return set(self.living) <= at_rest

    @property
    def time_ns(self) -> int:
        """The time for which the job is judged: when somebody began to stop it, else now."""
        return self.facts.stopping_since_ns if self.facts.stopping_since_ns is not None else self.facts.now_ns

    @property
    def timeout_ns(self) -> int:
        """The hang timeout."""
        return int(self.facts.hang_timeout_s * 1e9)

    @property
    def patience_ns(self) -> int:
        """How long a rank must have made no progress to be blamed, if none has failed."""
        return min(self.timeout_ns, OTHERS_PATIENCE_NS) if self._was_ended_by_others() else self.timeout_ns

    def was_left_running(self) -> bool:
        """Return whether the job runs, or ran until a user or a scheduler ended it, and no rank has failed."""
        return not self.failures and not self._was_ended_by_others()

    def _was_ended_by_others(self) -> bool:
        """Return whether the launcher ended, but not by a user or scheduler: it was killed or restarts elsewhere."""
        return self.facts.ended and self.facts.interrupted_by is None

    def is_ending(self) -> bool:
        """Return whether all living ranks are ending, and have been for less than the hang timeout.

        After a failure elsewhere this takes seconds on a crowded host. It is no hang.
        """
        there = [s.rank for s in self.states.values() if s.rank.life is Life.RUNNING]
        errors = {rank.rank: error.time_ns for rank in there if (error := final_error(rank)) is not None}
        left = [max(errors.get(rank.rank, 0), rank.main_ended_ns or 0) for rank in there]
        return bool(left) and all(self.time_ns - at < self.timeout_ns for at in left)

    def waited_ns(self) -> int:
        """Return how long the first waiter has waited."""
        return max((self.states[n].since(self.time_ns) or 0 for n in self.waits.waiters), default=0)

    @property
    def may_have_come(self) -> bool:
        """Whether what every waiting rank waits for may have come, so that its device works on something of its own."""
        calls = [self.states[n].call for n in self.waits.waiters]
        return bool(calls) and all(call and call.device_state is DeviceState.UNTOLD for call in calls)

    def waited_long(self) -> bool:
        """Return whether a rank has waited long enough to blame somebody, if waiting counts here."""
        return bool(self.failures) or self.waited_ns() >= self.patience_ns


def _without_completed(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
    """Drop device calls that may have completed, by their own rank's account, and have by that of an idle peer.

    What completes for one rank has data of all. The device of the other then works on something of its own.
    """
    begun: dict[str, int] = {}
    for group in (group for rank in ranks if rank.device_idle for group in rank.groups):
        begun[group.name] = max(begun.get(group.name, 0), group.enqueued)

    def is_over(call: Call) -> bool:
        untold = call.device_state is DeviceState.UNTOLD and call.seq is not None and call.op not in ROOTED
        return untold and begun.get(call.group, 0) >= (call.seq or 0)

    return tuple(
        replace(rank, open_calls=tuple(call for call in rank.open_calls if not is_over(call)))
        if any(map(is_over, rank.open_calls))
        else rank
        for rank in ranks
    )


def build_job_state(facts: Job) -> JobState:
    """Compute the states, waits, conflicts and failures of a job."""
    lost = lost_nodes(facts, facts.stopping_since_ns if facts.stopping_since_ns is not None else facts.now_ns)
    ranks = _without_completed(without_pulled_down(with_given_up(map(settle, facts.ranks))))
    facts = without_stale(replace(facts, ranks=ranks), lost)
    states, world, table = states_of(facts), world_of(facts), group_table(facts)
    found = {n: position_of(state, table, world) for n, state in states.items()}
    positions = {n: position for n, position in found.items() if position is not None}
    waits = find_waits(states, positions, world)
    failures = find_failures(facts, states)
    early = _early(states, waits, failures)
    conflict = find_conflict(states, positions)
    if conflict is None:
        # Shapes may be the reason for an abort or a wait that nothing else explains.
        in_calls = [f for f in failures if f.call is not None]
        told = any(f.error is None or _DETAIL_SAYS in f.error.message for f in in_calls)
        unexplained = waits.waiters and not waits.blockers and not waits.absent
        shaped = ANY_SHAPE if told else EVEN_SHAPE if unexplained else None
        conflict = find_conflict(states, positions, shaped) if shaped else None
    if conflict is not None and waits.blockers and any(part.kind.op == "new_group" for part in conflict.parts):
        conflict = None  # they wait for a rank that has not come: the others may not be in this group
    if conflict is None and early:
        conflict = find_lone_call(states, positions, early, facts.control_flow)
    elif conflict is not None and not conflict.passed and conflict.blame.confidence is not Confidence.HIGH:
        guarded = blame_guarded(conflict.parts, states, facts.control_flow)
        conflict = replace(conflict, blame=guarded or conflict.blame)
    job = JobState(
        facts=facts,
        world=world,
        states=states,
        positions=positions,
        waits=waits,
        conflict=conflict,
        difference=find_difference([state.rank for state in states.values()], table, world),
        failures=failures,
        quiet=frozenset(),
        early=early,
        lost=lost,
        cause=Cause.NONE,
    )
    progress_ns = {
        n: max(job.rank(n).last_progress_ns or 0, job.rank(n).started_ns or 0, facts.launched_ns) for n in job.living
    }
    quiet = frozenset(n for n, last in progress_ns.items() if failures or job.time_ns - last >= job.patience_ns)
    job = replace(job, quiet=quiet)
    first = _errors_before_calls(job)
    if first:
        left = tuple(f for f in failures if f.rank.rank not in {one.rank.rank for one in first})
        job = replace(job, failures=(*first, *left))
    return replace(job, cause=_cause(job))


def _errors_before_calls(job: JobState) -> tuple[Failure, ...]:
    """Return the failures of ranks that raised an error and, while they handled it, made a call that no other makes.

    That is a ``finally``, an ``except``, the end of a ``with`` block. Their own error explains the call. It does not if
    a rank failed by itself or holds the others up, or if the others are in the same call.
    """
    own: dict[int, Raised] = {}  # the script's errors that ranks handled when they made the call they are or failed in
    for n, state in job.states.items():
        last = final_error(state.rank)
        error = (last.first if last is not None else own_error(state.rank)) if state.waiting else None
        own |= {n: error} if error is not None else {}
    if job.conflict is not None:
        calls = {part.rank: (part.kind.op, part.kind.dtype, part.kind.shape) for part in job.conflict.parts}
        usual = {call for n, call in calls.items() if n not in own}
        own = {n: error for n, error in own.items() if n in calls and calls[n] not in usual}
    others = set(job.states) - set(own)
    if not own or not others or job.early or any(f.by_itself for f in job.failures):
        return ()
    waits = job.waits
    if waits.blockers or waits.absent:
        return ()
    if job.conflict is None and {_first_op(job.states[n]) for n in own} & {_first_op(job.states[n]) for n in others}:
        return ()
    if not job.failures and (not set(job.living) <= job.quiet or not job.waited_long()):
        return ()
    return tuple(
        Failure(rank=state.rank, time_ns=state.call.started_ns, error=error, call=None, then=state.call)
        for n, error in own.items()
        if (state := job.states[n]).call is not None
    )


def _first_op(state: RankState) -> str | None:
    """Return the first call that failed on a rank, which may have made another one since; else the one it waits in."""
    failed = (raised.in_call for raised in state.rank.raised if raised.in_call is not None and raised.thread_is_main)
    return next(failed, state.call.op if state.call is not None else None)


def _early(states: Mapping[int, RankState], waits: Waits, failures: tuple[Failure, ...]) -> tuple[int, ...]:
    """Return the ranks that ended with status 0 before any rank failed by itself, while others needed them."""
    first = min((f.time_ns for f in failures if f.by_itself), default=None)
    found = []
    for number in waits.blockers:
        state = states[number]
        ended = state.rank.main_ended_ns if state.doing is Activity.SHUTTING_DOWN else state.rank.ended_ns
        before = first is None or (ended is not None and ended <= first)
        left = state.doing in (Activity.ENDED, Activity.SHUTTING_DOWN) and final_error(state.rank) is None
        # If all waiters are in C++ collectives of a step that this rank had completed, they do not wait for it.
        further = all(
            states[n].doing is Activity.NATIVE and _backwards(state.rank) > _backwards(states[n].rank)
            for n in waits.waiters
        )
        if left and before and not further:
            found.append(number)
    return tuple(found)


def _backwards(rank: Rank) -> tuple[int, int]:
    """Return how far a rank has come: its optimizer steps, and if there are none, the backwards still recorded."""
    counts = pack_calls(rank.recent_calls).counts
    ended = sum(count for kind, count in counts.items() if kind.op == "backward" and not kind.failed)
    return (rank.steps, ended if rank.steps == 0 else 0)


def _cause(job: JobState) -> Cause:
    """Return what kind of trouble a job is in: lost ranks and different models first, as they explain all others."""
    conflict, waits, root = job.conflict, job.waits, job.root_failure
    in_call = root is None or root.call is not None
    # Lost ranks explain it if the remaining ranks wait for them or fail with them.
    held_up = root is None and bool(waits.blockers)
    missed = root is not None or bool(waits.absent) or not job.states
    if job.lost and not job.early and conflict is None and in_call and not held_up and missed:
        return Cause.NODE_LOST
    # Different models explain it if the trouble is in DDP, and no rank failed or was late by itself.
    in_ddp = any(
        state.doing is Activity.NATIVE and state.call is not None and state.call.op in NATIVE_PHASES
        for state in job.states.values()
    )
    alive = any(job.states[n].doing not in OVER for n in waits.blockers)
    if job.difference is not None and in_ddp and in_call and not (root is None and conflict is None and alive):
        return Cause.MODEL
    if job.early and conflict is None:
        return Cause.EARLY_EXIT
    if root is not None and root.by_watchdog and conflict is None and came_late(s.rank for s in job.states.values()):
        return Cause.HANG
    if root is not None and root.call is None and not root.by_own_limit:
        frames = root.error.frames if root.error is not None else ()
        if conflict is None or not any(is_file(frame, "/torch/distributed/") for frame in frames):
            return Cause.FAILURE
    if conflict is not None:
        return Cause.CONFLICT
    if root is None:
        return Cause.HANG if waits.waiters else Cause.NONE
    hung = (root.timed_out and (waits.blockers or waits.absent)) or all_gave_up(job.failures, job.states)
    return Cause.HANG if hung else Cause.FAILURE


def asked_if(*causes: Cause) -> Callable[[Callable[[JobState], Answer]], Callable[[JobState], Answer]]:
    """Ask a rule only about jobs in these kinds of trouble. Of others its check says what trouble they are in."""

    def limited(check: Callable[[JobState], Answer]) -> Callable[[JobState], Answer]:
        @wraps(check)
        def ask(job: JobState) -> Answer:
            if job.cause in causes:
                return check(job)
            return skipped(job.cause.value) if job.cause is not Cause.NONE else passed()

        return ask

    return limited
