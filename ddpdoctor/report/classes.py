"""What is equal is said once: ranks that stand at the same place, findings and places that differ by rank only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.report.ranks import format_numbers, format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Finding, Place, RankRow, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks in the same state at the same line. ``place`` is empty where no line is known."""

    ranks: tuple[int, ...]
    host: str
    """Empty where they are on several hosts, or the job has one."""
    state: str
    place: str
    blamed: bool


def classify(report: Report) -> tuple[RankClass, ...]:
    """Sort the ranks into classes, by lowest rank; those whom the verdict blames stay apart from the others."""
    blamed = frozenset(report.verdict.ranks) if report.verdict else frozenset()
    classes: dict[tuple[str, str, bool], list[RankRow]] = {}
    several = len({row.host for row in report.ranks}) > 1
    for row in sorted(report.ranks, key=lambda row: row.rank):
        line = _line(row.where) if row.where else ""
        classes.setdefault((row.state, line, row.rank in blamed), []).append(row)
    return tuple(
        RankClass(
            ranks=tuple(row.rank for row in rows),
            host=rows[0].host if several and len({row.host for row in rows}) == 1 else "",
            state=state,
            place=", ".join(part for part in (line, _steps(rows)) if part),
            blamed=is_blamed,
        )
        for (state, line, is_blamed), rows in classes.items()
    )


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Draw together findings that say the same of several ranks; the order of the first ones stays."""
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.kind, finding.severity, finding.summary, finding.fix)
        former = merged.get(key)
        merged[key] = finding if former is None else _join(former, finding)
    return tuple(merged.values())


def merge_places(places: Iterable[Place]) -> tuple[str, ...]:
    """Write each line of code once: ``ranks 0, 2: train.py:61 in main``."""
    ranks: dict[str, list[int]] = {}
    for place in places:
        ranks.setdefault(_line(place), []).append(place.rank)
    return tuple(f"{format_ranks(at)}: {line}" for line, at in ranks.items())


def _line(place: Place) -> str:
    function = f" in {place.function}" if place.function else ""
    return f"{place.file}:{place.line}{function}"


def _steps(rows: list[RankRow]) -> str:
    steps = {row.step for row in rows if row.step is not None}
    if not steps:
        return ""
    return f"{'step' if len(steps) == 1 else 'steps'} {format_numbers(steps)}"


def _join(one: Finding, other: Finding) -> Finding:
    return replace(
        one,
        ranks=tuple(sorted({*one.ranks, *other.ranks})),
        hosts=tuple(sorted({*one.hosts, *other.hosts})),
        where=one.where + other.where,
    )
