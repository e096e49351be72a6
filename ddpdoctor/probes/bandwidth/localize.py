"""Finds a slow rank, link or node: measures pairs of ranks and of nodes repeatedly, because of brief disturbances."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ddpdoctor.model.bandwidth import Case, Collective, Mode, NodeResult, Pair
from ddpdoctor.model.words import format_size, grouped
from ddpdoctor.probes.bandwidth.collectives import RankGroup
from ddpdoctor.probes.bandwidth.timing import Effort, coefficient_of_variation, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpdoctor.probes.bandwidth.timing import ResultLog

    Progress = Callable[[str, float, float | None], None]

# Our choice: turns. The rules ask for slowness in two of three turns, or four of five, and compare only within a turn.
# On a busy machine with two cores, a healthy pair's latency doubles in one turn of three.
VISITS = 9
LEAST_VISITS = 5  # the turns that are made even if the budget is used up
SMALL_BYTES = 1024
LEAST_SLOT_S = 0.08  # our choice: enough for dozens of small calls and ten large ones over Gloo
MOST_SLOT_S = 0.15  # our choice: more turns are better than longer ones
# Share of the budget for the first turn, which also opens connections. Units not reached by then are left out.
FIRST_SHARE = 0.5
LEAST_SLOTS = 3  # Slots that are always measured. The three pairs of three ranks are enough to find the slow one.
# Our choice: how many groups a rank keeps open. An NCCL communicator holds tens of MiB of GPU memory, a Gloo group two
# threads. Beyond this number, each group is closed after its visit and created again for the next.
KEPT = 16
DTYPE = "float32"
ELEMENT_BYTES = 4
WARMUP = 2
# Our choice: at this size two Gloo ranks reach nine tenths of their plateau on a usual machine (alpha 400 us, beta 1
# GB/s). Two GPUs over NVLink do at some tens of MiB.
PLATEAU_BYTES = {"gloo": 4 * 2**20, "nccl": 64 * 2**20}
LEAST_BYTES = 2**20  # our choice: below this, the time is mostly latency and says little about bandwidth
CALLS = 5  # our choice: how many calls of the large size a slot should have time for
End = TypeVar("End")
# One measurement of one unit: latency in us of calls of SMALL_BYTES, bus bandwidth in GB/s of calls of the large size,
# and how many us later than the others each of its ranks came to the barriers of the small calls.
UnitVisit = tuple[float, float, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Ranks that are measured together."""

    name: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...] = ()  # the one or two hosts whose ranks they are, if whole hosts are measured


def visit_units(
    world: RankGroup, phase: str, slots: Sequence[tuple[Unit, ...]], size_bytes: int, budget_s: float, show: Progress
) -> Iterator[tuple[Unit, UnitVisit]]:
    """Yield visits on every rank: slots one by one, its units in parallel, ``VISITS`` times if time permits."""
    groups = _Groups(world)
    started_s, elapsed_s = time.monotonic(), 0.0
    done = 0
    for turn in range(VISITS):
        if turn >= LEAST_VISITS and elapsed_s > budget_s:
            break
        slot_s = slot_seconds(budget_s - elapsed_s, (VISITS - turn) * len(slots))
        for number, slot in enumerate(slots, start=1):
            more = f" and {len(slot) - 1} more in parallel" if len(slot) > 1 else ""
            what = f"{slot[0].name}{more}"
            share = done / (VISITS * len(slots))
            show(f"{phase}: {what}", share, elapsed_s / share - elapsed_s if share else None)
            world.tracker.at(phase, f"{what}, visit {turn + 1} of {VISITS}", allowance_s=slot_s)
            # Take part in this rank's unit of the slot. Return latency, bandwidth and own lateness; zeros without a
            # unit.
            mine = [0.0] * 3
            for group in groups.of(slot):
                small = measure(group, _case(SMALL_BYTES), Effort(warmup=WARMUP, seconds=slot_s / 3))
                large = measure(group, _case(size_bytes), Effort(warmup=WARMUP, seconds=slot_s * 2 / 3))
                own, waits_us = group.index, zip(*small.waits_us, strict=True)
                late = [statistics.median([*call[:own], *call[own + 1 :]]) - call[own] for call in waits_us]
                busbw_gb_s = large.measurement.busbw_gb_s or 0.0
                mine = [small.measurement.p50_us, busbw_gb_s, float(statistics.median(late))]
            groups.close(slot)
            rows = world.gather([time.monotonic() - started_s, *mine])
            elapsed_s, done = rows[0][0], done + 1
            for unit in slot:
                _, latency_us, busbw_gb_s, _ = rows[unit.ranks[0]]
                yield unit, (latency_us, busbw_gb_s, tuple(rows[rank][-1] for rank in unit.ranks))
            if turn == 0 and number >= LEAST_SLOTS and elapsed_s > FIRST_SHARE * budget_s:
                slots = slots[:number]
                break
    groups.close()


