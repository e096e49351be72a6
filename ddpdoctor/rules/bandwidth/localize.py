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
    """Report a rank that is slow with every other rank, or that comes late to every call, while the others are fine.

    ## What it means

    A collective is only as fast as its slowest rank. Two things make a rank slow, and the summary says which one it is.

    ## How it is recognized

    *Slow with every other rank* is visible with `--pairs`: every two ranks are measured alone, all pairs in turn, nine
    times over. A rank is slow in a turn if at least three quarters of its pairs are half as fast as the median of the
    pairs without it, in bandwidth or in latency. It is named if it is slow in two turns of three: a disturbance of the
    machine slows all pairs of a turn, and a disturbance of one pair affects only a few turns. Pairs inside a machine
    are compared only with pairs of the same machine, and pairs between machines only with each other. It takes three
    ranks: with one pair, either rank may be to blame.

    The evidence says in what the rank is slow. A rank that is slow in bandwidth alone has a narrow path for its data
    (PCIe, network card, a rate limit). A rank that is slow in latency shares its core with something else, or runs on a
    core that sleeps. If only one pair of the rank is slow, see DD403 `slow-link`. If all ranks of a machine are slow
    with other machines, see DD404 `slow-node`. A rank that is alone on its machine cannot be distinguished from the
    machine.

    *Late* is visible in every run. All ranks meet before each timed call, and how long each one waits there shows who
    came last. A rank is late if it comes 2 ms or more after the others at the median, and last in four calls of five.
    Its own calls are not slow, and neither are those of the others: the timed part begins when all have arrived. In
    training, the same delay makes the *others* look slow, because they wait inside the collective.

    ## What else looks like it

    If one GPU is on another socket than the rest (`nvidia-smi topo -m`), it is slow with them by design.

    ## What to do

    Look at the rank's GPU, PCIe link, network card and core. The evidence has what the machine itself reports about
    them.
    """
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
    """Report two ranks or nodes that are slow only with each other.

    ## What it means

    Only what is between the two is slow: a cable, a switch port, a route, or a link between GPUs.

    ## How it is recognized

    Visible with `--pairs` between ranks and with `--by-node` between nodes; DD402 `slow-rank` explains how these are
    measured. A pair is named if, in four turns of five, it has at most half the bandwidth of the other pairs of *each*
    of its two ends, by their median. Slow ends are named first and their pairs are set aside, so that a slow rank is
    never taken for many slow links. It takes three ranks, or three nodes.

    ## What else looks like it

    Some machines are wired so that some pairs are slower than others: GPUs on two sockets, or GPUs without NVLink
    between some of them. If several pairs are slower than others, and more than half of the ranks have such a pair, no
    link is named, and the check says how many such pairs there are.

    ## What to do

    Within a machine, check the NVLink or PCIe path between the two GPUs. Between machines, check cables, switch ports
    and routes that only these two use.
    """
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
    """Report a node that is slow with every other node, or whose own ranks are slow while those of other nodes are not.

    ## What it means

    *Slow with every other node* points at the node's path to the others: network card, cable, switch port, a rate
    limit, or a route over the wrong interface. *Slow inside* points at the machine: memory, clocks, PCIe, NVLink, or
    another job. With `--pairs`, the finding names the slow rank instead of the node.

    ## How it is recognized

    Visible with `--by-node`: each node is measured alone, then every two nodes together, with all of their ranks, as in
    training. Nodes are judged like ranks (DD402 `slow-rank`): in two turns of three, at least three quarters of the
    node's pairs are half as fast as the median of the pairs without it. It takes three nodes: if two are slow together,
    either may be to blame. `--pairs` also shows it, if all ranks of a machine are slow with other machines.

    ## What else looks like it

    A node in another rack or zone is slow with the others because of the distance.

    ## What to do

    Check the node's card and port, compare the machine with another one, and exclude it from the job until it is
    repaired.
    """
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
