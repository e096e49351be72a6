"""DD402, DD403 and DD404: a rank, link or node is slow while the others are not."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from ddpdoctor.model.bandwidth import Mode, describe_shared_gpus
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from ddpdoctor.model.bandwidth import Arrival, Bench, NodeResult, Pair
    from ddpdoctor.rules.bandwidth.curves import Measured


# Our choice: this many times slower than usual is slow. A link that came up at half its rate is at 2. Between healthy
# pairs of one kind, by the medians of nine turns, we have seen up to 1.6, on two cores that others also used.
SLOW = 2.0
# Our choice: the share of an end's edges that must be slow for the end to be slow with everyone: two of two, three of
# three, and from five ends on all but one in four, since others may have problems of their own.
EVERYONE = 0.75
# Our choice: the share of turns in which an end must be slow with everyone. If a healthy edge looks slow in one turn of
# three by chance, all edges of one end do so in six turns of nine less than once in ten thousand times.
MOST_TURNS = 2 / 3
# Our choice: the share of turns in which a single edge, or a node by itself, must be slow: nothing else confirms it.
NEARLY_ALL_TURNS = 0.8
LEAST_TURNS = 3
# Our choice: if several edges are this many times slower than others, and they touch more than this share of the ends,
# the cause is not faulty links but the wiring of the machine: pairs across two sockets, or GPUs without NVLink between
# some of them.
MILD, WIDE = 1.5, 0.5
End = TypeVar("End", bound=Hashable)


class Measure(str, Enum):
    """The property of an edge that is compared."""

    BANDWIDTH = "bandwidth"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What ranks reached when measured together: one value per turn."""

    busbws_gb_s: tuple[float, ...]
    latencies_us: tuple[float, ...]

    @property
    def turns(self) -> int:
        """The number of turns in which it was measured; after an interrupted bench some series have fewer."""
        return min(len(self.busbws_gb_s), len(self.latencies_us))

    def cost(self, measure: Measure, turn: int) -> float:
        """Return a cost for one turn: the slower, the higher."""
        return self.latencies_us[turn] if measure is Measure.LATENCY else 1.0 / max(self.busbws_gb_s[turn], 1e-9)


