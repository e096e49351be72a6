"""DD605, DD606 and DD607: a process that is frozen, and a rank or node that was lost, never came or is not found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Presence
from ddpdoctor.model.findings import Confidence, FaultOrigin, Severity
from ddpdoctor.model.launch import Contact
from ddpdoctor.model.words import name_list, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, unknown
from ddpdoctor.rules.network import EPHEMERAL
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import (
    Cause,
    JobState,
    asked_if,
    is_alone,
    never_came,
    others_of,
    reported_ranks,
)
from ddpdoctor.rules.progress.states import Activity, seconds
from ddpdoctor.rules.progress.wait_causes import clues_of, places_held_up
from ddpdoctor.rules.progress.words import fix_of, sentences
from ddpdoctor.rules.registry import rule
from ddpdoctor.rules.rendezvous.mesh import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import Job, NodeSeen
    from ddpdoctor.model.launch import Connecting


CHECK = "run `ddpdoctor check-rendezvous` on every node to see which nodes cannot connect"
# Answers that only a running and reachable host can give.
_UP = frozenset({Contact.CONNECTED, Contact.REFUSED, Contact.RESET, Contact.NO_STORE})
_NOT_REACHED = {
    Contact.UNRESOLVED: "the name does not resolve here",
    Contact.NO_ANSWER: "no response",
    Contact.NO_STORE: "another program responds",
}


def ranks_of(facts: Job, nodes: Sequence[NodeSeen], unseen: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of nodes: those they reported, else those by their numbers, else all ranks that nobody has seen.

    A node's number is its node rank if the launch gave one. Nodes that never came have the last numbers anyway.
    """
    found: set[int] = set()
    each = facts.local_ranks_expected
    for node in nodes:
        reported = reported_ranks(facts, node)
        if not reported and each and (facts.node_rank is not None or node.presence is Presence.ABSENT):
            reported = tuple(range(node.number * each, (node.number + 1) * each))
        found.update(reported or unseen)
    return tuple(sorted(found))


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


def _first_failing(facts: Job) -> Connecting | None:
    """Return the first attempt to connect that did not get through."""
    return next((attempt for attempt in facts.reached if attempt.contact is not Contact.CONNECTED), None)


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


def judge_lost(job: JobState) -> Answer:
    """Report the nodes that went silent, if the remaining ranks cannot go on without them."""
    facts, waiters = job.facts, job.waits.waiters
    stands = job.waited_long() and set(job.living) <= job.quiet
    if not job.states:
        stands = facts.now_ns - facts.launched_ns >= job.timeout_ns
    if job.was_left_running() and not stands:
        return unknown("the remaining ranks have not waited for the whole --hang-timeout yet")
    # A member that hears nothing from the first node also hears nothing about the nodes that only the first reported
    # on: those that answer are not lost, unless all answer or none was tried.
    silent = tuple(node for node in job.lost if not _answers(job, node))
    lost = silent if is_alone(facts) and silent else job.lost
    others = others_of(facts)
    tried = [attempts_at(facts.reached, node.host) for node in others]
    hosts = {node.host for node in others}
    cut_off = is_alone(facts) and len(hosts) > 1 and all(tried) and not any(_answers(job, n) for n in others)
    own = (facts.host,) if cut_off and facts.host else ()
    unseen = tuple(sorted(set(range(job.world)) - set(job.states)))
    either = is_alone(facts) and not cut_off  # with only one other node, either may be the one that is cut off
    seen = []
    for node in lost:
        who = node_words(facts, (node,))
        seen += [f"{who}: {node.why}"] if node.why else []
        ranks = ranks_of(facts, (node,), ()) if node.ranks else unseen
        if ranks and (node.ranks or len(job.lost) == 1):
            seen.append(f"{who} has {rank_list(ranks)}")
    calls = {state.call.op for n in waiters if (state := job.states[n]).call is not None}
    inside = f" in {calls.pop()}" if len(calls) == 1 else ""
    waiting = f"; {rank_list(waiters)} {verb(waiters, 'is', 'are')} waiting for it{inside}" if waiters else ""
    whole, where = node_words(facts, lost), name_list(hosts_of_nodes(lost)) or "the node"
    quiet = seconds(max(job.time_ns - (node.heard_ns or job.time_ns) for node in lost))
    left = [node.status for node in lost if node.presence is Presence.LEFT]
    heard = f": no message from {'it' if len(lost) == 1 else 'them'} {quiet}".rstrip() if quiet else ""
    summary = f"{whole} died or {verb(range(len(lost)), 'was', 'were')} cut off{heard}{waiting}"
    fix = (
        f"check whether {where} is up (console, sinfo, kubectl get nodes), then its network: ip -s link show; "
        "nft list ruleset; dmesg"
    )
    if left:
        summary = f"{whole} exited with status {left[0]} before its ranks sent a report{waiting}"
    if all(_answers(job, node) for node in lost):
        summary = f"the job on {whole} is gone, but the host responds{waiting}"
        fix = f"find out what ended the job on {where}: check dmesg and the batch system's log for a SIGKILL"
    if cut_off:
        summary = f"this node ({facts.host}) is cut off: {name_list(hosts_of_nodes(others))} do not respond"
        fix = f"check the network of {facts.host}: ip -s link show; nft list ruleset; dmesg"
    finding = Problem(
        confidence=Confidence.MEDIUM if either else Confidence.HIGH,
        ranks=() if own else ranks_of(facts, lost, unseen),
        hosts=own or hosts_of_nodes(lost),
        summary=summary,
        evidence=(
            *seen,
            *reached_words(facts.reached),
            *say.classes(job, sorted(job.states)),
            *say.cascade_words(job.failures, ()),
        ),
        fix=fix,
        origin=FaultOrigin.NETWORK if cut_off else FaultOrigin.MACHINE,
    )
    # A node will not come back if it said that it left, or was silent for the whole hang timeout.
    gone = all(
        node.presence is Presence.LEFT or job.time_ns - (node.heard_ns or job.time_ns) >= job.timeout_ns
        for node in lost
    )
    return judged([finding], certain=job.stands_still(()) and not job.is_ending(), may_resume=not gone)


