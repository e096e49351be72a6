"""DD605 and DD607 for a whole node: it died or was cut off, it never came, or the launchers do not find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.nodes import Presence
from ddpdoctor.model.rank_words import name_list, rank_list
from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.answers import Answer, Problem, judged, unknown

from . import evidence as say
from .nodes import (
    CHECK,
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
from .scene import Scene, moment, timeout_ns, was_left_running
from .words import seconds, verb

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.nodes import NodeSeen

_UP = frozenset({Contact.CONNECTED, Contact.REFUSED, Contact.RESET, Contact.NO_STORE})
"""Answers that only a running and reachable host can give."""


def judge_lost(scene: Scene) -> Answer:
    """Report the nodes that went silent, if the remaining ranks cannot go on without them."""
    if was_left_running(scene.job, scene.failures) and not _stands(scene):
        return unknown("the ranks that are left have not waited for the hang timeout yet")
    lost = _blamed(scene)
    cut_off = _is_cut_off(scene)
    own = (scene.job.host,) if cut_off and scene.job.host else ()
    unseen = set(range(scene.world)) - set(scene.states)
    finding = Problem(
        confidence=_confidence(scene, cut_off=cut_off),
        ranks=() if own else ranks_of(scene.job, lost, unseen),
        hosts=own or hosts_of_nodes(lost),
        summary=_summary(scene, lost, cut_off=cut_off),
        evidence=(
            *(sentence for node in lost for sentence in _seen_words(scene, node)),
            *reached_words(scene.job.reached),
            *say.classes(scene, sorted(scene.states)),
            *say.cascade_words(scene.failures, ()),
        ),
        fix=_fix(scene, lost, cut_off=cut_off),
    )
    certain = scene.stands_still(()) and not scene.is_ending()
    return judged([finding], certain=certain, may_resume=not all(_is_gone(scene, node) for node in lost))


def _is_gone(scene: Scene, node: NodeSeen) -> bool:
    """Return whether a node will not come back: it said that it left, or was silent for the whole hang timeout."""
    silent_ns = moment(scene.job) - (node.heard_ns or moment(scene.job))
    return node.presence is Presence.LEFT or silent_ns >= timeout_ns(scene.job)


def _stands(scene: Scene) -> bool:
    """Return whether the rest has made no progress for the hang timeout; without ranks, whether none has started."""
    if not scene.states:
        return scene.job.now_ns - scene.job.launched_ns >= timeout_ns(scene.job)
    return scene.waited_long() and set(scene.living) <= scene.quiet


def _blamed(scene: Scene) -> tuple[NodeSeen, ...]:
    """Return the lost nodes that do not answer, or all of them if all answer or none was tried.

    A member that hears nothing from the first node also hears nothing about the nodes that only the first reported on.
    """
    silent = tuple(node for node in scene.lost if not _answers(scene, node))
    return silent if is_alone(scene.job) and silent else scene.lost


def _answers(scene: Scene, node: NodeSeen) -> bool:
    return any(attempt.contact in _UP for attempt in attempts_at(scene.job.reached, node.host))


def _is_cut_off(scene: Scene) -> bool:
    """Return whether this node itself is cut off: it tried several others, and none answers."""
    others = others_of(scene.job)
    tried = [attempts_at(scene.job.reached, node.host) for node in others]
    hosts = {node.host for node in others}
    return is_alone(scene.job) and len(hosts) > 1 and all(tried) and not any(_answers(scene, n) for n in others)


def _confidence(scene: Scene, *, cut_off: bool) -> Confidence:
    if is_alone(scene.job) and not cut_off:
        return Confidence.MEDIUM  # with only one other node, either may be the one that is cut off
    return Confidence.HIGH


def _summary(scene: Scene, lost: tuple[NodeSeen, ...], *, cut_off: bool) -> str:
    waiters = scene.waits.waiters
    waiting = f", and {rank_list(waiters)} {verb(waiters, 'waits', 'wait')}{_where(scene)} in vain" if waiters else ""
    if cut_off:
        hosts = name_list(hosts_of_nodes(others_of(scene.job)))
        return f"this node ({scene.job.host}) is cut off from {hosts}: none of them answers"
    who = node_words(scene.job, lost)
    silent = seconds(max(moment(scene.job) - (node.heard_ns or moment(scene.job)) for node in lost))
    if all(_answers(scene, node) for node in lost):
        return f"the job on {who} is gone, though the host answers{waiting}"
    left = [node.status for node in lost if node.presence is Presence.LEFT]
    if left:
        return f"{who} ended with status {left[0]}, and what its ranks did was not told{waiting}"
    heard = f": nothing was heard of {'it' if len(lost) == 1 else 'them'} {silent}".rstrip() if silent else ""
    return f"{who} died or {verb(range(len(lost)), 'was', 'were')} cut off{heard}{waiting}"


def _where(scene: Scene) -> str:
    calls = {state.call.op for n in scene.waits.waiters if (state := scene.states[n]).call is not None}
    return f" in {calls.pop()}" if len(calls) == 1 else ""


def _seen_words(scene: Scene, node: NodeSeen) -> list[str]:
    who = node_words(scene.job, (node,))
    found = [f"{who}: {node.why}"] if node.why else []
    unseen = set(range(scene.world)) - set(scene.states)
    ranks = ranks_of(scene.job, (node,), ()) if node.ranks else tuple(sorted(unseen))
    if ranks and (node.ranks or len(scene.lost) == 1):
        found.append(f"{who} has {rank_list(ranks)}")
    return found


def _fix(scene: Scene, lost: tuple[NodeSeen, ...], *, cut_off: bool) -> str:
    if cut_off:
        return f"look at the network of {scene.job.host}: ip -s link show; nft list ruleset; dmesg"
    where = name_list(hosts_of_nodes(lost)) if hosts_of_nodes(lost) else "the node"
    if all(_answers(scene, node) for node in lost):
        return f"find out on {where} what ended the job there: dmesg, the batch system's log, who sent a SIGKILL"
    return (
        f"look whether {where} runs (its console, sinfo, kubectl get nodes), then at its network: ip -s link show; "
        "nft list ruleset; dmesg"
    )


def judge_missing_nodes(scene: Scene) -> Answer:
    """Report the nodes that the launcher waits for, so that no rank has started anywhere."""
    job = scene.job
    if job.now_ns - job.launched_ns < job.hang_timeout_s * 1e9:
        return unknown("the launcher has not waited for the hang timeout yet")
    if job.members is None:
        return _unseen_nodes(scene)
    absent = never_came(job)
    if is_alone(job) and job.members.own != 0:  # only the first node would have reported the others
        absent = tuple(node for node in absent if node.number == 0)
    finding = _absent(job, absent) if absent else _apart(job)
    return judged([finding], certain=True, may_resume=True)


def _absent(job: Job, absent: tuple[NodeSeen, ...]) -> Problem:
    """Report members that were never heard from. What this node sees of them says why, if that can be known."""
    bad = failing(job.reached)
    who = node_words(job, absent)
    unresolved = bad is not None and bad.contact is Contact.UNRESOLVED
    hosts = (job.host,) if unresolved and job.host else hosts_of_nodes(absent)
    said = f"{who} never came, and the launcher here waits {_waited(job)}".rstrip()
    if is_alone(job) and bad is not None:
        said = f"{job.host or 'this node'} cannot reach {bad.host}:{bad.port} ({_short(bad.contact)}): " + said
    return Problem(
        confidence=Confidence.MEDIUM if is_alone(job) else Confidence.HIGH,
        ranks=ranks_of(job, absent, ()),
        hosts=hosts,
        summary=said,
        evidence=(
            *(f"{node_words(job, (node,))}: {node.why}" for node in absent if node.why),
            *reached_words(job.reached),
            *_here_words(job),
        ),
        fix=_absent_fix(job, absent),
    )


def _waited(job: Job) -> str:
    return seconds(job.now_ns - job.launched_ns)


def _short(contact: Contact) -> str:
    return {
        Contact.UNRESOLVED: "the name does not resolve here",
        Contact.NO_ANSWER: "no answer",
        Contact.NO_STORE: "another program answers",
    }.get(contact, contact.value)


def _here_words(job: Job) -> list[str]:
    """Return which nodes have come, of those that were reported here."""
    assert job.members is not None
    if is_alone(job):
        return ["nothing was heard of any other node: what the others see, their own reports say"]
    gone = {node.number for node in never_came(job)}
    here = [node for node in job.members.nodes if node.number not in gone]
    hosts = [node.host or str(node.number) for node in here]
    return [f"{len(here)} of {job.members.expected} nodes came: {name_list(hosts)}"] if here else []


def _absent_fix(job: Job, absent: tuple[NodeSeen, ...]) -> str:
    bad = failing(job.reached)
    if is_alone(job) and bad is not None:
        return reach_fix(bad, job.host or "this node")
    hosts = hosts_of_nodes(absent)
    where = f" on {name_list(hosts)}" if hosts else " there"
    return f"see whether the job was started{where}, with the same endpoint, id and number of nodes; {CHECK}"


def _apart(job: Job) -> Problem:
    """Report launchers that wait although every node is here: they look for each other in different places."""
    others = others_of(job)
    bad = failing(job.reached)
    place = f": {job.host or 'this node'} cannot reach {bad.host}:{bad.port} ({_short(bad.contact)})" if bad else ""
    return Problem(
        confidence=Confidence.MEDIUM,
        hosts=(job.host,) if bad is not None and bad.contact is Contact.UNRESOLVED and job.host else (),
        summary=f"all {len(others) + 1} nodes are here, and their launchers have not come together "
        f"{_waited(job)}".rstrip()
        + place,
        evidence=(*reached_words(job.reached), *_elsewhere_words(job)),
        fix=reach_fix(bad, job.host or "this node")
        if bad is not None
        else f"give all nodes the same --rdzv-id, --rdzv-endpoint and --nnodes; {CHECK}",
    )


def _elsewhere_words(job: Job) -> list[str]:
    """Return what the other nodes saw of the launchers' rendezvous endpoint."""
    return [f"on {seen.host}, {sentence}" for seen in job.elsewhere for sentence in reached_words(seen.reached)]


def _unseen_nodes(scene: Scene) -> Answer:
    """Report that this node's launcher waits for other nodes, which the node itself cannot see."""
    job = scene.job
    if job.node_rank is None or not job.local_ranks_expected or job.world_size is None:
        return unknown("which ranks this node should have is not known")
    first = job.node_rank * job.local_ranks_expected
    here = range(first, first + job.local_ranks_expected)
    elsewhere = tuple(n for n in range(job.world_size) if n not in here)
    finding = Problem(
        confidence=Confidence.LOW,
        ranks=elsewhere,
        summary=f"the launcher of node {job.node_rank} waits for other nodes: no rank has started {_waited(job)}",
        evidence=(
            f"{job.nnodes} nodes were asked for; their {rank_list(elsewhere)} cannot be seen from here",
            *reached_words(job.reached),
        ),
        fix=f"see whether the other nodes were started, and whether they reach this node's --rdzv-endpoint; {CHECK}",
    )
    return judged([finding])
