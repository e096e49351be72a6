"""Finds a slow rank, link or node: measures every pair of ranks, every node and every pair of nodes separately."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.bandwidth import Collective, Mode, NodeResult, Pair
from ddpdoctor.model.words import format_size, grouped
from ddpdoctor.probes.bandwidth.spread import coefficient_of_variation
from ddpdoctor.probes.bandwidth.visits import (
    LEAST_SLOT_S,
    SMALL_BYTES,
    VISITS,
    Unit,
    UnitVisit,
    VisitPlan,
    slot_seconds,
    visit_units,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.bandwidth import BenchSettings
    from ddpdoctor.probes.bandwidth.group import RankGroup
    from ddpdoctor.probes.bandwidth.log import ResultLog
    from ddpdoctor.probes.bandwidth.visits import Progress

PLATEAU_BYTES = {"gloo": 4 * 2**20, "nccl": 64 * 2**20}
"""Our choice: at this size two Gloo ranks reach nine tenths of their plateau on a usual machine (alpha 400 us, beta
1 GB/s). Two GPUs over NVLink do at some tens of MiB."""
LEAST_BYTES = 2**20
"""Our choice: below this, the time is mostly latency and says little about bandwidth."""
CALLS = 5
"""Our choice: how many calls of the large size a slot should have time for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node(Unit):
    """The ranks of one host, or of two if ``peer`` is set."""

    host: str
    peer: str | None


def run_pairs(
    world: RankGroup, settings: BenchSettings, hosts: Sequence[str], log: ResultLog, progress: Progress
) -> None:
    """Measure every pair of ranks separately, into ``log.pairs``."""
    if world.size < 2:
        log.note("--pairs: one rank has no pairs")
        return
    rounds = tuple(
        tuple(Unit(name=f"ranks {first} and {second}", ranks=(first, second)) for first, second in pairs)
        for pairs in circle_rounds(world.ranks)
    )
    plan, alone = _plan("pairs", rounds, world, settings, log)
    pairs: dict[Unit, Pair] = {}
    for unit, visits in _gather_visits(world, plan, progress):
        pairs[unit] = _sum_up_pair(unit, visits, hosts, alone=alone)
        log.pairs = list(pairs.values())
    turns = max(len(pair.busbws_gb_s) for pair in pairs.values())
    _note(log, plan, len(pairs), "pairs of ranks", turns, alone=alone)


def run_nodes(
    world: RankGroup, settings: BenchSettings, hosts: Sequence[str], log: ResultLog, progress: Progress
) -> None:
    """Measure the ranks of every host and of every pair of hosts, into ``log.nodes``.

    All ranks of two hosts take part, not one of each, as in training. This also uses all cards of a host that has a
    network card for each GPU. A host with one rank has nothing to measure alone.
    """
    members = grouped((host, rank) for rank, host in enumerate(hosts))
    if len(members) < 2:
        log.note("--by-node: all ranks are on one host, so there are no nodes to compare")
        return
    single = tuple(_node(members, host, None) for host in members if len(members[host]) > 1)
    rounds = tuple(tuple(_node(members, host, peer) for host, peer in pairs) for pairs in circle_rounds(tuple(members)))
    plan, alone = _plan("nodes", (single, *rounds) if single else rounds, world, settings, log)
    nodes: dict[_Node, NodeResult] = {}
    for unit, visits in _gather_visits(world, plan, progress):
        assert isinstance(unit, _Node)
        nodes[unit] = _sum_up_node(unit, visits, alone=alone)
        log.nodes = list(nodes.values())
    turns = max(len(node.busbws_gb_s) for node in nodes.values())
    _note(log, plan, len(nodes), "nodes and pairs of nodes", turns, alone=alone)


def _node(members: dict[str, list[int]], host: str, peer: str | None) -> _Node:
    ranks = [*members[host], *(members[peer] if peer is not None else ())]
    name = f"node {host}" if peer is None else f"nodes {host} and {peer}"
    return _Node(name=name, ranks=tuple(sorted(ranks)), host=host, peer=peer)


