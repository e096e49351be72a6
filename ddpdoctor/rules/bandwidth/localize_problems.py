"""The findings for a slow rank, link or node, and for a rank that comes late to the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Mode
from ddpdoctor.model.findings import Confidence
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.bandwidth.localize_edges import Measure

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddpdoctor.model.bandwidth import Arrival, Bench, NodeResult, Pair
    from ddpdoctor.rules.bandwidth.curve import Measured
    from ddpdoctor.rules.bandwidth.localize_edges import Slow, Slowness
    from ddpdoctor.rules.bandwidth.localize_who import SlowNode

AT_ONCE = "several ran at once, so they may have slowed each other"
FIX_RANK = (
    "compare its GPU, PCIe link and CPU with those of the others (`ddpdoctor check-env`, "
    "`nvidia-smi topo -m`, `nvidia-smi -q -d PERFORMANCE`), and look for other processes on its cores (`top`)"
)
FIX_LINK = (
    "within a host, check the link between the two GPUs (`nvidia-smi topo -m`, `nvidia-smi nvlink -s`); between hosts, "
    "check the cable, switch port and route (`ip route get`, `ethtool`, `ibstat`, `ibdiagnet`)"
)
FIX_NODE = (
    "check its network card and switch port: rate, errors, traffic shaping (`ethtool`, `ip -s link`, `tc qdisc`, "
    "`ibstat`); then compare the host with another (`ddpdoctor check-env` under the job's launcher); exclude it from "
    "the job until it is fixed"
)
FIX_INSIDE = (
    "compare the host with another (`ddpdoctor check-env` under the job's launcher), and find its slow rank "
    "(`ddpdoctor allreduce-bench --pairs`)"
)
LATE_US = 2000.0
"""Our choice: on two busy cores, two ranks arrive some hundred microseconds apart at the median. Over a fast network,
even DDP's largest bucket takes less than this, so waiting this long doubles the time."""
RELATIVE = 2.0
"""Our choice: it must also be this many times the time of a small call, which is long itself if cores are shared."""
SHARE = 0.8
"""The share of calls in which it must come last; the same share as of steps for a straggler in training (DD610)."""
LEAST_CALLS = 20
"""The least number of calls, as for a straggler: fewer are chance."""
NARROW = "small messages do not take twice as long as usual: the bandwidth is low, and the CPU is not slow"
SLOW_TO_ANSWER = "its latency is high, not its transfer time: check its CPU core before its links"


def slow_rank(slow: Slow[int], measured: Measured) -> Problem:
    """Report that a rank is slow with every other rank."""
    bench, rank = measured.bench, slow.ends[0]
    host = _host(bench, rank)
    evidence = [*say_evidence(slow.slowness, f"the pairs of rank {rank}"), *_late_in_pairs(rank, bench)]
    if sum(member.host == host for member in bench.members) == 1:
        evidence.append(f"it is the only rank on {host}, so it cannot be distinguished from the host's network")
    evidence += _reasons(measured, {rank}, {host})
    summary = f"rank {rank} on {host} is slow with every other rank: {say_amount(slow.slowness[0])}"
    return _problem(summary, evidence, bench.pairs, fix=FIX_RANK, ranks=(rank,), hosts=(host,))


def slow_link(link: Slow[int], measured: Measured) -> Problem:
    """Report that two ranks are slow with each other only."""
    first, last = ranks = tuple(sorted(link.ends))
    hosts = tuple(dict.fromkeys(_host(measured.bench, rank) for rank in ranks))
    evidence = [*say_evidence(link.slowness, f"ranks {first} and {last}"), *_reasons(measured, ranks, ())]
    summary = (
        f"ranks {first} and {last} ({', '.join(hosts)}) are slow only with each other: {say_amount(link.slowness[0])}"
    )
    return _problem(summary, evidence, measured.bench.pairs, fix=FIX_LINK, ranks=ranks, hosts=hosts)


def slow_node_link(link: Slow[str], measured: Measured) -> Problem:
    """Report that two nodes are slow with each other only."""
    bench = measured.bench
    first, last = hosts = tuple(sorted(link.ends))
    evidence = say_evidence(link.slowness, f"nodes {first} and {last}")
    amount = say_amount(link.slowness[0])
    summary = f"nodes {first} and {last} are slow only with each other: {amount}"
    ranks = _ranks(bench, hosts)
    return _problem(summary, evidence, bench.nodes or bench.pairs, fix=FIX_LINK, ranks=ranks, hosts=hosts)


def slow_node(node: SlowNode, measured: Measured) -> Problem:
    """Report that a node is slow with the others, or inside."""
    bench, host = measured.bench, node.host
    where = "its ranks are slow among themselves" if node.inside else "it is slow with every other node"
    whose = f"the ranks of {host}" if node.inside else f"the pairs of {host}"
    evidence = [*say_evidence(node.slowness, whose), *_reasons(measured, (), {host})]
    summary = f"node {host}: {where}: {say_amount(node.slowness[0])}"
    fix, ranks = FIX_INSIDE if node.inside else FIX_NODE, _ranks(bench, {host})
    return _problem(summary, evidence, bench.nodes or bench.pairs, fix=fix, ranks=ranks, hosts=(host,))