def _answers(job: JobState, node: NodeSeen) -> bool:
    return any(attempt.contact in _UP for attempt in attempts_at(job.facts.reached, node.host))


def _judge_launchers(job: JobState) -> Answer:
    """Report the nodes that the launcher waits for, so that no rank has started anywhere.

    What this node sees of them says why, if that can be known. If every node is here, the launchers look for each other
    in different places.
    """
    facts = job.facts
    if facts.now_ns - facts.launched_ns < facts.hang_timeout_s * 1e9:
        return unknown("the launcher has not waited for the whole --hang-timeout yet")
    waited = seconds(facts.now_ns - facts.launched_ns)
    if facts.members is None:
        return _judge_launcher_alone(facts, waited)
    absent = never_came(facts)
    if is_alone(facts) and facts.members.own != 0:  # only the first node would have reported the others
        absent = tuple(node for node in absent if node.number == 0)
    here, bad = facts.host or "this node", _first_failing(facts)
    why = (
        f"{here} cannot reach {bad.host}:{bad.port} ({_NOT_REACHED.get(bad.contact, bad.contact.value)})" if bad else ""
    )
    unresolved = bad is not None and bad.contact is Contact.UNRESOLVED
    own = (facts.host,) if unresolved and facts.host else ()
    if not absent:
        count = len(others_of(facts)) + 1
        summary = f"all {count} nodes are up, but their launchers have not completed the rendezvous {waited}".rstrip()
        elsewhere = [f"on {one.host}, {words}" for one in facts.elsewhere for words in reached_words(one.reached)]
        finding = Problem(
            confidence=Confidence.MEDIUM,
            hosts=own,
            summary=f"{summary}: {why}" if bad else summary,
            evidence=(*reached_words(facts.reached), *elsewhere),
            fix=reach_fix(bad, here)
            if bad is not None
            else f"give all nodes the same --rdzv-id, --rdzv-endpoint and --nnodes; {CHECK}",
        )
        return judged([finding], certain=True, may_resume=True)
    summary = f"{node_words(facts, absent)} never joined; the launcher on this node has waited {waited}".rstrip()
    gone = {node.number for node in never_came(facts)}
    came = [node.host or str(node.number) for node in facts.members.nodes if node.number not in gone]
    joined = [f"{len(came)} of {facts.members.expected} nodes joined: {name_list(came)}"] if came else []
    if is_alone(facts):
        joined = ["this node got no message from any other node; their own reports show what they see"]
    where = f" on {name_list(hosts_of_nodes(absent))}" if hosts_of_nodes(absent) else " there"
    finding = Problem(
        confidence=Confidence.MEDIUM if is_alone(facts) else Confidence.HIGH,
        ranks=ranks_of(facts, absent, ()),
        hosts=own or hosts_of_nodes(absent),
        summary=f"{why}: {summary}" if is_alone(facts) and bad is not None else summary,
        evidence=(
            *(f"{node_words(facts, (node,))}: {node.why}" for node in absent if node.why),
            *reached_words(facts.reached),
            *joined,
        ),
        fix=reach_fix(bad, here)
        if is_alone(facts) and bad is not None
        else f"check that the job was started{where} with the same endpoint, id and number of nodes; {CHECK}",
    )
    return judged([finding], certain=True, may_resume=True)


