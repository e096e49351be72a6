"""DD605, DD606 and DD607: a process that is frozen, and a rank or node that was lost, never came or is not found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Presence
from ddpdoctor.model.findings import Confidence, FaultOrigin, Severity
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.words import name_list, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import (
    CHECK,
    Cause,
    JobState,
    attempts_at,
    failing,
    hosts_of_nodes,
    is_alone,
    never_came,
    node_words,
    others_of,
    ranks_of,
    reach_fix,
    reached_words,
)
from ddpdoctor.rules.progress.states import Activity, places_held_up, seconds
from ddpdoctor.rules.progress.wait_causes import clues_of
from ddpdoctor.rules.progress.words import fix_of, sentences
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job, NodeSeen, Rank
    from ddpdoctor.rules.progress.job_state import JobState


_UP = frozenset({Contact.CONNECTED, Contact.REFUSED, Contact.RESET, Contact.NO_STORE})
"""Answers that only a running and reachable host can give."""


def judge_lost(job: JobState) -> Answer:
    """Report the nodes that went silent, if the remaining ranks cannot go on without them."""
    if job.was_left_running() and not _stands(job):
        return unknown("the remaining ranks have not waited for the whole --hang-timeout yet")
    lost = _blamed(job)
    others = others_of(job.facts)
    tried = [attempts_at(job.facts.reached, node.host) for node in others]
    hosts = {node.host for node in others}
    cut_off = is_alone(job.facts) and len(hosts) > 1 and all(tried) and not any(_answers(job, n) for n in others)
    own = (job.facts.host,) if cut_off and job.facts.host else ()
    unseen = set(range(job.world)) - set(job.states)
    either = is_alone(job.facts) and not cut_off  # with only one other node, either may be the one that is cut off
    finding = Problem(
        confidence=Confidence.MEDIUM if either else Confidence.HIGH,
        ranks=() if own else ranks_of(job.facts, lost, unseen),
        hosts=own or hosts_of_nodes(lost),
        summary=_summary(job, lost, cut_off=cut_off),
        evidence=(
            *(sentence for node in lost for sentence in _seen_words(job, node)),
            *reached_words(job.facts.reached),
            *say.classes(job, sorted(job.states)),
            *say.cascade_words(job.failures, ()),
        ),
        fix=_fix(job, lost, cut_off=cut_off),
        origin=FaultOrigin.NETWORK if cut_off else FaultOrigin.MACHINE,
    )
    certain = job.stands_still(()) and not job.is_ending()
    return judged([finding], certain=certain, may_resume=not all(_is_gone(job, node) for node in lost))


def _is_gone(job: JobState, node: NodeSeen) -> bool:
    """Return whether a node will not come back: it said that it left, or was silent for the whole hang timeout."""
    silent_ns = job.time_ns - (node.heard_ns or job.time_ns)
    return node.presence is Presence.LEFT or silent_ns >= job.timeout_ns


def _stands(job: JobState) -> bool:
    """Return whether the rest has made no progress for the hang timeout; without ranks, whether none has started."""
    if not job.states:
        return job.facts.now_ns - job.facts.launched_ns >= job.timeout_ns
    return job.waited_long() and set(job.living) <= job.quiet


def _blamed(job: JobState) -> tuple[NodeSeen, ...]:
    """Return the lost nodes that do not answer, or all of them if all answer or none was tried.

    A member that hears nothing from the first node also hears nothing about the nodes that only the first reported on.
    """
    silent = tuple(node for node in job.lost if not _answers(job, node))
    return silent if is_alone(job.facts) and silent else job.lost


def _answers(job: JobState, node: NodeSeen) -> bool:
    return any(attempt.contact in _UP for attempt in attempts_at(job.facts.reached, node.host))


def _summary(job: JobState, lost: tuple[NodeSeen, ...], *, cut_off: bool) -> str:
    waiters = job.waits.waiters
    waiting = f"; {rank_list(waiters)} {verb(waiters, 'is', 'are')} waiting for it{_where(job)}" if waiters else ""
    if cut_off:
        hosts = name_list(hosts_of_nodes(others_of(job.facts)))
        return f"this node ({job.facts.host}) is cut off: {hosts} do not respond"
    who = node_words(job.facts, lost)
    silent = seconds(max(job.time_ns - (node.heard_ns or job.time_ns) for node in lost))
    if all(_answers(job, node) for node in lost):
        return f"the job on {who} is gone, but the host responds{waiting}"
    left = [node.status for node in lost if node.presence is Presence.LEFT]
    if left:
        return f"{who} exited with status {left[0]} before its ranks sent a report{waiting}"
    heard = f": no message from {'it' if len(lost) == 1 else 'them'} {silent}".rstrip() if silent else ""
    return f"{who} died or {verb(range(len(lost)), 'was', 'were')} cut off{heard}{waiting}"


def _where(job: JobState) -> str:
    calls = {state.call.op for n in job.waits.waiters if (state := job.states[n]).call is not None}
    return f" in {calls.pop()}" if len(calls) == 1 else ""


def _seen_words(job: JobState, node: NodeSeen) -> list[str]:
    who = node_words(job.facts, (node,))
    found = [f"{who}: {node.why}"] if node.why else []
    unseen = set(range(job.world)) - set(job.states)
    ranks = ranks_of(job.facts, (node,), ()) if node.ranks else tuple(sorted(unseen))
    if ranks and (node.ranks or len(job.lost) == 1):
        found.append(f"{who} has {rank_list(ranks)}")
    return found


def _fix(job: JobState, lost: tuple[NodeSeen, ...], *, cut_off: bool) -> str:
    if cut_off:
        return f"check the network of {job.facts.host}: ip -s link show; nft list ruleset; dmesg"
    where = name_list(hosts_of_nodes(lost)) if hosts_of_nodes(lost) else "the node"
    if all(_answers(job, node) for node in lost):
        return f"find out what ended the job on {where}: check dmesg and the batch system's log for a SIGKILL"
    return (
        f"check whether {where} is up (console, sinfo, kubectl get nodes), then its network: ip -s link show; "
        "nft list ruleset; dmesg"
    )


def judge_missing_nodes(job: JobState) -> Answer:
    """Report the nodes that the launcher waits for, so that no rank has started anywhere."""
    facts = job.facts
    if facts.now_ns - facts.launched_ns < facts.hang_timeout_s * 1e9:
        return unknown("the launcher has not waited for the whole --hang-timeout yet")
    if facts.members is None:
        return _unseen_nodes(job)
    absent = never_came(facts)
    if is_alone(facts) and facts.members.own != 0:  # only the first node would have reported the others
        absent = tuple(node for node in absent if node.number == 0)
    finding = _absent(facts, absent) if absent else _apart(facts)
    return judged([finding], certain=True, may_resume=True)


def _absent(facts: Job, absent: tuple[NodeSeen, ...]) -> Problem:
    """Report members that were never heard from. What this node sees of them says why, if that can be known."""
    bad = failing(facts.reached)
    who = node_words(facts, absent)
    unresolved = bad is not None and bad.contact is Contact.UNRESOLVED
    hosts = (facts.host,) if unresolved and facts.host else hosts_of_nodes(absent)
    said = f"{who} never joined; the launcher on this node has waited {_waited(facts)}".rstrip()
    if is_alone(facts) and bad is not None:
        said = f"{facts.host or 'this node'} cannot reach {bad.host}:{bad.port} ({_short(bad.contact)}): " + said
    return Problem(
        confidence=Confidence.MEDIUM if is_alone(facts) else Confidence.HIGH,
        ranks=ranks_of(facts, absent, ()),
        hosts=hosts,
        summary=said,
        evidence=(
            *(f"{node_words(facts, (node,))}: {node.why}" for node in absent if node.why),
            *reached_words(facts.reached),
            *_here_words(facts),
        ),
        fix=_absent_fix(facts, absent),
    )


def _waited(facts: Job) -> str:
    return seconds(facts.now_ns - facts.launched_ns)


def _short(contact: Contact) -> str:
    return {
        Contact.UNRESOLVED: "the name does not resolve here",
        Contact.NO_ANSWER: "no response",
        Contact.NO_STORE: "another program responds",
    }.get(contact, contact.value)


def _here_words(facts: Job) -> list[str]:
    """Return which nodes have come, of those that were reported here."""
    assert facts.members is not None
    if is_alone(facts):
        return ["this node got no message from any other node; their own reports show what they see"]
    gone = {node.number for node in never_came(facts)}
    here = [node for node in facts.members.nodes if node.number not in gone]
    hosts = [node.host or str(node.number) for node in here]
    return [f"{len(here)} of {facts.members.expected} nodes joined: {name_list(hosts)}"] if here else []


def _absent_fix(facts: Job, absent: tuple[NodeSeen, ...]) -> str:
    bad = failing(facts.reached)
    if is_alone(facts) and bad is not None:
        return reach_fix(bad, facts.host or "this node")
    hosts = hosts_of_nodes(absent)
    where = f" on {name_list(hosts)}" if hosts else " there"
    return f"check that the job was started{where} with the same endpoint, id and number of nodes; {CHECK}"


def _apart(facts: Job) -> Problem:
    """Report launchers that wait although every node is here: they look for each other in different places."""
    others = others_of(facts)
    bad = failing(facts.reached)
    place = f": {facts.host or 'this node'} cannot reach {bad.host}:{bad.port} ({_short(bad.contact)})" if bad else ""
    return Problem(
        confidence=Confidence.MEDIUM,
        hosts=(facts.host,) if bad is not None and bad.contact is Contact.UNRESOLVED and facts.host else (),
        summary=f"all {len(others) + 1} nodes are up, but their launchers have not completed the rendezvous "
        f"{_waited(facts)}".rstrip()
        + place,
        evidence=(
            *reached_words(facts.reached),
            *[f"on {seen.host}, {sentence}" for seen in facts.elsewhere for sentence in reached_words(seen.reached)],
        ),
        fix=reach_fix(bad, facts.host or "this node")
        if bad is not None
        else f"give all nodes the same --rdzv-id, --rdzv-endpoint and --nnodes; {CHECK}",
    )


def _unseen_nodes(job: JobState) -> Answer:
    """Report that this node's launcher waits for other nodes, which the node itself cannot see."""
    facts = job.facts
    if facts.node_rank is None or not facts.local_ranks_expected or facts.world_size is None:
        return unknown("the ranks of this node are unknown")
    first = facts.node_rank * facts.local_ranks_expected
    here = range(first, first + facts.local_ranks_expected)
    elsewhere = tuple(n for n in range(facts.world_size) if n not in here)
    finding = Problem(
        confidence=Confidence.LOW,
        ranks=elsewhere,
        summary=(
            f"the launcher of node {facts.node_rank} is waiting for other nodes: no rank has started {_waited(facts)}"
        ),
        evidence=(
            f"the job has {facts.nnodes} nodes; {rank_list(elsewhere)} on the other nodes cannot be seen from here",
            *reached_words(facts.reached),
        ),
        fix=f"check that the other nodes were started and can reach this node's --rdzv-endpoint; {CHECK}",
    )
    return judged([finding])