def _problem(
    summary: str,
    evidence: Sequence[str],
    results: Sequence[Pair | NodeResult],
    *,
    fix: str,
    ranks: tuple[int, ...],
    hosts: tuple[str, ...],
) -> Problem:
    alone = all(result.alone for result in results)
    return Problem(
        summary=summary,
        evidence=(*evidence, *(() if alone else (AT_ONCE,))),
        fix=fix,
        confidence=Confidence.HIGH if alone else Confidence.MEDIUM,
        ranks=ranks,
        hosts=hosts,
    )


def _late_in_pairs(rank: int, bench: Bench) -> tuple[str, ...]:
    late = [
        late_us for pair in bench.pairs for end, late_us in zip(pair.ranks, pair.late_us, strict=True) if end == rank
    ]
    if min(late, default=0.0) < LATE_US:
        return ()
    return (f"in its pairs, it calls at least {say_time(min(late))} after the other rank",)


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


def find_late(bench: Bench) -> Arrival | None:
    """Return the rank that comes late, if any. Only one rank can be last in most calls."""
    times = [result.p50_us for result in bench.results if result.mode is Mode.LATENCY]
    least = max(LATE_US, RELATIVE * min(times, default=0.0))
    late = (one for one in bench.arrivals if one.late_us >= least and one.share >= SHARE and one.calls >= LEAST_CALLS)
    return next(late, None)


def say_late(late: Arrival, bench: Bench) -> Problem:
    """Report the late rank. The others wait for it in every call, but none of them is slow."""
    seen = (
        f"in {late.calls} calls with a barrier before each, it came {say_time(late.late_us)} after the others "
        f"(median; p95 {say_time(late.late_p95_us)}), and last in {late.share:.0%} of them"
    )
    next_us = max((one.late_us for one in bench.arrivals if one.rank != late.rank), default=0.0)
    return Problem(
        summary=f"rank {late.rank} on {late.host} is {say_time(late.late_us)} late to each call, and the others wait "
        "for it",
        evidence=(seen, f"none of the others comes later than {say_time(max(next_us, 0.0))} after the rest"),
        fix="check what delays this rank before a call: a process on its core (`top`, `pidstat -t 1`), a "
        "power-saving core, or network card interrupts; give each rank its own cores (torchrun --numa-binding, "
        "srun --cpu-bind=cores)",
        ranks=(late.rank,),
        hosts=(late.host,),
    )


def say_amount(slowness: Slowness) -> str:
    """Say briefly what was reached and what is usual: "0.012 GB/s where 0.93 GB/s is usual"."""
    own = _range(slowness.measure, slowness.low, slowness.high)
    usual = _range(slowness.measure, slowness.usual, slowness.usual)
    small = "" if slowness.measure is Measure.BANDWIDTH else " for a small message"
    return f"{own}{small} instead of the usual {usual}"


def say_evidence(found: Sequence[Slowness], whose: str) -> tuple[str, ...]:
    """Say in what it is slow, by how much, and what that rules out; ``whose`` is like "the pairs of rank 2"."""
    lines = [
        f"{whose}: {say_amount(slowness)}, the median of the others; at least twice as slow in "
        f"{slowness.slow_turns} of {slowness.turns} rounds"
        for slowness in found
    ]
    measures = {slowness.measure for slowness in found}
    if measures == {Measure.BANDWIDTH}:
        lines.append(NARROW)
    elif measures == {Measure.LATENCY}:
        lines.append(SLOW_TO_ANSWER)
    return tuple(lines)


def say_seen(results: Sequence[Pair | NodeResult], noun: str) -> str:
    """Say what was compared: "3 pairs of ranks: 0.91-1.1 GB/s, 430-520 us"."""
    rates = [result.busbw_gb_s for result in results if result.busbw_gb_s is not None]
    times = [result.latency_us for result in results]
    reach = [_range(Measure.BANDWIDTH, min(rates), max(rates))] if rates else []
    return f"{len(results)} {noun}: {', '.join([*reach, _range(Measure.LATENCY, min(times), max(times))])}"


def say_time(time_us: float) -> str:
    """Write a time: "430 us", "2.4 ms"."""
    return _range(Measure.LATENCY, time_us, time_us)


def _range(measure: Measure, low: float, high: float) -> str:
    unit, scale = ("GB/s", 1.0) if measure is Measure.BANDWIDTH else ("us", 1.0) if high < 1000 else ("ms", 1e-3)
    first, last = _number(low * scale), _number(high * scale)
    return f"{first} {unit}" if first == last else f"{first}-{last} {unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
