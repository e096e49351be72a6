"""Clues: what a rank's process shows about why it makes no progress or died, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.words import grouped, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.facts import Rank

    from ddpdoctor.rules.progress.job_state import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """One observation. ``said`` is the text after "rank 1: "; the fix replaces that of the finding."""

    said: str
    fix: str = ""


def sentences(found: Mapping[int, Iterable[Clue]]) -> list[str]:
    """Return what was seen of each rank, in the given order; what several ranks share is said once."""
    merged = grouped((clue.said, number) for number, clues in found.items() for clue in clues)
    return [f"{rank_list(numbers)}: {said}" for said, numbers in merged.items()]


def fix_of(clues: Iterable[Clue], default: str) -> str:
    """Return the fix of the first clue that has one."""
    return next((clue.fix for clue in clues if clue.fix), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRole:
    """What a process of a host is to the job: "rank 0", "a child of rank 0", "process 4711"."""

    name: str
    detail: str

    @property
    def words(self) -> str:
        """The name, with further details in parentheses."""
        return f"{self.name} ({self.detail})" if self.detail else self.name


def find_owner(job: JobState, host: str, pid: int | None, command: str) -> ProcessRole:
    """Return what a process of a host is to the job."""
    if pid is None:
        return ProcessRole(name="a process on another host or in another container", detail="")
    for number in sorted(job.states):
        rank = job.rank(number)
        if rank.host != host:
            continue
        if rank.pid == pid:
            return ProcessRole(name=f"rank {number}", detail=f"process {pid}")
        if pid in children_of(rank):
            return ProcessRole(name=f"a child of rank {number}", detail=f"process {pid}")
    return ProcessRole(name=f"process {pid}", detail=command)


def children_of(rank: Rank) -> frozenset[int]:
    """Return the ids of the processes below a rank."""
    return frozenset(child.pid for child in rank.children)
