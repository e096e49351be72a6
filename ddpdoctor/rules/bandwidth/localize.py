"""DD402, DD403 and DD404: a rank, link or node is slow while the others are not."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpdoctor.model.bandwidth import Mode, describe_shared_gpus
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.bandwidth import Bench, NodeResult, Pair
    from ddpdoctor.rules.bandwidth.curves import Measured

    Series = Pair | NodeResult  # what ranks reached when measured together: one value per turn


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


Rows = dict[Measure, tuple[list[float], ...]]  # sorted costs by turn


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
    inside: bool = False  # a host whose own ranks are slow among themselves


SlowOnes = tuple[Slow[End], ...]


def can_judge(edges: Mapping[tuple[End, End], Series]) -> bool:
    """Whether there is enough to compare: three ends with two edges each. With one edge, either end may be to blame."""
    ends = sum(len(own) >= 2 for own in _by_end(edges).values())
    seen = (values for edge in edges.values() for values in (edge.busbws_gb_s, edge.latencies_us))
    return ends >= 3 and all(len(values) >= LEAST_TURNS for values in seen)


def find_slow(edges: Mapping[tuple[End, End], Series]) -> tuple[SlowOnes[End], SlowOnes[End], int]:
    """Find the slow ends, the worst first, and then among the others the edges that are slow for both ends.

    ``edges`` are pairs of ends that were measured alone, all of one kind. If too many edges are slow by themselves to
    be faults, their number is returned instead of them.
    """
    left = dict(edges)
    ends: list[Slow[End]] = []
    while can_judge(left):
        rows = make_rows(left.values())
        slow = []
        for end, own in _by_end(left).items():
            others = [series for both, series in left.items() if end not in both]
            slowness = compare(own, others, rows) if len(own) >= 2 else ()
            if slowness:
                slow.append(Slow(ends=(end,), slowness=slowness))
        worst = max(slow, key=_severity, default=None)
        if worst is None:
            break
        ends.append(worst)
        left = {both: series for both, series in left.items() if worst.ends[0] not in both}
    mild = _slow_edges(left, MILD)
    touched = {end for edge in mild for end in edge.ends}
    if len(mild) > 1 and len(touched) > WIDE * len(_by_end(left)):
        return tuple(ends), (), len(mild)
    return tuple(ends), _slow_edges(left, SLOW), 0


def compare(own: Sequence[Series], others: Sequence[Series], rows: Rows) -> tuple[Slowness, ...]:
    """Return where three quarters of ``own`` are slower than the median of ``others``, in enough of the turns.

    ``rows`` are the rows of ``own`` and ``others`` together. A single series must be slow in nearly all turns.
    """
    if len(others) == 0:
        return ()
    found = []
    for measure, own_rows in make_rows(own).items():
        slow, turns = 0, len(rows[measure])
        for row, costs in zip(rows[measure], own_rows, strict=False):
            least = SLOW * median_without(row, costs)
            slow += len(costs) - bisect_left(costs, least) >= EVERYONE * len(costs)
        if slow >= (MOST_TURNS if len(own) > 1 else NEARLY_ALL_TURNS) * turns:
            found.append(_slowness(measure, own, others, slow, turns))
    return tuple(sorted(found, key=lambda slowness: slowness.ratio, reverse=True))


def make_rows(series: Iterable[Series]) -> Rows:
    """Sort the costs of all series, by measure and turn, for the turns that all of them have."""
    costs = [_costs(pair) for pair in series]
    return {measure: tuple(map(sorted, zip(*(cost[measure] for cost in costs), strict=False))) for measure in Measure}


def _costs(series: Series) -> dict[Measure, list[float]]:
    """Return costs by turn: the slower, the higher. After an interrupted bench some series have fewer turns."""
    turns = list(zip(series.busbws_gb_s, series.latencies_us, strict=False))
    return {
        Measure.BANDWIDTH: [1.0 / max(busbw_gb_s, 1e-9) for busbw_gb_s, _ in turns],
        Measure.LATENCY: [latency_us for _, latency_us in turns],
    }


def median_without(ordered: Sequence[float], own: Sequence[float]) -> float:
    """Return the median of the sorted values that remain without ``own``, which is sorted too."""
    count = len(ordered) - len(own)
    middle = []
    for place in ((count - 1) // 2, count // 2):
        index = place
        while (beyond := place + bisect_right(own, ordered[index])) > index:
            index = beyond
        middle.append(ordered[index])
    return sum(middle) / 2


def _slow_edges(edges: Mapping[tuple[End, End], Series], times: float) -> tuple[Slow[End], ...]:
    """Compare each edge's bandwidth with the other edges of its two ends. It must be slower than both.

    Latency is not compared: a thread that wakes late for just one other rank is a matter of cores, and a link that
    answers late loses bandwidth too.
    """
    by_end = _by_end(edges)
    rows = {end: make_rows(own)[Measure.BANDWIDTH] for end, own in by_end.items()}
    slow = []
    for ends, series in edges.items():
        # The edge's own cost in each turn, and the costs of all edges of either end
        turns = list(zip(_costs(series)[Measure.BANDWIDTH], *(rows[end] for end in ends), strict=False))
        count = sum(
            all(len(row) > 1 and cost >= times * median_without(row, (cost,)) for row in both) for cost, *both in turns
        )
        if len(turns) >= LEAST_TURNS and count >= NEARLY_ALL_TURNS * len(turns):
            beside = [other for end in ends for other in by_end[end] if other is not series]
            slowness = _slowness(Measure.BANDWIDTH, [series], beside, count, len(turns))
            slow.append(Slow(ends=ends, slowness=(slowness,)))
    return tuple(sorted(slow, key=_severity, reverse=True))


def _slowness(
    measure: Measure, own: Sequence[Series], others: Sequence[Series], slow_turns: int, turns: int
) -> Slowness:
    reached, beside = (
        [median(pair.latencies_us if measure is Measure.LATENCY else pair.busbws_gb_s) for pair in side]
        for side in (own, others)
    )
    return Slowness(
        measure=measure, low=min(reached), high=max(reached), usual=median(beside), slow_turns=slow_turns, turns=turns
    )


def _severity(slow: Slow[Any]) -> float:
    return slow.slowness[0].ratio


def _by_end(edges: Mapping[tuple[End, End], Series]) -> dict[End, list[Series]]:
    return grouped((end, series) for ends, series in edges.items() for end in ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowParts:
    """All that is slow."""

    ranks: tuple[Slow[int], ...] = ()
    links: tuple[Slow[int], ...] = ()  # slow links between ranks
    nodes: tuple[Slow[str], ...] = ()
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
    edges = {(node.host, node.peer): node for node in bench.nodes if node.peer is not None}
    outside, node_links, node_wiring = find_slow(edges)
    inside = []
    alone = [node for node in bench.nodes if node.peer is None]
    for node in alone:
        others = [other for other in alone if other is not node and len(other.ranks) == len(node.ranks)]
        # With only one other node, either may be to blame.
        slowness = compare([node], others, make_rows([node, *others])) if len(others) >= 2 else ()
        if slowness:
            inside.append(Slow(ends=(node.host,), slowness=slowness, inside=True))
    slow_hosts, host_links, host_wiring, kinds = _judge_hosts(bench.pairs)
    found = [find_slow(kind) for kind in kinds]
    host_of = {member.rank: member.host for member in bench.members}
    ranks_on = Counter(host_of.values())
    of_nodes = {slow.ends[0] for slow in (*inside, *outside)}
    linked = {frozenset(link.ends) for link in node_links}
    ranks = [
        slow
        for slow in _once(slow for ends, _, _ in found for slow in ends)
        if ranks_on[host_of[slow.ends[0]]] > 1 or host_of[slow.ends[0]] not in of_nodes
    ]
    blamed = {host_of[slow.ends[0]] for slow in ranks}
    links = [link for _, those, _ in found for link in those]
    return SlowParts(
        ranks=tuple(ranks),
        links=tuple(link for link in links if frozenset(host_of[rank] for rank in link.ends) not in linked),
        nodes=tuple(node for node in _once((*inside, *outside, *slow_hosts)) if node.ends[0] not in blamed),
        node_links=(*node_links, *(link for link in host_links if frozenset(link.ends) not in linked)),
        wiring=host_wiring + node_wiring + sum(wiring for _, _, wiring in found),
        pairs_judged=any(map(can_judge, kinds)) or bool(slow_hosts),
        nodes_judged=can_judge(edges) or bool(inside),
    )


def _once(found: Iterable[Slow[End]]) -> tuple[Slow[End], ...]:
    """Keep the first entry for a rank or host: it may be slow both inside its host and with other hosts."""
    return tuple(own[0] for own in grouped((slow.ends, slow) for slow in found).values())


def _judge_hosts(pairs: Sequence[Pair]) -> tuple[SlowOnes[str], SlowOnes[str], int, list[dict[tuple[int, int], Pair]]]:
    """Find the slow hosts and links between hosts, and return the other pairs in groups of one kind.

    Pairs inside a host are compared with pairs of the same host, and pairs between hosts with each other.
    """
    by_hosts = grouped(((min(pair.hosts), max(pair.hosts)), pair) for pair in pairs)
    inside = [own for (host, other), own in by_hosts.items() if host == other]
    between = {hosts: own for hosts, own in by_hosts.items() if hosts[0] != hosts[1]}
    edges: dict[tuple[str, str], Pair] = {}
    if any(len(own) > 1 for own in between.values()):  # else ranks are judged instead
        for hosts, own in between.items():
            rates = tuple(map(median, zip(*(pair.busbws_gb_s for pair in own), strict=False)))
            times = tuple(map(median, zip(*(pair.latencies_us for pair in own), strict=False)))
            edges[hosts] = replace(own[0], busbws_gb_s=rates, latencies_us=times)
    slow_hosts, links, wiring = find_slow(edges)
    # Pairs that a slow host or a slow link between two hosts explains do not count against single ranks.
    slow = {slow.ends[0] for slow in slow_hosts}
    unclear = {hosts for hosts in between if not slow & set(hosts)} - {link.ends for link in links}
    left = [pair for pair in pairs if (min(pair.hosts), max(pair.hosts)) in unclear]
    return slow_hosts, links, wiring, [{pair.ranks: pair for pair in kind} for kind in (*inside, left)]


AT_ONCE = "several ran in parallel, so they may have slowed each other"
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
FIX_LATE = (
    "check what delays this rank before a call: a process on its core (`top`, `pidstat -t 1`), a power-saving core, or "
    "network card interrupts; give each rank its own cores (torchrun --numa-binding, srun --cpu-bind=cores)"
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

# What is said of a slow part: whose figures these are, what is wrong, and what to do.
PARTS = {
    "rank": ("the pairs of rank {0}", "rank {0} on {hosts} is slow with every other rank", FIX_RANK),
    "link": ("ranks {0} and {1}", "ranks {0} and {1} ({hosts}) are slow only with each other", FIX_LINK),
    "node": ("the pairs of {0}", "node {0}: it is slow with every other node", FIX_NODE),
    "inside": ("the ranks of {0}", "node {0}: its ranks are slow among themselves", FIX_INSIDE),
    "node link": ("nodes {0} and {1}", "nodes {0} and {1} are slow only with each other", FIX_LINK),
}


def _problem(part: str, slow: Slow[Any], measured: Measured) -> Problem:
    bench, ends = measured.bench, sorted(slow.ends)
    host_of = {member.rank: member.host for member in bench.members}
    of_ranks = part in {"rank", "link"}
    results: Sequence[Series] = bench.pairs if of_ranks else bench.nodes or bench.pairs
    if of_ranks:
        ranks, hosts = ends, list(dict.fromkeys(host_of[rank] for rank in ends))
    else:
        ranks, hosts = sorted(rank for rank, host in host_of.items() if host in ends), ends
    whose, what, fix = (text.format(*ends, hosts=", ".join(hosts)) for text in PARTS[part])
    evidence = [
        f"{whose}: {_amount(slowness)}, the median of the others; at least twice as slow in "
        f"{slowness.slow_turns} of {slowness.turns} rounds"
        for slowness in slow.slowness
    ]
    if len(slow.slowness) == 1:
        evidence.append(NARROW if slow.slowness[0].measure is Measure.BANDWIDTH else SLOW_TO_ANSWER)
    if part == "rank":
        own = (zip(pair.ranks, pair.late_us, strict=True) for pair in bench.pairs)
        late_us = [time_us for pair in own for rank, time_us in pair if rank == ends[0]]
        if min(late_us, default=0.0) >= LATE_US:
            evidence.append(f"in its pairs, it calls at least {_latency_words(min(late_us))} after the other rank")
        if list(host_of.values()).count(hosts[0]) == 1:
            evidence.append(f"it is the only rank on {hosts[0]}, so it cannot be distinguished from the host's network")
    # What was found on exactly these ranks, or on this host if the bench has others
    every = set(host_of.values())
    evidence += [
        f"{reason.text} ({reason.source})"
        for reason in measured.reasons
        if (of_ranks and reason.ranks and set(reason.ranks) <= set(ranks))
        or (len(ends) == 1 and not reason.ranks and reason.hosts and set(reason.hosts) <= set(hosts) < every)
    ]
    alone = all(result.alone for result in results)
    return Problem(
        summary=f"{what}: {_amount(slow.slowness[0])}",
        evidence=tuple(evidence if alone else [*evidence, AT_ONCE]),
        fix=fix,
        confidence=Confidence.HIGH if alone else Confidence.MEDIUM,
        ranks=tuple(ranks),
        hosts=tuple(hosts),
    )


def _amount(slowness: Slowness) -> str:
    """Return what was reached and what is usual: "0.012 GB/s instead of the usual 0.93 GB/s"."""
    own = _range_words(slowness.measure, slowness.low, slowness.high)
    usual = _range_words(slowness.measure, slowness.usual, slowness.usual)
    small = "" if slowness.measure is Measure.BANDWIDTH else " for a small message"
    return f"{own}{small} instead of the usual {usual}"


def _latency_words(time_us: float) -> str:
    return _range_words(Measure.LATENCY, time_us, time_us)


def _range_words(measure: Measure, low: float, high: float) -> str:
    """Write "0.91-1.1 GB/s", "430 us" or "2.4-3.5 ms"."""
    unit, scale = ("GB/s", 1.0) if measure is Measure.BANDWIDTH else ("us", 1.0) if high < 1000 else ("ms", 1e-3)
    values = (low * scale, high * scale)
    ends = dict.fromkeys(f"{value:.0f}" if value >= 100 else f"{value:.2g}" for value in values)
    return f"{'-'.join(ends)} {unit}"


@rule(
    "DD402", "slow-rank", Severity.WARNING, "A rank is slow with every other rank, or late to every call",
    after=("wrong-data",),
)  # fmt: skip
def check_slow_rank(measured: Measured) -> Answer:
    """Report a rank that is slow with every other rank, or that is late to every call, while the others are fine."""
    bench, who = measured.bench, find_who(measured.bench)
    # The rank that comes late to calls: the others wait for it in each, but none of them is slow. Only one can be last
    # in most calls.
    times = [result.p50_us for result in bench.results if result.mode is Mode.LATENCY]
    least = max(LATE_US, RELATIVE * min(times, default=0.0))
    arrivals = () if describe_shared_gpus(bench.members) else bench.arrivals
    enough = (arrival for arrival in arrivals if arrival.share >= SHARE and arrival.calls >= LEAST_CALLS)
    late = next((arrival for arrival in enough if arrival.late_us >= least), None)
    # It is slow in pairs too.
    problems = [_problem("rank", slow, measured) for slow in who.ranks if late is None or slow.ends != (late.rank,)]
    if late is not None:
        after = f"{_latency_words(late.late_us)} after the others (median; p95 {_latency_words(late.late_p95_us)})"
        seen = f"in {late.calls} calls with a barrier before each, it arrived {after}, last in {late.share:.0%} of them"
        next_us = max((arrival.late_us for arrival in bench.arrivals if arrival.rank != late.rank), default=0.0)
        evidence = (seen, f"none of the others arrives later than {_latency_words(max(next_us, 0.0))} after the rest")
        who_is_late = f"rank {late.rank} on {late.host} is {_latency_words(late.late_us)} late to each call"
        summary = f"{who_is_late}, and the others wait for it"
        ranks, hosts = (late.rank,), (late.host,)
        problems.append(Problem(summary=summary, evidence=evidence, fix=FIX_LATE, ranks=ranks, hosts=hosts))
    if problems:
        return judged(problems)
    if bench.settings.pairs and (why := _why_unknown(bench, who, pairs=True)):
        return unknown(why)
    compared = [_compared(bench.pairs, "pairs of ranks")] if bench.pairs else []
    if bench.arrivals:
        latest_us = max(arrival.late_us for arrival in bench.arrivals)
        compared.append(f"the latest rank arrives {_latency_words(max(latest_us, 0.0))} after the others")
    return judged([], "; ".join(compared)) if compared else skipped("no call was timed, and --pairs was not given")


@rule("DD403", "slow-link", Severity.WARNING, "Two ranks or nodes are slow only with each other", after=("slow-rank",))
def check_slow_link(measured: Measured) -> Answer:
    """Report two ranks or nodes that are slow only with each other."""
    settings, who = measured.bench.settings, find_who(measured.bench)
    problems = [_problem("link", link, measured) for link in who.links]
    problems += [_problem("node link", link, measured) for link in who.node_links]
    if not problems and not settings.pairs and not settings.by_node:
        return skipped("neither --pairs nor --by-node was given")
    return _answer(problems, measured.bench, who, pairs=settings.pairs)


@rule(
    "DD404", "slow-node", Severity.WARNING, "A node is slow with every other node, or internally", after=("slow-link",)
)
def check_slow_node(measured: Measured) -> Answer:
    """Report a node that is slow with every other node, or whose own ranks are slow while those of others are not."""
    who = find_who(measured.bench)
    problems = [_problem("inside" if node.inside else "node", node, measured) for node in who.nodes]
    if not problems and not measured.bench.settings.by_node:
        return skipped("--by-node was not given")
    return _answer(problems, measured.bench, who, pairs=False)


def _answer(problems: Sequence[Problem], bench: Bench, who: SlowParts, *, pairs: bool) -> Answer:
    if problems:
        return judged(problems)
    if why := _why_unknown(bench, who, pairs=pairs):
        return unknown(why)
    between = [node for node in bench.nodes if node.peer is not None]
    compared = ((bench.pairs, "pairs of ranks"), (between, "pairs of nodes"))
    seen = [_compared(results, noun) for results, noun in compared if results]
    if who.wiring:
        seen.append(
            f"{who.wiring} of them are slower than others, too many for faults: this is the topology of the machines"
        )
    return judged([], "; ".join(seen))


def _compared(results: Sequence[Series], noun: str) -> str:
    """Return what was compared: "3 pairs of ranks: 0.91-1.1 GB/s, 430-520 us"."""
    rates = [result.busbw_gb_s for result in results if result.busbw_gb_s is not None]
    times = [result.latency_us for result in results]
    reach = [_range_words(Measure.BANDWIDTH, min(rates), max(rates))] if rates else []
    return f"{len(results)} {noun}: {', '.join([*reach, _range_words(Measure.LATENCY, min(times), max(times))])}"


def _why_unknown(bench: Bench, who: SlowParts, *, pairs: bool) -> str:
    if who.pairs_judged if pairs else who.nodes_judged:
        return ""
    if shared := describe_shared_gpus(bench.members):
        return shared
    hosts = len({member.host for member in bench.members})
    if not pairs and hosts < 3:
        return f"three nodes are needed to find the slow one, and there {'is one' if hosts == 1 else 'are two'}"
    if not pairs:
        return "too few pairs of nodes were measured"
    if len(bench.members) < 3:
        return "three ranks are needed: in a single pair, either rank may be slow"
    if not bench.pairs:
        return "no pair was measured"
    if min(len(pair.busbws_gb_s) for pair in bench.pairs) < LEAST_TURNS:
        return "there were too few rounds to distinguish a short disturbance from a slow rank"
    return "no host has three ranks, and there are too few pairs between hosts to compare"
