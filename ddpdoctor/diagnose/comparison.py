"""Builds the report that compares the speed of two runs, from their reports."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.diagnose.reports import make_report
from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import now
from ddpdoctor.model.speed import Budget, SpeedSettings
from ddpdoctor.model.speed_comparison import RunSpeed, SpeedComparison, UnequalSetting
from ddpdoctor.rules.speed.comparing import compare_phases, compare_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report

    Kind = TypeVar("Kind")

UNSET = "not set"
SETTINGS = {
    "rows": "rows of a rank's batch",
    "reductions": "reductions per step",
    "threads": "torch threads per rank",
    "cores": "cores",
    "workers": "loader workers per rank",
    "gradient_bytes": "gradients",
    "buckets": "buckets",
    "bucket_cap_bytes": "bucket_cap_mb",
    "finds_unused": "find_unused_parameters",
    "static_graph": "static_graph",
    "bucket_view": "gradient_as_bucket_view",
    "syncs_buffers": "broadcast_buffers",
}
"""By field of ``SpeedSettings``: its name in the report."""
_MIB = 2**20


def compare_reports(first: tuple[str, Report], second: tuple[str, Report]) -> Report:
    """Return the report that compares two runs, each given with its name.

    Raises:
        UserError: one of them has no time budget.
    """
    budgets = [_read_budget(name, report) for name, report in (first, second)]
    comparison = SpeedComparison(
        first=_run_speed(*first, budgets[0]),
        second=_run_speed(*second, budgets[1]),
        step=compare_steps(*budgets),
        phases=compare_phases(*budgets),
        unequal=tuple(_unequal(first[1], second[1])),
    )
    return make_report(
        command=("ddpdoctor", "report", first[0], "--compare", second[0]),
        started_at=now(),
        findings=(),
        checks=(),
        data={"comparison": encode(comparison)},
    )


def _read_budget(name: str, report: Report) -> Budget:
    said = report.data.get("speed")
    if report.job is None or not isinstance(said, dict):
        raise UserError(
            f"{name} has no training steps: it is not a run of `ddpdoctor wrap`",
            help="Compare two run folders that `ddpdoctor wrap` wrote.",
        )
    if said.get("budget") is None:
        raise UserError(
            f"{name} has no time budget: {said.get('reason', 'its report does not say why')}",
            help="Compare runs that were recorded for at least 20 training steps.",
        )
    budget = _decoded(Budget, name, said["budget"])
    if not budget.blocks_ms or not budget.wall_ms or not all(row.blocks_ms for row in budget.phases):
        raise UserError(
            f"{name} does not say how much its steps vary, so a difference cannot be told from noise",
            help="In a run folder, remove report.json: the budget is then made from what the ranks recorded.",
        )
    return budget


def _decoded(kind: type[Kind], name: str, plain: Any) -> Kind:
    try:
        return decode(kind, plain)
    except (WrongValue, TypeError) as error:
        raise UserError(f"{name}: the time budget in the report cannot be read: {error}") from error


def _run_speed(name: str, report: Report, budget: Budget) -> RunSpeed:
    assert report.job is not None
    return RunSpeed(
        name=name,
        wall_ms=budget.wall_ms,
        count=budget.count,
        status=report.job.status.value,
        ranks=report.job.world_size,
        samples_per_s=budget.samples_per_s,
        command=shlex.join(("ddpdoctor", *report.command[1:])) if report.command else "",
    )


def _unequal(first: Report, second: Report) -> Iterator[UnequalSetting]:
    """Yield the settings that both reports have, and in which they differ."""
    sides = [dict(settings_of_run(report)) for report in (first, second)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (side.get(name, UNSET) for side in sides)
        if a != b and (name in sides[0]) + (name in sides[1]) >= (1 if _is_variable(name) else 2):
            yield UnequalSetting(name=name, first=a, second=b)


def _is_variable(name: str) -> bool:
    """Return whether a setting is an environment variable: where one side lacks it, it is not set there."""
    return name.isupper()


def settings_of_run(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the settings that a report knows, by name. Raises ``UserError`` if they are damaged."""
    run = report.data.get("run") or {}
    job = report.job
    known = {
        "ranks": job and job.world_size,
        "nodes": job and job.nnodes,
        "torch": run.get("torch_version"),
        "TORCH_DISTRIBUTED_DEBUG": run.get("debug_level"),
    }
    yield from ((name, str(value)) for name, value in known.items() if value is not None)
    yield from ((str(name), str(value)) for name, value in (run.get("environment") or {}).items())
    plain = (report.data.get("speed") or {}).get("settings")
    if plain is not None:
        settings = _decoded(SpeedSettings, "the settings", plain)
        for one in fields(settings):
            if (value := getattr(settings, one.name)) is not None:
                yield SETTINGS[one.name], _words(one.name, value)


def _words(field: str, value: float) -> str:
    if isinstance(value, bool):
        return str(value)
    if field == "gradient_bytes":
        return format_size(int(value))
    return f"{value / _MIB:g}" if field == "bucket_cap_bytes" else f"{value:g}"
