"""DD402, DD403 and DD404: a rank, link or node is slow while the others are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import describe_shared_gpus
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, judged, skipped, unknown
from ddpdoctor.rules.bandwidth.localize_edges import LEAST_TURNS
from ddpdoctor.rules.bandwidth.localize_problems import (
    find_late,
    say_late,
    say_seen,
    say_time,
    slow_link,
    slow_node,
    slow_node_link,
    slow_rank,
)
from ddpdoctor.rules.bandwidth.localize_who import find_who
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench
    from ddpdoctor.rules.bandwidth.curve import Measured
    from ddpdoctor.rules.bandwidth.localize_who import SlowParts

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


@rule(
    "DD403",
    "slow-link",
    Severity.WARNING,
    "Two ranks or nodes are slow only with each other",
    after=("slow-rank",),
)
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
