"""All that the rules judge: nodes, ranks, waits, conflicts and failures of a job, and its kind of trouble."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import wraps
from itertools import filterfalse
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Call, DeviceState, Job, Life, Presence, Raised, Rank
from ddpdoctor.model.findings import Confidence
from ddpdoctor.rules.answers import Answer, passed, skipped
from ddpdoctor.rules.progress import calls
from ddpdoctor.rules.progress import states as st
from ddpdoctor.rules.progress.branches import blame_guarded, find_lone_call
from ddpdoctor.rules.progress.waits import CallPosition, Waits, find_waits, group_table, positions_of, world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpdoctor.model.facts import HostCauses, NodeSeen
    from ddpdoctor.model.node import Node

# Our choice: a living node is heard from once a second, or up to this much later if it is crowded.
BEATS_NS = 5_000_000_000
# Our choice: how long ranks must have made no progress if something outside, such as `timeout 60`, ended the launcher.
# A healthy job makes progress in that time.
OTHERS_PATIENCE_NS = 30_000_000_000
# The beginning of the error that torch raises on all ranks under DETAIL. It does not say who is to blame.
_DETAIL_SAYS = "Detected mismatch between collectives on ranks"


def others_of(facts: Job) -> tuple[NodeSeen, ...]:
    members = facts.members
    return tuple(node for node in members.nodes if node.number != members.own) if members is not None else ()


def never_came(facts: Job) -> tuple[NodeSeen, ...]:
    """Return the members that never joined, or none if all nodes have: then a silent one was just not seen."""
    # A launcher that joins nodes starts no rank before that, and ``init_process_group`` returns on no rank before that.
    by_launcher = facts.members is not None and not facts.members.of_ranks
    if any(rank.initialized for rank in facts.ranks) or (by_launcher and bool(facts.ranks)):
        return ()
    return tuple(node for node in others_of(facts) if node.presence is Presence.ABSENT)


def lost_nodes(facts: Job, time_ns: int) -> tuple[NodeSeen, ...]:
    """Return the members that went silent, or left with an error without sending what their ranks did."""
    # A node that was lost before the ranks of this attempt began does not count, unless its ranks are still missing. If
    # it is not known which ranks it has, any missing rank may be one of them.
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
    return facts.members is not None and facts.members.alone_since_ns is not None


def without_stale(facts: Job, lost: tuple[NodeSeen, ...]) -> Job:
    reported = {number for node in lost for number in reported_ranks(facts, node)}
    hosts = {node.host for node in lost if not reported_ranks(facts, node)}
    left = tuple(
        rank
        for rank in facts.ranks
        if rank.life is not Life.RUNNING or (rank.rank not in reported and rank.host not in hosts)
    )
    return replace(facts, ranks=left) if lost else facts


def reported_ranks(facts: Job, node: NodeSeen) -> tuple[int, ...]:
    is_rank = facts.members is not None and facts.members.of_ranks
    return node.ranks or ((node.number,) if is_rank else ())


def causes_at(facts: Job, host: str) -> HostCauses | None:
    seen = next((machine.causes for machine in facts.elsewhere if machine.host == host), None)
    return seen if seen is not None or (facts.host and host != facts.host) else facts.host_causes


def machines_of(facts: Job) -> tuple[Node, ...]:
    machines = (facts.machine, *(seen.machine for seen in facts.elsewhere))
    return tuple(machine for machine in machines if machine is not None)


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
    states: Mapping[int, st.RankState]
    ranks: Mapping[int, Rank]  # the facts of each
    positions: Mapping[int, CallPosition]
    waits: Waits
    conflict: calls.Conflict | None
    difference: calls.ModelDifference | None
    failures: tuple[st.Failure, ...]
    # The earliest failure that a rank caused by itself, else that its own time limit caused, else of all.
    root_failure: st.Failure | None = None
    # Living ranks that have made no progress for long. If a rank has failed, all living ranks count, whatever their
    # progress.
    quiet: frozenset[int] = frozenset()
    early: tuple[int, ...]
    lost: tuple[NodeSeen, ...]  # nodes that came and then went silent
    living: tuple[int, ...]
    time_ns: int  # of the last look, or of the stop if that came before
    timeout_ns: int  # the hang timeout
    cause: Cause = Cause.NONE

    @property
    def sees_all(self) -> bool:
        if len(self.states) >= self.world:
            return True
        if self.facts.members is not None:
            facts = self.facts
            gone = {node.number for node in never_came(facts)}
            return not is_alone(facts) and all(node.gathered or node.number in gone for node in others_of(facts))
        return self.facts.nnodes <= 1 and not self.facts.may_run_elsewhere

    def stands_still(self, blamed: Iterable[int]) -> bool:
        """Return whether the job cannot continue: each living rank waits, makes no progress, or is to blame."""
        at_rest = self.quiet | set(self.waits.waiters) | set(blamed)
        return set(self.living) <= at_rest

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
        """Return whether all living ranks are ending, and have been for less than the hang timeout."""
        # After a failure elsewhere this takes seconds on a crowded host. It is no hang.
        there = [state for state in self.states.values() if state.rank.life is Life.RUNNING]
        left = [max(s.error.time_ns if s.error is not None else 0, s.rank.main_ended_ns or 0) for s in there]
        return bool(left) and all(self.time_ns - at < self.timeout_ns for at in left)

    @property
    def may_have_come(self) -> bool:
        """Whether each waiting rank may already have what it waits for, so that its device runs other work."""
        calls = [self.states[n].call for n in self.waits.waiters]
        return bool(calls) and all(call and call.device_state is DeviceState.UNTOLD for call in calls)

    def waited_long(self) -> bool:
        """Return whether a rank has waited long enough for blame, if waiting counts here."""
        waited_ns = (self.states[n].since(self.time_ns) or 0 for n in self.waits.waiters)
        return bool(self.failures) or max(waited_ns, default=0) >= self.patience_ns


def _without_completed(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
    # What completes for one rank has data of all. The device of the other then works on something of its own.
    begun: dict[str, int] = {}
    for group in (group for rank in ranks if rank.device_idle for group in rank.groups):
        begun[group.name] = max(begun.get(group.name, 0), group.enqueued)

    def is_over(call: Call) -> bool:
        untold = call.device_state is DeviceState.UNTOLD and call.seq is not None and call.op not in calls.ROOTED
        return untold and begun.get(call.group, 0) >= (call.seq or 0)

    return tuple(replace(rank, open_calls=tuple(filterfalse(is_over, rank.open_calls))) for rank in ranks)


def build_job_state(facts: Job) -> JobState:
    since_ns = facts.stopping_since_ns
    time_ns = since_ns if since_ns is not None else facts.now_ns
    lost = lost_nodes(facts, time_ns) if facts.members is not None else ()
    ranks = _without_completed(st.without_pulled_down(st.with_given_up(tuple(map(st.settle, facts.ranks)))))
    facts = without_stale(replace(facts, ranks=ranks), lost)
    # If several processes have one rank number, the last attempt's counts.
    ordered = sorted(facts.ranks, key=lambda rank: (rank.rank, rank.attempt, rank.started_ns or 0))
    is_detail = facts.debug_level.upper() == "DETAIL"
    by_number = {rank.rank: rank for rank in ordered}
    states = {n: replace(st.state_of(rank, since_ns), detail=is_detail) for n, rank in by_number.items()}
    world, table = world_of(facts), group_table(facts)
    positions = positions_of(states, table, world)
    waits = find_waits(states, positions, world)
    failures = st.find_failures(facts, states)
    early = _early(states, waits, failures)
    conflict = calls.find_conflict(states, positions)
    if conflict is None:
        # Shapes may be the reason for an abort or a wait that nothing else explains.
        in_calls = [f for f in failures if f.call is not None]
        told = any(f.error is None or _DETAIL_SAYS in f.error.message for f in in_calls)
        unexplained = waits.waiters and not waits.blockers and not waits.absent
        shaped = calls.ANY_SHAPE if told else calls.EVEN_SHAPE if unexplained else None
        conflict = calls.find_conflict(states, positions, shaped) if shaped else None
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
        ranks=by_number,
        positions=positions,
        waits=waits,
        conflict=conflict,
        difference=calls.find_difference(tuple(by_number.values()), table, world),
        failures=failures,
        early=early,
        lost=lost,
        living=tuple(n for n, state in sorted(states.items()) if state.doing not in st.OVER),
        time_ns=time_ns,
        timeout_ns=int(facts.hang_timeout_s * 1e9),
    )
    alive = [by_number[n] for n in job.living]
    last_ns = {r.rank: max(r.last_progress_ns or 0, r.started_ns or 0, facts.launched_ns) for r in alive}
    quiet = frozenset(n for n, last in last_ns.items() if failures or time_ns - last >= job.patience_ns)
    job = replace(job, quiet=quiet)
    first = _errors_before_calls(job)
    failures = (*first, *(f for f in failures if f.rank.rank not in {failure.rank.rank for failure in first}))
    own = [f for f in failures if f.by_itself] or [f for f in failures if f.by_own_limit]
    job = replace(job, failures=failures, root_failure=next(iter(own or failures), None))
    return replace(job, cause=_cause(job))


def _errors_before_calls(job: JobState) -> tuple[st.Failure, ...]:
    # That is a ``finally``, an ``except``, the end of a ``with`` block. Their own error explains the call. It does not
    # if a rank failed by itself or holds the others up, or if the others are in the same call.
    own: dict[int, Raised] = {}  # the script's errors that ranks handled when they made the call they are or failed in
    for n, state in job.states.items():
        last = state.error
        error = (last.first if last is not None else st.own_error(state.rank)) if state.waiting else None
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
        st.Failure(rank=state.rank, time_ns=state.call.started_ns, error=error, call=None, then=state.call)
        for n, error in own.items()
        if (state := job.states[n]).call is not None
    )


def _first_op(state: st.RankState) -> str:
    failed = (raised.in_call for raised in state.rank.raised if raised.in_call is not None and raised.thread_is_main)
    return next(failed, state.op)


def _early(states: Mapping[int, st.RankState], waits: Waits, failures: tuple[st.Failure, ...]) -> tuple[int, ...]:
    """Return the ranks that ended with status 0 before any rank failed by itself, while others needed them."""
    first = min((f.time_ns for f in failures if f.by_itself), default=None)
    found = []
    for number in waits.blockers:
        state = states[number]
        ended = state.rank.main_ended_ns if state.doing is st.Activity.SHUTTING_DOWN else state.rank.ended_ns
        before = first is None or (ended is not None and ended <= first)
        left = state.doing in (st.Activity.ENDED, st.Activity.SHUTTING_DOWN) and state.error is None
        # If all waiters are in C++ collectives of a step that this rank had completed, they do not wait for it.
        peers = [states[n] for n in waits.waiters]
        native = all(peer.doing is st.Activity.NATIVE for peer in peers)
        further = native and all(_backwards(state.rank) > _backwards(peer.rank) for peer in peers)
        if left and before and not further:
            found.append(number)
    return tuple(found)


def _backwards(rank: Rank) -> tuple[int, int]:
    """Return the progress of a rank: its optimizer steps, and if there are none, the backwards still recorded."""
    counts = rank.recent_calls.counts
    ended = sum(count for kind, count in counts.items() if kind.op == "backward" and not kind.failed)
    return (rank.steps, ended if rank.steps == 0 else 0)


def _cause(job: JobState) -> Cause:
    conflict, waits, root = job.conflict, job.waits, job.root_failure
    in_call = root is None or root.call is not None
    # Lost ranks explain it if the remaining ranks wait for them or fail with them.
    held_up = root is None and bool(waits.blockers)
    missed = root is not None or bool(waits.absent) or not job.states
    if job.lost and not job.early and conflict is None and in_call and not held_up and missed:
        return Cause.NODE_LOST
    # Different models explain it if the trouble is in DDP, and no rank failed or was late by itself.
    in_ddp = any(state.doing is st.Activity.NATIVE for state in job.states.values())
    alive = any(job.states[n].doing not in st.OVER for n in waits.blockers)
    if job.difference is not None and in_ddp and in_call and not (root is None and conflict is None and alive):
        return Cause.MODEL
    if job.early and conflict is None:
        return Cause.EARLY_EXIT
    if root is not None and root.by_watchdog and conflict is None and st.came_late(job.ranks.values()):
        return Cause.HANG
    if root is not None and root.call is None and not root.by_own_limit:
        frames = root.error.frames if root.error is not None else ()
        if conflict is None or not any(st.is_file(frame, "/torch/distributed/") for frame in frames):
            return Cause.FAILURE
    if conflict is not None:
        return Cause.CONFLICT
    if root is None:
        return Cause.HANG if waits.waiters else Cause.NONE
    hung = (root.timed_out and (waits.blockers or waits.absent)) or st.all_gave_up(job.failures, job.states)
    return Cause.HANG if hung else Cause.FAILURE


def asked_if(*causes: Cause) -> Callable[[Callable[[JobState], Answer]], Callable[[JobState], Answer]]:
    """Run a rule only on jobs in these kinds of trouble. For others, its check names their trouble."""

    def limited(check: Callable[[JobState], Answer]) -> Callable[[JobState], Answer]:
        @wraps(check)
        def ask(job: JobState) -> Answer:
            if job.cause in causes:
                return check(job)
            return skipped(job.cause.value) if job.cause is not Cause.NONE else passed()

        return ask

    return limited
