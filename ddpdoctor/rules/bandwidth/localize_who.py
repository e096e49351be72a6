"""The ranks, links and nodes that --pairs and --by-node show to be slow, each named once."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.bandwidth import describe_shared_gpus
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.bandwidth.localize_edges import (
    Edge,
    Slow,
    SlowEdges,
    Slowness,
    Turns,
    can_judge,
    compare,
    find_slow,
    make_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.model.bandwidth import Bench, NodeResult, Pair

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A host that is slow with the others, or whose own ranks are slow among themselves."""

    host: str
    slowness: tuple[Slowness, ...]
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowParts:
    """All that is slow."""

    ranks: tuple[Slow[int], ...] = ()
    links: tuple[Slow[int], ...] = ()
    """Slow links between ranks."""
    nodes: tuple[SlowNode, ...] = ()
    node_links: tuple[Slow[str], ...] = ()
    wiring: int = 0
    """The number of pairs that are slower than others because of how the machines are wired."""
    pairs_judged: bool = False
    """Whether there was enough to compare."""
    nodes_judged: bool = False


def find_who(bench: Bench) -> SlowParts:
    """Judge pairs and nodes together, and name once what both show.

    A slow rank slows its whole node, so the node is not named too. A rank that is alone on its host cannot be
    distinguished from the host: the node is named if nodes were measured. Ranks that share a GPU wait for each other,
    so none of them is named.
    """
    if describe_shared_gpus(bench.members):
        return SlowParts()
    pairs, nodes = _judge_pairs(bench.pairs), _judge_nodes(bench.nodes)
    ranks_on = Counter(member.host for member in bench.members)
    host_of = {member.rank: member.host for member in bench.members}
    of_nodes = {node.host for node in nodes.nodes}
    linked = {frozenset(link.ends) for link in nodes.node_links}
    ranks = [
        slow for slow in pairs.ranks if ranks_on[host_of[slow.ends[0]]] > 1 or host_of[slow.ends[0]] not in of_nodes
    ]
    blamed = {host_of[slow.ends[0]] for slow in ranks}
    return SlowParts(
        ranks=tuple(ranks),
        links=tuple(link for link in pairs.links if frozenset(host_of[rank] for rank in link.ends) not in linked),
        nodes=tuple(
            node for node in _once((*nodes.nodes, *pairs.nodes), lambda node: node.host) if node.host not in blamed
        ),
        node_links=(*nodes.node_links, *(link for link in pairs.node_links if frozenset(link.ends) not in linked)),
        wiring=pairs.wiring + nodes.wiring,
        pairs_judged=pairs.pairs_judged,
        nodes_judged=nodes.nodes_judged,
    )


def _judge_pairs(pairs: Sequence[Pair]) -> SlowParts:
    """Compare pairs inside a host with pairs of the same host, and pairs between hosts with each other."""
    inside = grouped((pair.hosts[0], pair) for pair in pairs if pair.hosts[0] == pair.hosts[1])
    across = [pair for pair in pairs if pair.hosts[0] != pair.hosts[1]]
    between = _judge_hosts(across)
    slow_hosts = {slow.ends[0] for slow in between.ends}
    slow_links = {frozenset(slow.ends) for slow in between.edges}
    # Pairs that a slow host or a slow link between two hosts explains do not count against single ranks.
    left = [pair for pair in across if not slow_hosts & set(pair.hosts) and frozenset(pair.hosts) not in slow_links]
    kinds = [[Edge(ends=pair.ranks, series=_series(pair)) for pair in kind] for kind in (*inside.values(), left)]
    found = [find_slow(kind) for kind in kinds]
    return SlowParts(
        ranks=_once((slow for one in found for slow in one.ends), lambda slow: slow.ends[0]),
        links=tuple(slow for one in found for slow in one.edges),
        nodes=tuple(SlowNode(host=slow.ends[0], slowness=slow.slowness, inside=False) for slow in between.ends),
        node_links=between.edges,
        wiring=between.wiring + sum(one.wiring for one in found),
        pairs_judged=any(map(can_judge, kinds)) or bool(slow_hosts),
    )


def _series(result: Pair | NodeResult) -> Turns:
    return Turns(busbws_gb_s=result.busbws_gb_s, latencies_us=result.latencies_us)


def _judge_hosts(across: Sequence[Pair]) -> SlowEdges[str]:
    """Judge hosts by the median of the pairs between them. If each host has one rank, ranks are judged instead."""
    between = grouped(((min(pair.hosts), max(pair.hosts)), pair) for pair in across)
    if all(len(pairs) == 1 for pairs in between.values()):
        return SlowEdges()
    return find_slow(Edge(ends=hosts, series=_middle(pairs)) for hosts, pairs in between.items())


def _middle(pairs: Sequence[Pair]) -> Turns:
    return Turns(
        busbws_gb_s=tuple(map(statistics.median, zip(*(pair.busbws_gb_s for pair in pairs), strict=False))),
        latencies_us=tuple(map(statistics.median, zip(*(pair.latencies_us for pair in pairs), strict=False))),
    )


def _judge_nodes(nodes: Sequence[NodeResult]) -> SlowParts:
    edges = [Edge(ends=(node.host, node.peer), series=_series(node)) for node in nodes if node.peer is not None]
    found = find_slow(edges)
    inside = _judge_inside([node for node in nodes if node.peer is None])
    outside = tuple(SlowNode(host=slow.ends[0], slowness=slow.slowness, inside=False) for slow in found.ends)
    return SlowParts(
        nodes=_once((*inside, *outside), lambda node: node.host),
        node_links=found.edges,
        wiring=found.wiring,
        nodes_judged=can_judge(edges) or bool(inside),
    )


def _judge_inside(alone: Sequence[NodeResult]) -> tuple[SlowNode, ...]:
    """Compare what nodes with the same number of ranks reach by themselves."""
    found = []
    for node in alone:
        others = [other for other in alone if other is not node and len(other.ranks) == len(node.ranks)]
        # With only one other node, either may be to blame.
        if len(others) >= 2:
            beside = [_series(other) for other in others]
            slowness = compare([_series(node)], beside, make_rows([_series(node), *beside]))
            if slowness:
                found.append(SlowNode(host=node.host, slowness=slowness, inside=True))
    return tuple(found)


def _once(found: Iterable[_Found], key: Callable[[_Found], object]) -> tuple[_Found, ...]:
    """Keep the first entry for a rank or host: it may be slow both inside its host and with other hosts."""
    first: dict[object, _Found] = {}
    for one in found:
        first.setdefault(key(one), one)
    return tuple(first.values())
