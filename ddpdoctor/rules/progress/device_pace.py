"""Finds a rank that comes last to its group's collectives, by how long their kernels ran on each device.

A collective's kernel runs from the time its own rank comes until the last rank comes, so the last rank's kernel is the
shortest. torch times kernels only if asked to (``TORCH_NCCL_ENABLE_TIMING=1``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from .groups import group_table, own_state
from .pace import COST_MS, COST_SHARE, LATE_SHARE, MIN_STEPS
from .scene import moment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .groups import Group
    from .scene import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class LateDevice:
    """A rank whose kernels are the shortest of its group, in step after step."""

    rank: int
    group: Group
    last_in: int
    """In how many collectives it came after all others, by ``COST_MS`` or more."""
    steps: int
    """About how many steps the timed collectives cover."""
    cost_ms: float
    """The median time that the others waited in those collectives."""
    step_ms: float
    """Upper bound of the usual step: it includes the start of the job."""


def find_late_device(scene: Scene) -> LateDevice | None:
    """Return the first rank that the others wait for on their devices, or None if there is none or no times exist."""
    for group, times in _times(scene).items():
        found = _late_in(scene, group, times)
        if found is not None:
            return found
    return None


def _times(scene: Scene) -> dict[Group, dict[int, dict[int, float]]]:
    """Return how many milliseconds each collective ran, by group, number and rank."""
    table = group_table(scene.job)
    found: dict[Group, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for rank in scene.job.ranks:
        for time in rank.device_times:
            group = table.get((rank.rank, time.group))
            if group is not None and len(group.members) > 1:
                found[group][time.seq][rank.rank] = time.ran_ms
    return found


def _late_in(scene: Scene, group: Group, times: Mapping[int, Mapping[int, float]]) -> LateDevice | None:
    whole = [ran for ran in times.values() if len(ran) == len(group.members)]
    a_step, step_ms = _pace(scene, group)
    steps = int(len(whole) / a_step)
    if steps < MIN_STEPS:
        return None
    costs: dict[int, list[float]] = defaultdict(list)
    for ran in whole:
        least, second = sorted(ran.items(), key=lambda item: item[1])[:2]
        if second[1] - least[1] >= COST_MS:
            costs[least[0]].append(second[1] - least[1])
    often = Counter({number: len(found) for number, found in costs.items()}).most_common(1)
    if not often or often[0][1] < LATE_SHARE * steps:
        return None
    number, last_in = often[0]
    cost_ms = median(costs[number])
    if cost_ms < COST_SHARE * step_ms:
        return None
    return LateDevice(rank=number, group=group, last_in=last_in, steps=steps, cost_ms=cost_ms, step_ms=step_ms)


def _pace(scene: Scene, group: Group) -> tuple[float, float]:
    """Return how many collectives of a group make up a step, and the length of a step in ms; both are upper bounds."""
    members = [scene.rank(number) for number in group.members if number in scene.states]
    steps = max(1, min((rank.steps for rank in members), default=1))
    begun = [state.enqueued for rank in members if (state := own_state(rank, group.name)) is not None]
    lived_ns = [(rank.ended_ns or moment(scene.job)) - (rank.started_ns or 0) for rank in members]
    return max(1.0, max(begun, default=0) / steps), max(lived_ns, default=0) / 1e6 / steps
