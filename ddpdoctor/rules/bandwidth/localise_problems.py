"""The findings for a slow rank, link or node: whom it concerns, what was seen, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.bandwidth.localise_late import LATE_US
from ddpdoctor.rules.bandwidth.localise_words import say_amount, say_evidence, say_time

if TYPE_CHECKING:
    from collections.abc import Collection

    from ddpdoctor.model.bandwidth import Bench, NodeResult, Pair
    from ddpdoctor.rules.bandwidth.localise_edges import Slow
    from ddpdoctor.rules.bandwidth.localise_who import SlowNode
    from ddpdoctor.rules.bandwidth.measured import Measured

AT_ONCE = "several ran at once, so that they may have slowed each other"
FIX_RANK = (
    "compare its GPU, its PCIe link and its processor with those of the others (`ddpdoctor check-env`, "
    "`nvidia-smi topo -m`, `nvidia-smi -q -d PERFORMANCE`), and look for other processes on its cores (`top`)"
)
FIX_LINK = (
    "within a machine look at the link between the two GPUs (`nvidia-smi topo -m`, `nvidia-smi nvlink -s`); between "
    "machines at cable, switch port and route (`ip route get`, `ethtool`, `ibstat`, `ibdiagnet`)"
)
FIX_NODE = (
    "look at its network card and switch port: rate, errors, a shaper (`ethtool`, `ip -s link`, `tc qdisc`, `ibstat`); "
    "then compare the machine with another (`ddpdoctor check-env` under the job's launcher); until it is mended, leave "
    "it out of the job"
)
FIX_INSIDE = (
    "compare the machine with another (`ddpdoctor check-env` under the job's launcher), and see which of its ranks is "
    "slow (`ddpdoctor allreduce-bench --pairs`)"
)


def slow_rank(slow: Slow[int], measured: Measured) -> Problem:
    """Report that a rank is slow with every other rank."""
    rank = slow.ends[0]
    host = _host(measured.bench, rank)
    alone = sum(member.host == host for member in measured.bench.members) == 1
    return Problem(
        summary=f"rank {rank} on {host} is slow with every other rank: {say_amount(slow.slowness[0])}",
        evidence=(
            *say_evidence(slow.slowness, f"the pairs of rank {rank}"),
            *_late_in_pairs(rank, measured.bench),
            *((f"it is the only rank on {host}, so that it cannot be told from the host's network",) if alone else ()),
            *_reasons(measured, {rank}, {host}),
            *_how(measured.bench.pairs),
        ),
        fix=FIX_RANK,
        confidence=_confidence(measured.bench.pairs),
        ranks=(rank,),
        hosts=(host,),
    )


def slow_link(link: Slow[int], measured: Measured) -> Problem:
    """Report that two ranks are slow with each other only."""
    first, last = sorted(link.ends)
    hosts = tuple(dict.fromkeys(_host(measured.bench, rank) for rank in (first, last)))
    return Problem(
        summary=f"ranks {first} and {last} ({', '.join(hosts)}) are slow with each other, and not with the other "
        f"ranks: {say_amount(link.slowness[0])}",
        evidence=(
            *say_evidence(link.slowness, f"ranks {first} and {last}"),
            *_reasons(measured, {first, last}, set()),
            *_how(measured.bench.pairs),
        ),
        fix=FIX_LINK,
        confidence=_confidence(measured.bench.pairs),
        ranks=(first, last),
        hosts=hosts,
    )


def slow_node_link(link: Slow[str], measured: Measured) -> Problem:
    """Report that two nodes are slow with each other only."""
    first, last = sorted(link.ends)
    return Problem(
        summary=f"nodes {first} and {last} are slow with each other, and not with the other nodes: "
        f"{say_amount(link.slowness[0])}",
        evidence=(
            *say_evidence(link.slowness, f"nodes {first} and {last}"),
            *_how(measured.bench.nodes or measured.bench.pairs),
        ),
        fix=FIX_LINK,
        confidence=_confidence(measured.bench.nodes or measured.bench.pairs),
        ranks=_ranks(measured.bench, {first, last}),
        hosts=(first, last),
    )


def slow_node(node: SlowNode, measured: Measured) -> Problem:
    """Report that a node is slow with the others, or inside."""
    where = "its ranks are slow among themselves" if node.inside else "it is slow with every other node"
    whose = f"the ranks of {node.host}" if node.inside else f"the pairs of {node.host}"
    return Problem(
        summary=f"node {node.host}: {where}: {say_amount(node.slowness[0])}",
        evidence=(
            *say_evidence(node.slowness, whose),
            *_reasons(measured, set(), {node.host}),
            *_how(measured.bench.nodes or measured.bench.pairs),
        ),
        fix=FIX_INSIDE if node.inside else FIX_NODE,
        confidence=_confidence(measured.bench.nodes or measured.bench.pairs),
        ranks=_ranks(measured.bench, {node.host}),
        hosts=(node.host,),
    )


def _late_in_pairs(rank: int, bench: Bench) -> tuple[str, ...]:
    late = [
        late_us for pair in bench.pairs for end, late_us in zip(pair.ranks, pair.late_us, strict=True) if end == rank
    ]
    if min(late, default=0.0) < LATE_US:
        return ()
    return (f"it comes to the calls of its pairs at least {say_time(min(late))} after the other rank",)


def _reasons(measured: Measured, ranks: Collection[int], hosts: Collection[str]) -> tuple[str, ...]:
    """Return what was found on exactly these ranks, or on these hosts if the bench has others."""
    every = {member.host for member in measured.bench.members}
    return tuple(
        f"{reason.text} ({reason.source})"
        for reason in measured.reasons
        if (reason.ranks and set(reason.ranks) <= set(ranks))
        or (not reason.ranks and reason.hosts and set(reason.hosts) <= set(hosts) < every)
    )


def _host(bench: Bench, rank: int) -> str:
    return next(member.host for member in bench.members if member.rank == rank)


def _ranks(bench: Bench, hosts: Collection[str]) -> tuple[int, ...]:
    return tuple(sorted(member.rank for member in bench.members if member.host in hosts))


def _how(results: Collection[Pair | NodeResult]) -> tuple[str, ...]:
    return () if all(result.alone for result in results) else (AT_ONCE,)


def _confidence(results: Collection[Pair | NodeResult]) -> Confidence:
    return Confidence.HIGH if all(result.alone for result in results) else Confidence.MEDIUM