def slot_seconds(budget_s: float, slots: int) -> float:
    return min(max(budget_s / max(slots, 1), LEAST_SLOT_S), MOST_SLOT_S)


def _case(size_bytes: int) -> Case:
    return Case(
        collective=Collective.ALL_REDUCE, dtype=DTYPE, redop="sum", mode=Mode.LATENCY, in_place=True,
        size_bytes=size_bytes, count=size_bytes // ELEMENT_BYTES,
    )  # fmt: skip


class _Groups:
    """The groups of the units. All ranks create all of them in the same order, because creating one is collective."""

    def __init__(self, world: RankGroup) -> None:
        self._world = world
        self._rank = world.ranks[world.index]
        self._handles: dict[tuple[int, ...], Any] = {}

    def of(self, slot: Sequence[Unit]) -> list[RankGroup]:
        """Create the groups that are not open yet. Return this rank's own group of the slot, if any."""
        world, handles, everybody = self._world, self._handles, dist.group.WORLD
        assert everybody is not None
        # A new group is created by its own ranks alone. If the default group is bound to a device, torch splits its
        # communicator, which needs all its ranks: those outside the new group call ``perform_nocolor_split``, which
        # holds the GIL until every other rank comes.
        bound, everybody.bound_device_id = everybody.bound_device_id, None
        try:
            for unit in slot:
                if unit.ranks not in handles:
                    world.tracker.enter("new_group", world.ranks)
                    device = world.device if world.backend == "nccl" else None
                    handles[unit.ranks] = dist.new_group(list(unit.ranks), backend=world.backend, device_id=device)
                    world.tracker.leave()
        finally:
            everybody.bound_device_id = bound
        own = [unit.ranks for unit in slot if self._rank in unit.ranks]
        return [RankGroup(handles[ranks], ranks, world.device, world.backend, world.tracker) for ranks in own]

    def close(self, slot: Sequence[Unit] | None = None) -> None:
        """Close the groups of a slot if some rank has too many open; without a slot, close all."""
        # All ranks know all groups and decide the same.
        held = Counter(rank for ranks in self._handles for rank in ranks)
        if slot is not None and max(held.values()) <= KEPT:
            return
        for ranks in list(self._handles) if slot is None else [unit.ranks for unit in slot]:
            handle = self._handles.pop(ranks)
            if self._rank in ranks:
                dist.destroy_process_group(handle)


def run_pairs(world: RankGroup, log: ResultLog, progress: Progress) -> None:
    if world.size < 2:
        log.note("--pairs: one rank has no pairs")
        return
    rounds = tuple(
        tuple(Unit(name=f"ranks {first} and {second}", ranks=(first, second)) for first, second in pairs)
        for pairs in circle_rounds(world.ranks)
    )
    hosts, pairs = log.hosts, dict[Unit, Pair]()
    for unit, visits, shared in _visit_all("pairs", rounds, world, log, progress):
        late_us = [statistics.median(late) for late in zip(*(late for _, _, late in visits), strict=True)]
        first, second = unit.ranks
        both = hosts[first], hosts[second]
        pairs[unit] = Pair(ranks=(first, second), hosts=both, late_us=(late_us[0], late_us[1]), **shared)
        log.pairs = list(pairs.values())


