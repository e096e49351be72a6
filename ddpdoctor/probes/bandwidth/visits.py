"""Measures small groups of ranks separately and repeatedly, so that a brief disturbance does not blame a rank."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth.group import RankGroup
from ddpdoctor.probes.bandwidth.timing import Effort, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[str, float, float | None], None]

VISITS = 9
"""Our choice: turns. The rules ask for slowness in two of three turns, or four of five, and compare only within a turn.
On a busy machine with two cores, a healthy pair's latency doubles in one turn of three."""
LEAST_VISITS = 5
"""The turns that are made even if the budget is used up."""
SMALL_BYTES = 1024
LEAST_SLOT_S = 0.08
"""Our choice: enough for dozens of small calls and ten large ones over Gloo."""
MOST_SLOT_S = 0.15
"""Our choice: more turns are better than longer ones."""
FIRST_SHARE = 0.5
"""Share of the budget for the first turn, which also opens connections. Units not reached by then are left out."""
LEAST_SLOTS = 3
"""Slots that are always measured. The three pairs of three ranks are enough to find the slow one."""
KEPT = 16
"""Our choice: how many groups a rank keeps open. An NCCL communicator holds tens of MiB of GPU memory, a Gloo group two
threads. Beyond this number, each group is closed after its visit and created again for the next."""
DTYPE = "float32"
ELEMENT_BYTES = 4
WARMUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Ranks that are measured together."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitPlan:
    """The order of measurement: the units of a slot at once, the slots one by one. The same on all ranks."""

    phase: str
    slots: tuple[tuple[Unit, ...], ...]
    size_bytes: int
    """The size of the calls that measure bandwidth."""
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitVisit:
    """One measurement of one unit."""

    latency_us: float
    """For calls of SMALL_BYTES."""
    busbw_gb_s: float
    """For calls of the plan's size."""
    late_us: tuple[float, ...]
    """For each of its ranks, how much later than the others it came to the barriers of the small calls."""


def visit_units(world: RankGroup, plan: VisitPlan, progress: Progress) -> Iterator[list[tuple[Unit, UnitVisit]]]:
    """Measure all units in turn, ``VISITS`` times, and yield each slot's visits on every rank.

    If there is no time for all slots or turns, rank 0's clock decides for all ranks.
    """
    groups = _Groups(world)
    started_s, elapsed_s = time.monotonic(), 0.0
    slots, done = plan.slots, 0
    for turn in range(VISITS):
        if turn >= LEAST_VISITS and elapsed_s > plan.budget_s:
            break
        slot_s = slot_seconds(plan.budget_s - elapsed_s, (VISITS - turn) * len(slots))
        for number, slot in enumerate(slots, start=1):
            what = _name(slot)
            _show_progress(progress, f"{plan.phase}: {what}", done / (VISITS * len(slots)), elapsed_s)
            world.tracker.at(plan.phase, f"{what}, visit {turn + 1} of {VISITS}", allowance_s=slot_s)
            mine = _visit_mine(groups, slot, plan.size_bytes, slot_s)
            rows = world.gather([time.monotonic() - started_s, *mine])
            elapsed_s, done = rows[0][0], done + 1
            yield [(unit, _read_visit(unit, rows)) for unit in slot]
            if turn == 0 and number >= LEAST_SLOTS and elapsed_s > FIRST_SHARE * plan.budget_s:
                slots = slots[:number]
                break
    groups.close()


def slot_seconds(budget_s: float, slots: int) -> float:
    """Return the time for each slot."""
    return min(max(budget_s / max(slots, 1), LEAST_SLOT_S), MOST_SLOT_S)


def _name(slot: Sequence[Unit]) -> str:
    more = f" and {len(slot) - 1} more at once" if len(slot) > 1 else ""
    return f"{slot[0].name}{more}"


def _show_progress(progress: Progress, what: str, share: float, elapsed_s: float) -> None:
    progress(what, share, elapsed_s / share - elapsed_s if share else None)


def _visit_mine(groups: _Groups, slot: Sequence[Unit], size_bytes: int, slot_s: float) -> list[float]:
    """Take part in this rank's unit of the slot. Return latency, bandwidth and own lateness; zeros without a unit."""
    mine = [0.0] * 3
    for group in groups.of(slot):
        small = measure(group, _case(SMALL_BYTES), Effort(warmup=WARMUP, seconds=slot_s / 3))
        large = measure(group, _case(size_bytes), Effort(warmup=WARMUP, seconds=slot_s * 2 / 3))
        mine = [
            small.measurement.p50_us,
            large.measurement.busbw_gb_s or 0.0,
            _own_lateness(small.waits_us, group.index),
        ]
    groups.release(slot)
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


def _read_visit(unit: Unit, rows: Sequence[Sequence[float]]) -> UnitVisit:
    _, latency_us, busbw_gb_s, _ = rows[unit.ranks[0]]
    return UnitVisit(
        latency_us=latency_us,
        busbw_gb_s=busbw_gb_s,
        late_us=tuple(rows[rank][-1] for rank in unit.ranks),
    )


class _Groups:
    """The groups of the units. All ranks create all of them in the same order, because creating one is collective."""

    def __init__(self, world: RankGroup) -> None:
        self._world = world
        self._rank = world.ranks[world.index]
        self._handles: dict[tuple[int, ...], Any] = {}

    def of(self, slot: Sequence[Unit]) -> list[RankGroup]:
        """Create the groups that are not open yet, and return this rank's own group of the slot, if any."""
        for unit in slot:
            if unit.ranks not in self._handles:
                self._handles[unit.ranks] = self._open(unit.ranks)
        return [self._group(unit.ranks) for unit in slot if self._rank in unit.ranks]

    def release(self, slot: Sequence[Unit]) -> None:
        """Close the groups of a slot if some rank has too many. All ranks know all groups and decide the same."""
        held = Counter(rank for ranks in self._handles for rank in ranks)
        if max(held.values()) > KEPT:
            self._close([unit.ranks for unit in slot])

    def close(self) -> None:
        """Close all groups."""
        self._close(list(self._handles))

    def _close(self, closing: Sequence[tuple[int, ...]]) -> None:
        import torch.distributed as dist

        for ranks in closing:
            handle = self._handles.pop(ranks)
            if self._rank in ranks:
                dist.destroy_process_group(handle)

    def _open(self, ranks: tuple[int, ...]) -> Any:
        import torch.distributed as dist

        self._world.tracker.enter("new_group", self._world.ranks)
        with _unbound():
            device = self._world.device if self._world.backend == "nccl" else None
            handle = dist.new_group(list(ranks), backend=self._world.backend, device_id=device)
        self._world.tracker.leave()
        return handle

    def _group(self, ranks: tuple[int, ...]) -> RankGroup:
        world = self._world
        return RankGroup(self._handles[ranks], ranks, world.device, world.backend, world.tracker)


@contextmanager
def _unbound() -> Iterator[None]:
    """Let a new group be created by its own ranks alone.

    If the default group is bound to a device, torch splits its communicator, which needs all its ranks. Ranks outside
    the new group call ``perform_nocolor_split``, which holds the GIL until every other rank comes.
    """
    import torch.distributed as dist

    everybody = dist.group.WORLD
    assert everybody is not None
    bound = everybody.bound_device_id
    everybody.bound_device_id = None
    try:
        yield
    finally:
        everybody.bound_device_id = bound
