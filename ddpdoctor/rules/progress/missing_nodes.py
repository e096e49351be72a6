"""DD607 for a whole node: it never came, or the launchers are all there but do not find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.rank_words import name_list, rank_list
from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.answers import Answer, Problem, judged, unknown

from .nodes import (
    CHECK,
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
from .words import seconds

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.nodes import NodeSeen

    from .scene import Scene


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
