"""Clues: what a rank's process shows of the reason for which it stands still or died, with what to do about it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.facts import Rank

    from .scene import Scene

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """One thing that was seen. ``said`` follows on "rank 1: "; the fix replaces that of the finding."""

    said: str
    fix: str = ""


def sentences(found: Mapping[int, Iterable[Clue]]) -> list[str]:
    """Return what was seen of each rank, in the order given; what several ranks share is told once."""
    merged: dict[str, list[int]] = defaultdict(list)
    for number, clues in found.items():
        for clue in clues:
            merged[clue.said].append(number)
    return [f"{rank_list(numbers)}: {said}" for said, numbers in merged.items()]


def fix_of(clues: Iterable[Clue], default: str) -> str:
    """Return the fix of the first clue that has one."""
    return next((clue.fix for clue in clues if clue.fix), default)


def size_words(size_bytes: int) -> str:
    """Return "61.0 GiB", or "512 MiB" below one."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


def owner_words(scene: Scene, host: str, pid: int | None, command: str) -> str:
    """Return who a process of a host is: "rank 0 (process 4711)", "a child of rank 0 (…)", or its command."""
    if pid is None:
        return "a process that cannot be seen from here (of another host or container)"
    for number in sorted(scene.states):
        rank = scene.rank(number)
        if rank.host != host:
            continue
        if rank.pid == pid:
            return f"rank {number} (process {pid})"
        if pid in children_of(rank):
            return f"a child of rank {number} (process {pid})"
    return f"process {pid}" + (f" ({command})" if command else "")


def children_of(rank: Rank) -> frozenset[int]:
    """Return the processes below a rank."""
    return frozenset(child.pid for child in rank.children)
