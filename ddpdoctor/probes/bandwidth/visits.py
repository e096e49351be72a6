"""Small groups of ranks measured by themselves, each several times, so that a passing disturbance blames nobody."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth.group import Group
from ddpdoctor.probes.bandwidth.timing import Effort, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[str, float, float | None], None]

VISITS = 5
"""Ours: the best of them counts, so that only what is slow at every visit is slow. A machine of two cores that others
use doubles a pair's latency in one visit of three; in all of five it does so in one of two hundred."""
SMALL_BYTES = 1024
LEAST_SLOT_S = 0.1
"""Ours: a hundred small calls and ten large ones over Gloo, or a communicator of NCCL and its first calls."""
MOST_SLOT_S = 0.25
"""Ours: more time for a visit makes its median no steadier."""
FIRST_SHARE = 0.5
"""Of the budget, for the first visits, in which connections are made. What has not had its turn by then is left out."""
KEPT = 16
"""Ours: how many groups a rank keeps open. A communicator of NCCL holds tens of MiB of GPU memory, a group of Gloo
two threads; beyond this each is closed after its visit and made again for the next one."""
DTYPE = "float32"
ELEMENT_BYTES = 4
WARMUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Ranks that are measured together."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured when: the units of a slot at once, the slots one after another. The same on all ranks."""

    phase: str
    slots: tuple[tuple[Unit, ...], ...]
    size_bytes: int
    """For bandwidth."""
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One unit measured once."""

    latency_us: float
    """Of SMALL_BYTES."""
    time_us: float
    """Of the plan's size."""
    busbw_gb_s: float
    late_us: tuple[float, ...]
    """Of each of its ranks, by how much later than the others it came to the barriers of the small calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """All visits of one unit."""

    latency_us: float
    busbw_gb_s: float
    cv: float
    """Standard deviation over mean of the times at the plan's size, over visits."""
    late_us: tuple[float, ...]


def visit_units(world: Group, plan: Plan, progress: Progress) -> Iterator[list[tuple[Unit, Visit]]]:
    """Measure every unit ``VISITS`` times, going round all of them each time; yield after each slot, on every rank.

    Rank 0's clock decides for all ranks where the first round ends, if there is no time for all slots.
    """
    groups = _Groups(world, keep=_most_groups(plan.slots) <= KEPT)
    started_s, elapsed_s = time.monotonic(), 0.0
    slots, done = plan.slots, 0
    for turn in range(VISITS):
        slot_s = slot_seconds(plan.budget_s - elapsed_s, (VISITS - turn) * len(slots))
        for number, slot in enumerate(slots, start=1):
            what = " | ".join(unit.name for unit in slot)
            _tell(progress, f"{plan.phase}: {what}", done / (VISITS * len(slots)), elapsed_s)
            world.tracker.at(plan.phase, f"{what}, visit {turn + 1} of {VISITS}", allowance_s=slot_s)
            mine = _visit_mine(groups, slot, plan.size_bytes, slot_s)
            rows = world.gather([time.monotonic() - started_s, *mine])
            elapsed_s, done = rows[0][0], done + 1
            yield [(unit, _read_visit(unit, rows)) for unit in slot]
            if turn == 0 and elapsed_s > FIRST_SHARE * plan.budget_s:
                slots = slots[:number]
                break
    groups.close()


def sum_up(visits: Sequence[Visit]) -> Trend:
    """Return what a unit reached at its best visit, and how far its visits were apart."""
    times = [visit.time_us for visit in visits]
    return Trend(
        latency_us=min(visit.latency_us for visit in visits),
        busbw_gb_s=max(visit.busbw_gb_s for visit in visits),
        cv=statistics.pstdev(times) / statistics.fmean(times),
        late_us=tuple(statistics.median(late) for late in zip(*(visit.late_us for visit in visits), strict=True)),
    )


def slot_seconds(budget_s: float, slots: int) -> float:
    """Return the time for each of so many slots."""
    return min(max(budget_s / max(slots, 1), LEAST_SLOT_S), MOST_SLOT_S)


def _most_groups(slots: Sequence[Sequence[Unit]]) -> int:
    counts = Counter(rank for slot in slots for unit in slot for rank in unit.ranks)
    return max(counts.values(), default=0)


def _tell(progress: Progress, what: str, share: float, elapsed_s: float) -> None:
    progress(what, share, elapsed_s / share - elapsed_s if share else None)


def _visit_mine(groups: _Groups, slot: Sequence[Unit], size_bytes: int, slot_s: float) -> list[float]:
    """Take part in this rank's unit of the slot, if there is one; return latency, time, bandwidth and own lateness."""
    mine = [0.0] * 4
    for group in groups.of(slot):
        small = measure(group, _case(SMALL_BYTES), Effort(warmup=WARMUP, seconds=slot_s / 3))
        large = measure(group, _case(size_bytes), Effort(warmup=WARMUP, seconds=slot_s * 2 / 3))
        mine = [
            small.measurement.p50_us,
            large.measurement.p50_us,
            large.measurement.busbw_gb_s or 0.0,
            _own_lateness(small.waits_us, group.index),
        ]
    groups.release()
    return mine


def _case(size_bytes: int) -> Case:
    return Case(
        collective=Collective.ALL_REDUCE,
        dtype=DTYPE,
        redop="sum",
        mode=Mode.LATENCY,
        in_place=True,
        size_bytes=size_bytes,
        count=size_bytes // ELEMENT_BYTES,
    )


def _own_lateness(waits_us: Sequence[Sequence[float]], index: int) -> float:
    late: list[float] = []
    for call in zip(*waits_us, strict=True):
        others = [wait for place, wait in enumerate(call) if place != index]
        late.append(statistics.median(others) - call[index])
    return float(statistics.median(late))


def _read_visit(unit: Unit, rows: Sequence[Sequence[float]]) -> Visit:
    _, latency_us, time_us, busbw_gb_s, _ = rows[unit.ranks[0]]
    return Visit(
        latency_us=latency_us,
        time_us=time_us,
        busbw_gb_s=busbw_gb_s,
        late_us=tuple(rows[rank][-1] for rank in unit.ranks),
    )


class _Groups:
    """The groups of the units. All ranks make all of them, in the same order: to make one is a collective call."""

    def __init__(self, world: Group, *, keep: bool) -> None:
        self.world = world
        self.keep = keep
        self.handles: dict[tuple[int, ...], Any] = {}

    def of(self, slot: Sequence[Unit]) -> list[Group]:
        """Make what is not open yet, and return this rank's own group of the slot: one or none."""
        for unit in slot:
            if unit.ranks not in self.handles:
                self.handles[unit.ranks] = self._open(unit.ranks)
        rank = self.world.ranks[self.world.index]
        return [self._group(unit.ranks) for unit in slot if rank in unit.ranks]

    def release(self) -> None:
        """Close the groups, unless they are kept for the next visit."""
        if not self.keep:
            self.close()

    def close(self) -> None:
        """Close this rank's groups."""
        import torch.distributed as dist

        rank = self.world.ranks[self.world.index]
        for ranks, handle in self.handles.items():
            if rank in ranks:
                dist.destroy_process_group(handle)
        self.handles.clear()

    def _open(self, ranks: tuple[int, ...]) -> Any:
        import torch.distributed as dist

        self.world.tracker.enter("new_group", self.world.ranks)
        handle = dist.new_group(list(ranks), backend=self.world.backend)
        self.world.tracker.leave()
        return handle

    def _group(self, ranks: tuple[int, ...]) -> Group:
        world = self.world
        return Group(self.handles[ranks], ranks, world.device, world.backend, world.tracker)
