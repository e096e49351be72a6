"""Which dimension of a device mesh ranks wait in, and for whom they wait there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import name_list, rank_list

from .groups import Group, Position, dim_words, group_words, reached
from .words import verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .scene import Scene
    from .states import State


def mesh_group(scene: Scene, number: int) -> Group | None:
    """Return the mesh group that a rank waits in, or None if it waits in none or in the group of all ranks."""
    position = scene.positions.get(number)
    if position is None or not position.group.mesh_dim or len(position.group.members) == scene.world:
        return None
    return position.group


def dim_of(scene: Scene, number: int) -> str:
    """Return the mesh dimension in which a rank waits, or "" if there is none."""
    group = mesh_group(scene, number)
    return group.mesh_dim if group is not None else ""


def late_members(states: Mapping[int, State], position: Position) -> tuple[int, ...]:
    """Return the members of a group that have not come to this collective."""
    found = []
    for member in position.group.members:
        state = states.get(member)
        come = reached(state, position.group.name) if state is not None else 0
        if come is not None and position.seq is not None and come < position.seq:
            found.append(member)
    return tuple(found)


def mesh_words(scene: Scene, ranks: Iterable[int]) -> str:
    """Return " in the dp group (ranks 1 and 3) for rank 3"; for several groups of a dimension, one phrase for all."""
    positions = {scene.positions[n] for n in ranks if mesh_group(scene, n) is not None}
    groups = {position.group for position in positions}
    if not groups:
        return ""
    late = {n for p in positions for n in late_members(scene.states, p)}
    first = min(groups, key=lambda group: group.members)
    where = group_words(first, scene.world) if len(groups) == 1 else f"their {dim_words(first)} groups"
    return f" in {where}" + (f" for {rank_list(late)}" if late else "")


def behind_words(scene: Scene, blamed: tuple[int, ...], waiters: list[int]) -> str | None:
    """Return who waits in which dimension's group for the blamed ranks, and who waits for those; None without a mesh.

    For example "while rank 1 waits for it in all_reduce of the tp group, and ranks 2 and 3 wait for that".
    """
    groups = {n: mesh_group(scene, n) for n in waiters}
    direct = [n for n, group in groups.items() if group is not None and set(group.members) & set(blamed)]
    if not direct:
        return None
    whom = "it" if len(blamed) == 1 else "them"
    dims = sorted({dim_words(group) for n in direct if (group := groups[n]) is not None})
    ops = sorted({call.op for n in direct if (call := scene.states[n].call) is not None})
    what = f"in {ops[0]} of" if len(ops) == 1 else "in"
    text = f"while {rank_list(direct)} {verb(direct, 'waits', 'wait')} for {whom} {what} the {name_list(dims)} group"
    text += "s" if len(dims) > 1 else ""
    rest = [n for n in waiters if n not in direct]
    return f"{text}, and {rank_list(rest)} {verb(rest, 'waits', 'wait')} behind that" if rest else text