@rule("DD606", "stopped", Severity.ERROR, "The process of a rank is frozen")
def check_stopped(job: JobState) -> Answer:
    """Report a process that is frozen: by SIGSTOP, by a debugger, or in the kernel."""
    if job.cause not in (Cause.HANG, Cause.NONE, Cause.CONFLICT):
        return skipped(job.cause.value)
    frozen = tuple(n for n in job.living if job.states[n].doing is Activity.STOPPED)
    if not frozen:
        return passed()
    blamed = tuple(n for n in frozen if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(frozen)} made progress just now")
    if not job.waits.waiters and not set(job.living) <= job.quiet:
        return unknown(f"{rank_list(frozen)} {verb(frozen, 'is', 'are')} stopped, but no rank is waiting yet")
    return _stopped(job, blamed)


def _stopped(job: JobState, blamed: tuple[int, ...]) -> Answer:
    ranks = [job.rank(n) for n in blamed]
    where = tuple(place for rank in ranks for place in places_held_up(rank, waits_for_child=False)[:1])
    traced = [rank.traced_by for rank in ranks if rank.traced_by]
    asleep = any(rank.proc_state == "D" for rank in ranks)
    how = f"held by a debugger (process {traced[0]})" if traced else f"stopped (state {ranks[0].proc_state})"
    waiters = say.waiters_words(job, blamed)
    clues = {n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]} if asleep else {}
    finding = say.problem_of(
        job,
        blamed,
        confidence=Confidence.MEDIUM if asleep else Confidence.HIGH,
        where=where,
        summary=f"{say.who(job, blamed)} {verb(blamed, 'is', 'are')} {how}" + (f"; {waiters}" if waiters else ""),
        evidence=(
            *sentences(clues),
            *say.process_words(job, blamed),
            *say.others(job, blamed),
            *say.progress_words(job, blamed),
        ),
        fix=fix_of((clue for found in clues.values() for clue in found), _stopped_fix(job, blamed, asleep=asleep)),
    )
    lasting = job.waits.waiters and all(_is_frozen_for_good(job, rank) for rank in ranks)
    return judged([finding], certain=job.stands_still(blamed), may_resume=not lasting)


