"""Grids of where the time of a step goes: by phase, and by rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.rank_words import format_numbers
from ddpdoctor.report.blocks import Grid, GridCell
from ddpdoctor.report.grids.build import MARK, MAX_COLUMNS, grid_by_member, linear_level, not_shown
from ddpdoctor.report.time_budget import is_shown, ms, number, read_budget, speed_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.speed import Budget, PhaseRow
    from ddpdoctor.report.blocks import Section

STRAGGLER = "DD610"
SPEED = "DD8"
NAMED = f"{MARK}a rank that a finding about speed names"
PHASES = {
    "before_forward_ms": "before forward",
    "forward_ms": "forward",
    "between_ms": "between forward and backward",
    "backward_ms": "backward",
    "waited_ms": "waits for other ranks",
    "step_ms": "the whole step",
}
"""Names of the medians that a report has of each rank. The first four are without waiting."""


def speed_pictures(report: Report) -> tuple[Section, ...]:
    """Return a grid of phases by ranks if the user asked for speed or a rank is slow. Nothing if they are not known."""
    asked = bool(speed_data(report).get("asked"))
    budgets = _budget_pictures(report) if asked else ()
    slow = any(one.code == STRAGGLER for one in report.findings)
    return (*budgets, *(_pace_pictures(report) if asked or slow else ()))


def _budget_pictures(report: Report) -> tuple[Section, ...]:
    try:
        budget = read_budget(report)
    except UserError:
        return ()
    phases = [] if budget is None else [row for row in budget.phases if is_shown(row, budget)]
    if budget is None or not phases:
        return ()
    grid = Grid(
        title="time of a step by phase, in ms",
        rows=tuple(row.phase for row in phases),
        columns=("critical rank", "median rank", "worst rank"),
        cells=tuple(_budget_cells(row, budget) for row in phases),
        row_name="phase",
        column_name="rank",
        legend=("The darker, the more of the step.",),
    )
    return ((grid,),)


def _budget_cells(row: PhaseRow, budget: Budget) -> tuple[GridCell, ...]:
    ranks = {"worst": f" on rank {row.worst_rank}"}
    values = {"critical": row.critical_ms, "median": row.median_ms, "worst": row.worst_ms}
    return tuple(
        GridCell(
            text=number(value),
            about=f"{ms(value)}, {value / (budget.wall_ms or 1):.1%} of the step{ranks.get(name, '')}",
            level=linear_level(value, budget.wall_ms),
        )
        for name, value in values.items()
    )


def _pace_pictures(report: Report) -> tuple[Section, ...]:
    """Return the grid of phases by ranks. Of many ranks, those that compute for longest."""
    paces = _read_paces(report.data.get("steps"))
    if len(paces) < 2:
        return ()
    slowest = sorted(paces, key=lambda rank: paces[rank]["waited_ms"] - paces[rank]["step_ms"])
    shown = {rank: paces[rank] for rank in sorted(slowest[:MAX_COLUMNS])}
    named = {rank for one in report.findings if one.code.startswith((STRAGGLER, SPEED)) for rank in one.ranks}
    longest = max(pace["step_ms"] for pace in shown.values())

    def name(ranks: Sequence[int]) -> str:
        return (MARK if named.intersection(ranks) else "") + format_numbers(ranks)

    grid = grid_by_member(
        "usual step by rank, in ms",
        [
            (label, {rank: _pace_cell(pace[key], longest) for rank, pace in shown.items()})
            for key, label in PHASES.items()
        ],
        shown,
        name,
        axes=("phase", "rank"),
        legend=(*((NAMED,) if named & shown.keys() else ()), *not_shown(len(paces) - len(shown), "rank")),
    )
    return ((grid,),)


def _pace_cell(value: float, longest: float) -> GridCell:
    return GridCell(text=number(value), about=ms(value), level=linear_level(value, longest))


def _read_paces(rows: object) -> dict[int, Mapping[str, float]]:
    """Return the medians of each rank. A row that lacks one, as in a damaged report, is left out."""
    known: dict[int, Mapping[str, float]] = {}
    for row in rows if isinstance(rows, list) else ():
        rank: Any = row.get("rank") if isinstance(row, dict) else None
        if type(rank) is int and all(_is_number(row.get(key)) for key in PHASES):
            known[rank] = row
    return known


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value)  # type: ignore[arg-type]
