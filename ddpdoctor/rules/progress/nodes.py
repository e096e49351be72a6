"""The nodes of a job as the rules see them: which never came, which were lost, and whether this node can reach them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Life, Presence
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.words import name_list, rank_list
from ddpdoctor.rules.firewall_opening import EPHEMERAL
from ddpdoctor.rules.rendezvous.meeting import describe

from ddpdoctor.rules.progress.groups import world_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import HostCauses, Job, NodeSeen, Rank
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.reaching import Connecting


BEATS_NS = 5_000_000_000
"""Our choice: a living node is heard from once a second, or up to this much later if it is crowded."""


def others_of(facts: Job) -> tuple[NodeSeen, ...]:
    """Return all members but the one whose view this is."""
    members = facts.members
    return tuple(node for node in members.nodes if node.number != members.own) if members is not None else ()


def have_met(facts: Job) -> bool:
    """Return whether all nodes have surely come, even if some were never heard from.

    A launcher that joins nodes starts no rank before that, and ``init_process_group`` returns on no rank before that.
    """
    by_launcher = facts.members is not None and not facts.members.of_ranks
    return any(rank.initialized for rank in facts.ranks) or (by_launcher and bool(facts.ranks))


def never_came(facts: Job) -> tuple[NodeSeen, ...]:
    """Return the members that have not come, or none if all nodes have met: then a silent one was only not seen."""
    if have_met(facts):
        return ()
    return tuple(node for node in others_of(facts) if node.presence is Presence.ABSENT)


def lost_nodes(facts: Job, time_ns: int) -> tuple[NodeSeen, ...]:
    """Return the members that went silent, or left with an error without sending what their ranks did.

    A node that was lost before the ranks of this attempt began does not count, unless its ranks are still missing.
    If it is not known which ranks it has, any missing rank may be one of them.
    """
    began_ns = min((rank.started_ns for rank in facts.ranks if rank.started_ns is not None), default=0) - BEATS_NS
    missing = set(range(world_of(facts))) - {rank.rank for rank in facts.ranks}

    def is_waited_for(node: NodeSeen) -> bool:
        return bool(missing & set(node.ranks) if node.ranks else missing)

    def has_part(node: NodeSeen) -> bool:
        heard_ns = node.heard_ns or 0
        return heard_ns <= time_ns and (began_ns <= heard_ns or is_waited_for(node))

    def is_overdue(node: NodeSeen) -> bool:
        """Return whether a node that has ranks to start sends nothing, though it is not given up yet."""
        late = node.heard_ns is not None and node.heard_ns + BEATS_NS < time_ns
        return node.presence is Presence.HERE and late and not node.gathered and bool(missing & set(node.ranks))

    return tuple(node for node in others_of(facts) if is_overdue(node) or (_is_lost(node) and has_part(node)))


def _is_lost(node: NodeSeen) -> bool:
    if node.presence is Presence.SILENT:
        return True
    return node.presence is Presence.LEFT and not node.gathered and node.status not in (0, None)


def is_alone(facts: Job) -> bool:
    """Return whether this is the view of one node that hears nothing from any other."""
    return facts.members is not None and facts.members.alone_since_ns is not None


def are_all_reported(facts: Job) -> bool:
    """Return whether every member's ranks are among the facts, or cannot exist because the member never came."""
    gone = {node.number for node in never_came(facts)}
    return not is_alone(facts) and all(node.gathered or node.number in gone for node in others_of(facts))


def without_stale(facts: Job, lost: Iterable[NodeSeen]) -> Job:
    """Return a job without the ranks that were last seen alive on nodes that were lost since."""
    lost = tuple(lost)
    reported = {number for node in lost for number in _reported_ranks(facts, node)}
    hosts = {node.host for node in lost if not _reported_ranks(facts, node)}

    def is_stale(rank: Rank) -> bool:
        return rank.life is Life.RUNNING and (rank.rank in reported or rank.host in hosts)

    return replace(facts, ranks=tuple(rank for rank in facts.ranks if not is_stale(rank))) if lost else facts


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


CHECK = "run `ddpdoctor check-rendezvous` on every node to see which nodes cannot connect"


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