def _plan(
    phase: str, rounds: Sequence[tuple[Unit, ...]], world: RankGroup, settings: BenchSettings, log: ResultLog
) -> tuple[VisitPlan, bool]:
    """Return the plan, and whether each unit runs alone.

    Units run alone if there is time. When run at once, they share cores, memory and network cards and can slow each
    other.
    """
    single = tuple((unit,) for unit in chain.from_iterable(rounds))
    alone = VISITS * len(single) * LEAST_SLOT_S <= settings.budget_s
    slots = single if alone else tuple(rounds)
    limit = max(LEAST_BYTES, min(settings.max_size_bytes, PLATEAU_BYTES.get(settings.backend, LEAST_BYTES)))
    size = _fitting_size(limit, log, slot_seconds(settings.budget_s, VISITS * len(slots)))
    plan = VisitPlan(phase=phase, slots=slots, size_bytes=int(world.agree(size)), budget_s=settings.budget_s)
    return plan, alone or all(len(slot) == 1 for slot in slots)


def _fitting_size(limit: int, log: ResultLog, slot_s: float) -> int:
    """Return the largest size whose calls should fit into a slot, judged by the whole group's times."""
    times = [
        (result.size_bytes, result.p50_us)
        for result in log.results
        if result.collective is Collective.ALL_REDUCE and result.mode is Mode.LATENCY
    ]
    size = limit
    if times:
        known_bytes, known_us = max(times)
        while size > LEAST_BYTES and CALLS * known_us * size / known_bytes > slot_s * 1e6:
            size //= 2
    return max(size, LEAST_BYTES)


def _gather_visits(world: RankGroup, plan: VisitPlan, progress: Progress) -> Iterator[tuple[Unit, list[UnitVisit]]]:
    seen: dict[Unit, list[UnitVisit]] = {}
    for slot in visit_units(world, plan, progress):
        for unit, visit in slot:
            seen.setdefault(unit, []).append(visit)
            yield unit, seen[unit]


def _sum_up_pair(unit: Unit, visits: Sequence[UnitVisit], hosts: Sequence[str], *, alone: bool) -> Pair:
    late_us = [statistics.median(late) for late in zip(*(visit.late_us for visit in visits), strict=True)]
    first, second = unit.ranks
    return Pair(
        ranks=(first, second),
        hosts=(hosts[first], hosts[second]),
        late_us=(late_us[0], late_us[1]),
        alone=alone,
        **_sum_up(visits),
    )


def _sum_up_node(unit: _Node, visits: Sequence[UnitVisit], *, alone: bool) -> NodeResult:
    return NodeResult(host=unit.host, peer=unit.peer, ranks=unit.ranks, alone=alone, **_sum_up(visits))


def _sum_up(visits: Sequence[UnitVisit]) -> dict[str, Any]:
    """Return the fields that pairs and nodes have in common."""
    latencies_us = tuple(visit.latency_us for visit in visits)
    busbws_gb_s = tuple(visit.busbw_gb_s for visit in visits)
    return {
        "latency_us": statistics.median(latencies_us),
        "busbw_gb_s": statistics.median(busbws_gb_s),
        "cv": coefficient_of_variation(busbws_gb_s),
        "latencies_us": latencies_us,
        "busbws_gb_s": busbws_gb_s,
    }


def _note(log: ResultLog, plan: VisitPlan, measured: int, what: str, turns: int, *, alone: bool) -> None:
    total = sum(len(slot) for slot in plan.slots)
    left = "" if measured == total else f", for more of which a budget of {plan.budget_s:g} s has no time,"
    how = "one at a time" if alone else "several at once, which share cores and network cards"
    log.note(
        f"--{'pairs' if plan.phase == 'pairs' else 'by-node'}: {measured} of {total} {what}{left} {how}: all_reduce of "
        f"{format_size(SMALL_BYTES)} and of {format_size(plan.size_bytes)}, medians of {turns} turns"
    )


End = TypeVar("End")


def circle_rounds(ends: Sequence[End]) -> tuple[tuple[tuple[End, End], ...], ...]:
    """Return n - 1 rounds of n / 2 pairs, or for odd n, n rounds with a different end sitting out each time.

    This is the circle method: one end stays, the others rotate around the table, and opposite seats form a pair. A pair
    keeps the order in which its ends were given.
    """
    if len(ends) < 2:
        return ()
    seats = len(ends) + len(ends) % 2
    table = list(range(seats))
    rounds = []
    for _ in range(seats - 1):
        facing = sorted((min(pair), max(pair)) for pair in zip(table, reversed(table[seats // 2 :]), strict=False))
        rounds.append(tuple((ends[first], ends[second]) for first, second in facing if second < len(ends)))
        table = [table[0], table[-1], *table[1:-1]]
    return tuple(rounds)
