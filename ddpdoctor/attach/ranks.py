"""Tells which processes are the ranks: not their loader workers, and not the shells and launchers above them.

All of a rank's descendants inherit RANK, and a launcher in a Slurm task has a rank number of its own. So processes with
the same variables that descend from each other are one family, of which one process is the rank. A family from which
a process with other variables descends is a launcher's, unless it has joined a process group itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.attach.candidates import Candidate, read_candidate
from ddpdoctor.collect.bounded import ask_side_by_side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.proc import Process

STUCK_LIMIT_S = 1.0
"""Our choice: reading the environment of a process waits for the lock of its memory, which a stuck driver may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenProcess:
    """A process that is a rank; ``rank`` is None if no variable says which one."""

    process: Candidate
    rank: int | None


def choose_ranks(processes: Mapping[int, Process], own: frozenset[int] = frozenset()) -> list[ChosenProcess]:
    """Return the ranks among these processes; ``own`` are processes of ours, which are none."""
    alive = [one for pid, one in processes.items() if one.state not in "ZX" and pid not in own]
    seen = {one.pid: one for one in _read_candidates(alive) if one.env}  # else it is another user's
    numbered = {pid: one for pid, one in seen.items() if one.rank is not None}
    families: dict[int, list[Candidate]] = {}
    launching: set[int] = set()
    for one in numbered.values():
        top, above = _climb(one, numbered, processes)
        families.setdefault(top.pid, []).append(one)
        if above is not None:
            launching.add(_climb(above, numbered, processes)[0].pid)
    chosen = [rank for top, family in families.items() for rank in _of_family(top, family, launching=top in launching)]
    return [*chosen, *_without_number(seen, numbered, processes)]


def _read_candidates(alive: list[Process]) -> list[Candidate]:
    """Read all of them; what cannot be read of a process that is stuck in the kernel is left out."""
    stuck = {str(one.pid): partial(read_candidate, one) for one in alive if one.state == "D"}
    replies = ask_side_by_side(stuck, STUCK_LIMIT_S).values()
    others = [read_candidate(one) for one in alive if one.state != "D"]
    return [*others, *(reply.value for reply in replies if reply.value is not None)]


def _climb(
    one: Candidate, numbered: Mapping[int, Candidate], processes: Mapping[int, Process]
) -> tuple[Candidate, Candidate | None]:
    """Return the top of a process's family, and the process of another family above it."""
    while True:
        above = _nearest_above(one, numbered, processes)
        if above is None or not (one.has_identity_of(above) or (above.joined and above.rank == one.rank)):
            return one, above
        one = above


def _nearest_above(
    one: Candidate, numbered: Mapping[int, Candidate], processes: Mapping[int, Process]
) -> Candidate | None:
    pid, passed = one.process.ppid, {one.pid}
    while pid in processes and pid not in passed:
        if pid in numbered:
            return numbered[pid]
        passed.add(pid)
        pid = processes[pid].ppid
    return None


def _of_family(top: int, family: list[Candidate], *, launching: bool) -> Iterable[ChosenProcess]:
    family.sort(key=lambda one: (one.pid != top, one.process.start_ticks, one.pid))
    joined = [one for one in family if one.joined]
    if len(joined) > 1 and not family[0].joined and all(one.is_spawned for one in joined):
        return [ChosenProcess(process=one, rank=None) for one in _with_siblings(joined, family)]
    if joined:
        return [ChosenProcess(process=joined[0], rank=joined[0].rank)]
    if launching:
        return []
    pythons = [one for one in family if one.is_python]
    best = next((one for one in pythons if one.has_torch), None)
    if best is None:
        # A rank that still loads torch. Without RANK, it may be any program in a step of Slurm.
        best = next((one for one in pythons if {"RANK", "WORLD_SIZE"} <= one.env.keys()), None)
    return [] if best is None else [ChosenProcess(process=best, rank=best.rank)]


def _without_number(
    seen: Mapping[int, Candidate], numbered: Mapping[int, Candidate], processes: Mapping[int, Process]
) -> list[ChosenProcess]:
    """Return processes that have joined a group and have no variable of a rank, as those of mp.spawn."""
    others = [one for pid, one in seen.items() if pid not in numbered]
    outside = [one for one in others if _nearest_above(one, numbered, processes) is None]
    joined = [one for one in outside if one.joined]
    return [ChosenProcess(process=one, rank=None) for one in _with_siblings(joined, outside)]


def _with_siblings(joined: list[Candidate], others: Iterable[Candidate]) -> list[Candidate]:
    """Add the processes that were spawned beside one that has joined: they may be stuck before."""
    parents = {one.process.ppid for one in joined if one.is_spawned}
    beside = [one for one in others if one.process.ppid in parents and one.is_spawned and not one.joined]
    return sorted([*joined, *(one for one in beside if one.has_torch)], key=lambda one: one.pid)