def _is_frozen_for_good(job: JobState, rank: Rank) -> bool:
    """Return whether a process has been stopped for the whole hang timeout and no debugger can continue it.

    Sleep in the kernel (D) does not count: it ends when the device or the file server answers, however late.
    """
    if rank.proc_state != "T" or rank.traced_by or rank.frozen_since_ns is None:
        return False
    return job.time_ns - rank.frozen_since_ns >= job.timeout_ns


def _stopped_fix(job: JobState, blamed: tuple[int, ...], *, asleep: bool) -> str:
    ranks = [job.rank(n) for n in blamed]
    if any(rank.traced_by for rank in ranks):
        return "detach the debugger, or continue the process in it"
    if asleep:
        return "check dmesg, and the device or file system that it reads"
    hosts = say.hosts_of(job, blamed)
    by_host = [(f"on {host}: ", [rank for rank in ranks if rank.host == host]) for host in hosts] or [("", ranks)]
    return "; ".join(f"{where}kill -CONT {' '.join(str(rank.pid) for rank in those)}" for where, those in by_host)


@rule("DD607", "missing", Severity.ERROR, "A rank or node never joined")
def check_missing(job: JobState) -> Answer:
    """Report ranks that have no process while others wait for them."""
    if job.cause is Cause.NONE and not job.states and (job.facts.nnodes > 1 or job.facts.members is not None):
        return judge_missing_nodes(job)
    if job.cause not in (Cause.HANG, Cause.NONE):
        return skipped(job.cause.value)
    absent = job.waits.absent
    in_init = any(state.doing is Activity.INIT for state in job.states.values())
    if not absent or (not job.sees_all and not in_init):
        return passed()
    if not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
    return _missing(job, absent)