def _judge_launcher_alone(facts: Job, waited: str) -> Answer:
    """Report that this node's launcher waits for other nodes, which the node itself cannot see."""
    if facts.node_rank is None or not facts.local_ranks_expected or facts.world_size is None:
        return unknown("the ranks of this node are unknown")
    first = facts.node_rank * facts.local_ranks_expected
    here = range(first, first + facts.local_ranks_expected)
    elsewhere = tuple(n for n in range(facts.world_size) if n not in here)
    finding = Problem(
        confidence=Confidence.LOW,
        ranks=elsewhere,
        summary=f"the launcher of node {facts.node_rank} is waiting for other nodes: no rank has started {waited}",
        evidence=(
            f"the job has {facts.nnodes} nodes; {rank_list(elsewhere)} on the other nodes cannot be seen from here",
            *reached_words(facts.reached),
        ),
        fix=f"check that the other nodes were started and can reach this node's --rdzv-endpoint; {CHECK}",
    )
    return judged([finding])


@rule("DD606", "stopped", Severity.ERROR, "The process of a rank is frozen")
@asked_if(Cause.HANG, Cause.NONE, Cause.CONFLICT)
def check_stopped(job: JobState) -> Answer:
    """Report a process that is frozen: by SIGSTOP, by a debugger, or in the kernel."""
    frozen = tuple(n for n in job.living if job.states[n].doing is Activity.STOPPED)
    if not frozen:
        return passed()
    blamed = tuple(n for n in frozen if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(frozen)} made progress just now")
    if not job.waits.waiters and not set(job.living) <= job.quiet:
        return unknown(f"{rank_list(frozen)} {verb(frozen, 'is', 'are')} stopped, but no rank is waiting yet")
    ranks = [job.rank(n) for n in blamed]
    where = tuple(place for rank in ranks for place in places_held_up(rank, waits_for_child=False)[:1])
    traced = [rank.traced_by for rank in ranks if rank.traced_by]
    asleep = any(rank.proc_state == "D" for rank in ranks)
    how = f"held by a debugger (process {traced[0]})" if traced else f"stopped (state {ranks[0].proc_state})"
    waiters = say.waiters_words(job, blamed)
    clues = {n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]} if asleep else {}
    by_host = [(f"on {host}: ", [rank for rank in ranks if rank.host == host]) for host in say.hosts_of(job, blamed)]
    kills = (f"{on}kill -CONT {' '.join(str(rank.pid) for rank in those)}" for on, those in by_host or [("", ranks)])
    fix = "check dmesg, and the device or file system that it reads" if asleep else "; ".join(kills)
    if traced:
        fix = "detach the debugger, or continue the process in it"
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
        fix=fix_of((clue for found in clues.values() for clue in found), fix),
    )
    # It lasts if they have been stopped for the whole hang timeout and no debugger can continue them. Sleep in the
    # kernel (D) does not count: it ends when the device or the file server answers, however late.
    since_ns = [rank.frozen_since_ns for rank in ranks if rank.proc_state == "T" and not rank.traced_by]
    stopped = [since for since in since_ns if since is not None and job.time_ns - since >= job.timeout_ns]
    lasting = job.waits.waiters and len(stopped) == len(ranks)
    return judged([finding], certain=job.stands_still(blamed), may_resume=not lasting)


@rule("DD607", "missing", Severity.ERROR, "A rank or node never joined")
@asked_if(Cause.HANG, Cause.NONE)
def check_missing(job: JobState) -> Answer:
    """Report ranks that have no process while others wait for them."""
    if job.cause is Cause.NONE and not job.states and (job.facts.nnodes > 1 or job.facts.members is not None):
        return _judge_launchers(job)
    absent = job.waits.absent
    in_init = any(state.doing is Activity.INIT for state in job.states.values())
    if not absent or (not job.sees_all and not in_init):
        return passed()
    if not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
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
    bad = _first_failing(job.facts)
    if bad is not None:
        return reach_fix(bad, job.facts.host or "this node")
    return f"check that the other nodes were started with the same endpoint and number of nodes; {CHECK}"