def run_nodes(world: RankGroup, log: ResultLog, progress: Progress) -> None:
    """Measure the ranks of every host and of every pair of hosts, into ``log.nodes``."""
    # All ranks of two hosts take part, not one of each, as in training, where a host may have a network card for each
    # GPU. A host with one rank has nothing to measure alone.
    members = grouped((host, rank) for rank, host in enumerate(log.hosts))
    if len(members) < 2:
        log.note("--by-node: all ranks are on one host, so it has nothing to compare")
        return
    rounds = [tuple(_node(members, host) for host in members if len(members[host]) > 1)]
    rounds += [tuple(_node(members, *pair) for pair in pairs) for pairs in circle_rounds(tuple(members))]
    nodes: dict[Unit, NodeResult] = {}
    for unit, _, shared in _visit_all("nodes", rounds, world, log, progress):
        host, *peers = unit.hosts
        nodes[unit] = NodeResult(host=host, peer=peers[0] if peers else None, ranks=unit.ranks, **shared)
        log.nodes = list(nodes.values())


def _node(members: dict[str, list[int]], *hosts: str) -> Unit:
    ranks = sorted(rank for host in hosts for rank in members[host])
    return Unit(name=f"node{'s' * (len(hosts) > 1)} {' and '.join(hosts)}", ranks=tuple(ranks), hosts=hosts)


def _visit_all(
    phase: str, rounds: Sequence[tuple[Unit, ...]], world: RankGroup, log: ResultLog, progress: Progress
) -> Iterator[tuple[Unit, list[UnitVisit], dict[str, Any]]]:
    """Yield each unit after each of its visits, with all its visits and the fields that pairs and nodes share."""
    # At the end, ``log`` notes how they were measured. Units run alone if there is time. When run at once, they share
    # cores, memory and network cards and can slow each other.
    settings, single = log.settings, tuple((unit,) for unit in chain.from_iterable(rounds))
    fits = VISITS * len(single) * LEAST_SLOT_S <= settings.budget_s
    slots = single if fits else tuple(filter(None, rounds))
    # The largest size whose calls should fit into a slot, judged by the whole group's times
    slot_s = slot_seconds(settings.budget_s, VISITS * len(slots))
    wanted = (Collective.ALL_REDUCE, Mode.LATENCY)
    times = [(result.size_bytes, result.p50_us) for result in log.results if (result.collective, result.mode) == wanted]
    size = max(LEAST_BYTES, min(settings.max_size_bytes, PLATEAU_BYTES.get(settings.backend, LEAST_BYTES)))
    if times:
        known_bytes, known_us = max(times)
        while size > LEAST_BYTES and CALLS * known_us * size / known_bytes > slot_s * 1e6:
            size //= 2
    size = int(world.agree(max(size, LEAST_BYTES)))
    alone = fits or all(len(slot) == 1 for slot in slots)
    seen: dict[Unit, list[UnitVisit]] = {}
    for unit, visit in visit_units(world, phase, slots, size, settings.budget_s, progress):
        visits = seen.setdefault(unit, [])
        visits.append(visit)
        latencies_us, busbws_gb_s, _ = zip(*visits, strict=True)
        shared = {
            "latency_us": statistics.median(latencies_us), "latencies_us": latencies_us, "alone": alone,
            "busbw_gb_s": statistics.median(busbws_gb_s), "busbws_gb_s": busbws_gb_s,
            "cv": coefficient_of_variation(busbws_gb_s),
        }  # fmt: skip
        yield unit, visits, shared
    left = "" if len(seen) == len(single) else f" (a budget of {settings.budget_s:g} s allows no more)"
    is_pairs = phase == "pairs"
    option, what = ("--pairs", "pairs of ranks") if is_pairs else ("--by-node", "nodes and pairs of nodes")
    how = "one at a time" if alone else "several in parallel, sharing cores and network cards"
    log.note(
        f"{option}: {len(seen)} of {len(single)} {what}{left}, {how}: all_reduce of {format_size(SMALL_BYTES)} and of "
        f"{format_size(size)}, medians of {max(map(len, seen.values()))} turns"
    )


def circle_rounds(ends: Sequence[End]) -> tuple[tuple[tuple[End, End], ...], ...]:
    """Return n - 1 rounds of n / 2 pairs, or for odd n, n rounds with a different end sitting out each time."""
    # This is the circle method: one end stays, the others rotate around the table, and opposite seats form a pair. A
    # pair keeps the order in which its ends were given.
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
