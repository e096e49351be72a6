"""Jobs that wait only for themselves: each waiting rank waits for one that waits too."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .late import find_late
from .scene import Cause
from .states import Doing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .groups import Group, Position
    from .scene import Scene


def closed(scene: Scene) -> tuple[int, ...] | None:
    """Return the waiting ranks if none waits for anybody outside and nothing else explains the wait, else None."""
    waits = scene.waits
    if scene.cause is not Cause.HANG or not waits.waiters or waits.blockers or (waits.absent and scene.sees_all):
        return None
    frozen = any(state.doing is Doing.STOPPED for state in scene.states.values())
    return None if frozen or find_late(scene) else waits.waiters


def stalled_in(scene: Scene) -> tuple[Position, ...]:
    """Return the pending collectives that all ranks of their group have come to: the earliest one of each group.

    A rank may be done with it and wait in a later one: the root of a broadcast returns before the data have arrived.
    """
    by_group: dict[Group, list[int]] = defaultdict(list)
    for number, position in sorted(scene.positions.items()):
        if number in position.group.members:
            by_group[position.group].append(number)
    found = []
    for group, inside in by_group.items():
        waited_in = {scene.positions[number] for number in inside}
        if len(inside) == len(group.members) and (len(waited_in) == 1 or _numbered(scene, inside)):
            found.append(min(waited_in, key=lambda position: position.seq or 0))
    return tuple(found)


def _numbered(scene: Scene, numbers: Iterable[int]) -> bool:
    """Return whether it is certain in which collective each rank is; the counter of C++ may be off by one."""
    positions, states = scene.positions, scene.states
    return all(positions[n].seq is not None and states[n].doing is Doing.COLLECTIVE for n in numbers)