Rows = dict[Measure, tuple[list[float], ...]]  # sorted costs by turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge(Generic[End]):
    """Two ends, measured alone."""

    ends: tuple[End, End]
    series: Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How much slower than usual something is."""

    measure: Measure
    low: float
    high: float  # the range of the medians of the slow ones, in GB/s or microseconds
    usual: float  # the median of those it was compared with
    slow_turns: int
    turns: int  # the number of all turns

    @property
    def ratio(self) -> float:
        """How many times slower than usual the least slow one is."""
        least = self.low / self.usual if self.measure is Measure.LATENCY else self.usual / max(self.high, 1e-9)
        return max(least, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Generic[End]):
    """A slow end, or the two ends of a slow edge, and in what it is slow: the worst first, never empty."""

    ends: tuple[End, ...]
    slowness: tuple[Slowness, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEdges(Generic[End]):
    """The slow ends and edges among edges of one kind."""

    ends: tuple[Slow[End], ...] = ()
    edges: tuple[Slow[End], ...] = ()
    wiring: int = 0  # how many edges are slow by themselves if they are too many to be faults; ``edges`` is then empty


def can_judge(edges: Iterable[Edge[End]]) -> bool:
    """Whether there is enough to compare: three ends with two edges each. With one edge, either end may be to blame."""
    known = tuple(edges)
    ends = sum(len(own) >= 2 for own in _by_end(known).values())
    return ends >= 3 and min(edge.series.turns for edge in known) >= LEAST_TURNS


def find_slow(edges: Iterable[Edge[End]]) -> SlowEdges[End]:
    """Find the slow ends, the worst first, and then among the others the edges that are slow for both ends."""
    left = tuple(edges)
    ends: list[Slow[End]] = []
    while can_judge(left):
        rows = make_rows([edge.series for edge in left])
        slow = []
        for end, own in _by_end(left).items():
            others = [edge.series for edge in left if end not in edge.ends]
            slowness = compare([edge.series for edge in own], others, rows) if len(own) >= 2 else ()
            if slowness:
                slow.append(Slow(ends=(end,), slowness=slowness))
        worst = max(slow, key=_severity, default=None)
        if worst is None:
            break
        ends.append(worst)
        left = tuple(edge for edge in left if worst.ends[0] not in edge.ends)
    mild = _slow_edges(left, MILD)
    touched = {end for edge in mild for end in edge.ends}
    wired = len(mild) > 1 and len(touched) > WIDE * len(_by_end(left))
    return SlowEdges(ends=tuple(ends), edges=() if wired else _slow_edges(left, SLOW), wiring=len(mild) if wired else 0)


def compare(own: Sequence[Turns], others: Sequence[Turns], rows: Rows) -> tuple[Slowness, ...]:
    """Return in what three quarters of ``own`` are slower than the median of ``others``, in enough of the turns.

    ``rows`` are the rows of ``own`` and ``others`` together. A single series must be slow in nearly all turns.
    """
    if len(others) == 0:
        return ()
    found = []
    for measure in Measure:
        slow = 0
        for turn, row in enumerate(rows[measure]):
            costs = sorted(one.cost(measure, turn) for one in own)
            least = SLOW * median_without(row, costs)
            slow += len(costs) - bisect_left(costs, least) >= EVERYONE * len(costs)
        if slow >= (MOST_TURNS if len(own) > 1 else NEARLY_ALL_TURNS) * len(rows[measure]):
            found.append(_slowness(measure, own, others, slow, len(rows[measure])))
    return tuple(sorted(found, key=lambda slowness: slowness.ratio, reverse=True))


def make_rows(series: Sequence[Turns]) -> Rows:
    """Sort the costs of all series, by measure and turn, for the turns that all of them have."""
    turns = range(min((one.turns for one in series), default=0))
    return {measure: tuple(sorted(one.cost(measure, turn) for one in series) for turn in turns) for measure in Measure}


def median_without(ordered: Sequence[float], own: Sequence[float]) -> float:
    """Return the median of the sorted values that remain without ``own``, which is sorted too."""
    count = len(ordered) - len(own)
    return (_value_without(ordered, own, (count - 1) // 2) + _value_without(ordered, own, count // 2)) / 2


def _value_without(ordered: Sequence[float], own: Sequence[float], place: int) -> float:
    index = place
    while (beyond := place + bisect_right(own, ordered[index])) > index:
        index = beyond
    return ordered[index]


def _slow_edges(edges: Sequence[Edge[End]], times: float) -> tuple[Slow[End], ...]:
    """Compare each edge's bandwidth with the other edges of its two ends. It must be slower than both.

    Latency is not compared: a thread that wakes late for just one other rank is a matter of cores, and a link that
    answers late loses bandwidth too.
    """
    by_end = {end: [edge.series for edge in own] for end, own in _by_end(edges).items()}
    rows = {end: make_rows(own)[Measure.BANDWIDTH] for end, own in by_end.items()}
    slow = []
    for edge in edges:
        one, other = (rows[end] for end in edge.ends)
        turns = min(len(one), len(other))
        count = sum(_is_slow(edge.series, turn, (one[turn], other[turn]), times) for turn in range(turns))
        if turns >= LEAST_TURNS and count >= NEARLY_ALL_TURNS * turns:
            beside = [series for end in edge.ends for series in by_end[end] if series is not edge.series]
            slowness = _slowness(Measure.BANDWIDTH, [edge.series], beside, count, turns)
            slow.append(Slow(ends=edge.ends, slowness=(slowness,)))
    return tuple(sorted(slow, key=_severity, reverse=True))


def _is_slow(series: Turns, turn: int, rows: Sequence[Sequence[float]], times: float) -> bool:
    cost = series.cost(Measure.BANDWIDTH, turn)
    return all(len(row) > 1 and cost >= times * median_without(row, (cost,)) for row in rows)


def _slowness(measure: Measure, own: Sequence[Turns], others: Sequence[Turns], slow_turns: int, turns: int) -> Slowness:
    reached = [_ends_median(measure, series) for series in own]
    usual = statistics.median(_ends_median(measure, series) for series in others)
    return Slowness(
        measure=measure, low=min(reached), high=max(reached), usual=usual, slow_turns=slow_turns, turns=turns
    )


def _ends_median(measure: Measure, series: Turns) -> float:
    return statistics.median(series.latencies_us if measure is Measure.LATENCY else series.busbws_gb_s)


def _severity(slow: Slow[End]) -> float:
    return slow.slowness[0].ratio


def _by_end(edges: Iterable[Edge[End]]) -> dict[End, list[Edge[End]]]:
    return grouped((end, edge) for edge in edges for end in edge.ends)


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
    links: tuple[Slow[int], ...] = ()  # slow links between ranks
    nodes: tuple[SlowNode, ...] = ()
    node_links: tuple[Slow[str], ...] = ()
    wiring: int = 0  # the number of pairs that are slower than others because of how the machines are wired
    pairs_judged: bool = False  # whether there was enough to compare
    nodes_judged: bool = False


def find_who(bench: Bench) -> SlowParts:
    """Judge pairs and nodes together, and name once what both show.

    A slow rank slows its whole node, so the node is not named too. A rank that is alone on its host cannot be
    distinguished from the host: the node is named if nodes were measured. Ranks that share a GPU wait for each other,
    so none of them is named.
    """
    if describe_shared_gpus(bench.members):
        return SlowParts()
    pairs = _judge_pairs(bench.pairs)
    edges = [Edge(ends=(node.host, node.peer), series=_series(node)) for node in bench.nodes if node.peer is not None]
    found = find_slow(edges)
    inside = _judge_inside([node for node in bench.nodes if node.peer is None])
    outside = tuple(SlowNode(host=slow.ends[0], slowness=slow.slowness, inside=False) for slow in found.ends)
    nodes = SlowParts(
        nodes=_once((*inside, *outside), lambda node: node.host),
        node_links=found.edges,
        wiring=found.wiring,
        nodes_judged=can_judge(edges) or bool(inside),
    )
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
    by_hosts = grouped(((min(pair.hosts), max(pair.hosts)), pair) for pair in across)
    between: SlowEdges[str] = SlowEdges()
    if not all(len(pairs) == 1 for pairs in by_hosts.values()):  # else ranks are judged instead
        between = find_slow(Edge(ends=hosts, series=_middle(pairs)) for hosts, pairs in by_hosts.items())
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


def _middle(pairs: Sequence[Pair]) -> Turns:
    return Turns(
        busbws_gb_s=tuple(map(statistics.median, zip(*(pair.busbws_gb_s for pair in pairs), strict=False))),
        latencies_us=tuple(map(statistics.median, zip(*(pair.latencies_us for pair in pairs), strict=False))),
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
# Our choice: on two busy cores, two ranks arrive some hundred microseconds apart at the median. Over a fast network,
# even DDP's largest bucket takes less than this, so waiting this long doubles the time.
LATE_US = 2000.0
# Our choice: it must also be this many times the time of a small call, which is long itself if cores are shared.
RELATIVE = 2.0
# The share of calls in which it must come last; the same share as of steps for a straggler in training (DD610).
SHARE = 0.8
LEAST_CALLS = 20  # the least number of calls, as for a straggler: fewer are chance
NARROW = "small messages do not take twice as long as usual: the bandwidth is low, and the CPU is not slow"
SLOW_TO_ANSWER = "its latency is high, not its transfer time: check its CPU core before its links"


def slow_rank(slow: Slow[int], measured: Measured) -> Problem:
    """Report that a rank is slow with every other rank."""
    bench, rank = measured.bench, slow.ends[0]
    host = _host(bench, rank)
    late = [
        late_us for pair in bench.pairs for end, late_us in zip(pair.ranks, pair.late_us, strict=True) if end == rank
    ]
    evidence = list(say_evidence(slow.slowness, f"the pairs of rank {rank}"))
    if min(late, default=0.0) >= LATE_US:
        evidence.append(f"in its pairs, it calls at least {say_time(min(late))} after the other rank")
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


NOT_ASKED = "neither --pairs nor --by-node was given"


@rule(
    "DD402",
    "slow-rank",
    Severity.WARNING,
    "A rank is slow with every other rank, or late to every call",
    after=("wrong-data",),
)
def check_slow_rank(measured: Measured) -> Answer:
    """Report a rank that is slow with every other rank, or that comes late to every call, while the others are fine."""
    bench, who = measured.bench, find_who(measured.bench)
    late = None if describe_shared_gpus(bench.members) else find_late(bench)
    # A rank that comes late to calls is slow in pairs too.
    problems = [slow_rank(slow, measured) for slow in who.ranks if late is None or slow.ends != (late.rank,)]
    if late is not None:
        problems.append(say_late(late, bench))
    if problems:
        return judged(problems, "")
    unknown_why = _why_pairs_are_unknown(bench, who)
    if bench.settings.pairs and unknown_why:
        return unknown(unknown_why)
    seen = [say_seen(bench.pairs, "pairs of ranks")] if bench.pairs else []
    if bench.arrivals:
        latest = max(bench.arrivals, key=lambda one: one.late_us)
        seen.append(f"the latest rank comes {say_time(max(latest.late_us, 0.0))} after the others")
    return judged([], "; ".join(seen)) if seen else skipped("no call was timed, and --pairs was not given")


@rule("DD403", "slow-link", Severity.WARNING, "Two ranks or nodes are slow only with each other", after=("slow-rank",))
def check_slow_link(measured: Measured) -> Answer:
    """Report two ranks or nodes that are slow only with each other."""
    bench, who = measured.bench, find_who(measured.bench)
    problems = [
        *(slow_link(link, measured) for link in who.links),
        *(slow_node_link(link, measured) for link in who.node_links),
    ]
    if problems:
        return judged(problems, "")
    if not bench.settings.pairs and not bench.settings.by_node:
        return skipped(NOT_ASKED)
    unknown_why = _why_pairs_are_unknown(bench, who) if bench.settings.pairs else _why_nodes_are_unknown(bench, who)
    if unknown_why:
        return unknown(unknown_why)
    return judged([], _seen(bench, who))


@rule(
    "DD404", "slow-node", Severity.WARNING, "A node is slow with every other node, or internally", after=("slow-link",)
)
def check_slow_node(measured: Measured) -> Answer:
    """Report a node that is slow with every other node, or whose own ranks are slow while those of others are not."""
    bench, who = measured.bench, find_who(measured.bench)
    if who.nodes:
        return judged([slow_node(node, measured) for node in who.nodes], "")
    if not bench.settings.by_node:
        return skipped("--by-node was not given")
    unknown_why = _why_nodes_are_unknown(bench, who)
    return unknown(unknown_why) if unknown_why else judged([], _seen(bench, who))


def _why_pairs_are_unknown(bench: Bench, who: SlowParts) -> str:
    if who.pairs_judged:
        return ""
    if shared := describe_shared_gpus(bench.members):
        return shared
    if len(bench.members) < 3:
        return "three ranks are needed: in a single pair, either rank may be slow"
    if not bench.pairs:
        return "no pair was measured"
    if min(len(pair.busbws_gb_s) for pair in bench.pairs) < LEAST_TURNS:
        return "there were too few rounds to distinguish a short disturbance from a slow rank"
    return "no host has three ranks, and there are too few pairs between hosts to compare"


def _why_nodes_are_unknown(bench: Bench, who: SlowParts) -> str:
    if who.nodes_judged:
        return ""
    if shared := describe_shared_gpus(bench.members):
        return shared
    hosts = len({member.host for member in bench.members})
    if hosts < 3:
        return f"three nodes are needed to find the slow one, and there {'is one' if hosts == 1 else 'are two'}"
    return "too few pairs of nodes were measured"


def _seen(bench: Bench, who: SlowParts) -> str:
    seen = [
        say_seen(results, noun)
        for results, noun in (
            (bench.pairs, "pairs of ranks"),
            ([node for node in bench.nodes if node.peer is not None], "pairs of nodes"),
        )
        if results
    ]
    if who.wiring:
        seen.append(
            f"{who.wiring} of them are slower than others, too many for faults: this is the topology of the machines"
        )
    return "; ".join(seen)