def _missing(job: JobState, absent: tuple[int, ...]) -> Answer:
    asked = job.facts.local_ranks_expected
    seen = [
        *say.classes(job, job.waits.waiters),
        f"the world size is {job.world}, and {len(job.states)} ranks were seen",
    ]
    seen += [f"the launcher on this node starts {asked} ranks"] if asked is not None else []
    taken: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for rank in job.facts.ranks:
        if rank.pid is not None:
            taken.setdefault((rank.attempt, rank.rank), set()).add((rank.host, rank.pid))
    several = len({rank.host for rank in job.facts.ranks}) > 1
    doubled = [
        f"{len(found)} processes use rank {number}: "
        + ", ".join(f"{pid} on {host}" if several else str(pid) for host, pid in sorted(found))
        for (_, number), found in sorted(taken.items())
        if len(found) > 1
    ]
    alone = job.sees_all
    absent_nodes = [node for node in never_came(job.facts) if set(ranks_of(job.facts, (node,), ())) & set(absent)]
    finding = Problem(
        confidence=Confidence.HIGH if alone else Confidence.LOW,
        ranks=absent,
        hosts=hosts_of_nodes(absent_nodes),
        summary=f"{rank_list(absent)} never joined; {rank_list(job.waits.waiters)} "
        f"{verb(job.waits.waiters, 'is', 'are')} waiting for all {job.world} ranks"
        + "".join(f"; {sentence}" for sentence in doubled[:1]),
        evidence=(
            *seen,
            *doubled,
            *[
                f"no message from {node_words(job.facts, (node,))}" + (f": {node.why}" if node.why else "")
                for node in absent_nodes[: say.MAX_CLASSES]
            ],
            *reached_words(job.facts.reached),
        ),
        fix=_missing_fix(job, absent_nodes, alone=alone, doubled=bool(doubled)),
    )
    certain = alone and job.stands_still(())
    return judged([finding], certain=certain, may_resume=bool(never_came(job.facts)))


def _missing_fix(job: JobState, absent_nodes: list[NodeSeen], *, alone: bool, doubled: bool) -> str:
    if doubled:
        return "give each process its own rank: pass RANK, which the launcher sets, to rank="
    if absent_nodes:
        hosts = hosts_of_nodes(absent_nodes)
        where = f" on {name_list(hosts)}" if hosts else ""
        return f"check that the job was started{where} with the same endpoint and world size; {CHECK}"
    if alone:
        return "start as many ranks as the world size (--nproc-per-node, --nnodes, or world_size= in the script)"
    bad = failing(job.facts.reached)
    if bad is not None:
        return reach_fix(bad, job.facts.host or "this node")
    return f"check that the other nodes were started with the same endpoint and number of nodes; {CHECK}"
