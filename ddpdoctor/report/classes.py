"""Merges equal entries: ranks at the same place, and findings that differ only by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.words import format_numbers, grouped
from ddpdoctor.report.blocks import Places, RankClass
from ddpdoctor.report.names import format_place, format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Finding, RankRow
    from ddpdoctor.report.blocks import Section


def places_of(ranks: tuple[RankRow, ...], verdict: Finding | None) -> tuple[Section, ...]:
    """Return a section that says where the ranks are, or nothing if there are none."""
    return ((Places(classes=classify(ranks, verdict)),),) if ranks else ()


def classify(ranks: tuple[RankRow, ...], verdict: Finding | None) -> tuple[RankClass, ...]:
    """Group ranks into classes, sorted by lowest rank. Ranks that the verdict blames have their own classes."""
    blamed = frozenset(verdict.ranks) if verdict else frozenset()
    several = len({row.host for row in ranks}) > 1
    ordered = sorted(ranks, key=lambda row: row.rank)
    classes = grouped(
        ((row.state, format_place(row.where) if row.where else "", row.rank in blamed), row) for row in ordered
    )
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


PLACE_HEADS = ("ranks", "host", "state", "where")


def place_rows(places: Places) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table that says where ranks are."""
    return [(format_ranks(one.ranks), one.host, one.state, one.place) for one in places.classes]


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings that differ only in ranks, hosts and places. They keep the order of first appearance."""
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.kind, finding.severity, finding.summary, finding.fix)
        former = merged.get(key)
        merged[key] = finding if former is None else _join(former, finding)
    return tuple(merged.values())


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
