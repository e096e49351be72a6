"""Shared by rules over processes: their ranks, merging equal problems, and showing variables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.node import Process
    from ddpdoctor.rules.answers import Problem


def ranks_of(processes: Iterable[Process]) -> tuple[int, ...]:
    """Return the sorted ranks of processes, without those that have no rank."""
    return tuple(sorted({process.rank for process in processes if process.rank is not None}))


def merge_equal(problems: Iterable[Problem]) -> list[Problem]:
    """Merge problems with the same summary and fix into one, with the ranks and hosts of all."""
    merged: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        key = (problem.summary, problem.fix)
        former = merged.setdefault(key, problem)
        merged[key] = replace(
            former,
            ranks=tuple(sorted({*former.ranks, *problem.ranks})),
            hosts=tuple(dict.fromkeys([*former.hosts, *problem.hosts])),
        )
    return list(merged.values())


def show_variables(process: Process, names: Iterable[str]) -> str:
    """Return "RANK=0, WORLD_SIZE=8" for the variables that are set."""
    return ", ".join(f"{name}={process.variables[name]}" for name in names if name in process.variables)
