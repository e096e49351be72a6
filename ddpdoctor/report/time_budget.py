"""The time budget of a step: one row a phase, on the critical rank, the median rank and the worst rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.speed import Budget, NetworkUse
from ddpdoctor.report.blocks import Column, Heading, Table, Text
from ddpdoctor.report.predictions import prediction_blocks

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.speed import PhaseRow
    from ddpdoctor.report.blocks import Section

SHOWN_SHARE = 0.001
"""Phases below this share of the step on every rank are left out."""


def speed_sections(report: Report) -> tuple[Section, ...]:
    """Return the section with the time budget, or nothing if the user did not ask for it.

    Raises:
        UserError: the report is damaged.
    """
    said = speed_data(report)
    if not said.get("asked"):
        return ()
    budget = read_budget(report)
    if budget is None:
        return ((Heading(text="time of a step"), Text(text=f"cannot tell: {said.get('reason', 'unknown')}", indent=2)),)
    shown: Section = (
        Heading(text=_title(budget)),
        _table(budget),
        *(Text(text=line, indent=2) for line in (*_lines(budget), *_network(report))),
    )
    predicted = prediction_blocks(report)
    return (shown, predicted) if predicted else (shown,)


def speed_data(report: Report) -> dict[str, Any]:
    """Return what a report says of speed. Empty if it says nothing, or is damaged there."""
    plain = report.data.get("speed")
    return plain if isinstance(plain, dict) else {}


def read_budget(report: Report) -> Budget | None:
    """Return the time budget in a report, or None if it has none.

    Raises:
        UserError: the report is damaged.
    """
    plain = speed_data(report).get("budget")
    try:
        return None if plain is None else decode(Budget, plain)
    except (WrongValue, TypeError) as error:
        raise UserError(f"the time budget in the report cannot be read: {error}") from error


def _title(budget: Budget) -> str:
    seen = count_of(budget.count, "step")
    where = " on the GPU" if budget.is_device else ""
    mean = "" if budget.steps == budget.count else f", mean of {budget.steps}"
    return f"time of a step{where}: {ms(budget.wall_ms)} ({seen}{mean})"


def _table(budget: Budget) -> Table:
    rows = [row for row in budget.phases if is_shown(row, budget)]
    return Table(
        indent=2,
        columns=(
            Column(name="phase", cells=tuple(row.phase for row in rows), align="left"),
            Column(name="critical rank", unit="ms", cells=tuple(number(row.critical_ms) for row in rows)),
            Column(name="share", cells=tuple(f"{row.critical_ms / budget.wall_ms:.1%}" for row in rows)),
            Column(name="median rank", unit="ms", cells=tuple(number(row.median_ms) for row in rows)),
            Column(name="worst rank", unit="ms", cells=tuple(_worst(row) for row in rows)),
        ),
    )


def is_shown(row: PhaseRow, budget: Budget) -> bool:
    """Return whether a phase takes enough of the step on any rank."""
    return max(row.critical_ms, row.worst_ms) >= SHOWN_SHARE * budget.wall_ms


def _worst(row: PhaseRow) -> str:
    return f"{number(row.worst_ms)} (rank {row.worst_rank})"


def _lines(budget: Budget) -> list[str]:
    shares = f"communication {budget.communication_share:.0%}, waiting for slower ranks {budget.waiting_share:.0%}"
    lines = [f"{shares} (median rank): scaling efficiency is at most {budget.efficiency_bound:.0%}"]
    if budget.overlap is not None:
        lines.append(f"backward hides about {budget.overlap:.0%} of the reduction")
    if budget.samples_per_s is not None:
        lines.append(f"{budget.samples_per_s:,.0f} samples/s over all ranks")
    if budget.own_ms >= SHOWN_SHARE * budget.wall_ms:
        lines.append(f"ddpdoctor's own checks of replicas take {ms(budget.own_ms)} a step more, and are not included")
    return lines


def _network(report: Report) -> list[str]:
    plain = speed_data(report).get("network")
    try:
        words = None if plain is None else network_words(decode(NetworkUse, plain))
    except (WrongValue, TypeError) as error:
        raise UserError(f"the use of the network in the report cannot be read: {error}") from error
    return [] if words is None else [words]


def network_words(use: NetworkUse) -> str | None:
    """Say what the network could carry and what the job uses of it, or nothing if one of them is unknown."""
    if use.limit_gb_s is None:
        return None
    return (
        f"the network could carry {use.limit_gb_s:.3g} GB/s ({use.source}); the reductions of this job use "
        f"{use.used_gb_s:.2g} GB/s on average ({format_about(use.step_bytes)} a step)"
    )


def number(value: float) -> str:
    """Return a number with about three digits, such as "12.3"."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ms(value: float) -> str:
    """Return a time in milliseconds, such as "12.3 ms"."""
    return f"{number(value)} ms"
