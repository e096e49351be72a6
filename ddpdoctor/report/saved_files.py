"""The report of `check-consistency --diff` as text: whether files are equal, then a table of what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.diff import DiffFacts, Kind
from ddpdoctor.model.errors import UserError
from ddpdoctor.report.checkup import add_untold
from ddpdoctor.report.findings import add_finding
from ddpdoctor.report.page import Page, draw, plural, width_of

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.diff import Unequal
    from ddpdoctor.model.findings import Report

VERB = "check-consistency"
MAX_ROWS = 30
"""Rows of the table; the report's data has all. Ours."""
HEADS = ("", "what", "differ", "of", "largest", "relative")


def is_diff(report: Report) -> bool:
    """Return whether a report is one of files that were compared."""
    return report.data.get("verb") == VERB and "diff" in report.data


def render_diff(report: Report, *, width: int | None, colour: bool, run_dir: Path | None, cwd: Path | None) -> str:
    """Render the report, its verdict first; ``width`` None wraps nothing. Raises ``UserError`` for a damaged one."""
    facts = _read(report)
    page = Page(width=width, cwd=cwd)
    page.add(_verdict(facts, report, run_dir), style="bold")
    page.gap()
    for number, one in enumerate(facts.files, start=1):
        rank = "" if one.rank is None else f" (rank {one.rank})"
        beside = f"; {plural(one.beside, 'other tensor')} not compared" if one.beside else ""
        below = f" below {one.below.rstrip('.')!r}{beside}" if one.below else ""
        page.add(f"file {number}: {one.path}{rank}, {plural(one.tensors, 'tensor')}{below}")
    _add_table(page, facts)
    if any(check.outcome.value in {"inconclusive", "crashed"} for check in report.checks):
        page.gap()
    add_untold(page, report.checks)
    for finding in reversed(report.findings):
        add_finding(page, finding, several=False)
    return draw(page.lines, colour=colour)


def _read(report: Report) -> DiffFacts:
    try:
        return decode(DiffFacts, report.data["diff"])
    except WrongValue as error:
        raise UserError(f"the report cannot be read: diff{error}") from error


def _verdict(facts: DiffFacts, report: Report, run_dir: Path | None) -> str:
    where = "" if run_dir is None else f"; report in {run_dir}"
    files = plural(len(facts.files), "file")
    if report.verdict is not None:
        return f"ddpdoctor: {files}: {report.verdict.summary}{where}"
    told = facts.tensors - len(facts.untold)
    return f"ddpdoctor: {files}: equal in all {plural(told, 'tensor')} that were compared, bit by bit{where}"


def _add_table(page: Page, facts: DiffFacts) -> None:
    shown = [one for one in facts.unequal if one.kind is not Kind.RANDOM]
    if not shown:
        return
    rows = [HEADS, *(row for one in shown[:MAX_ROWS] for row in _rows(one, several=len(facts.files) > 2))]
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    page.gap()
    for number, row in enumerate(rows):
        left = [cell.ljust(size) for cell, size in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(size) for cell, size in zip(row[2:], widths[2:], strict=True)]
        page.add("  " + "  ".join([*left, *right]).rstrip(), style="" if number else "bold", whole=True)
    if len(shown) > MAX_ROWS:
        page.add(f"and {len(shown) - MAX_ROWS} more", first="  ")


def _rows(one: Unequal, *, several: bool) -> list[tuple[str, ...]]:
    """Return a row for each file that is off the first: "3 against 1" where there are several."""
    if not one.apart:
        told = " | ".join(one.seen)
        absent = f"not in file {', '.join(str(n + 1) for n in one.absent_in)}" if one.absent_in else ""
        return [(one.name, "; ".join(filter(None, [told, absent])), "", "", "", "")]
    return [
        (
            one.name,
            one.seen[0] + (f", file {each.file + 1} against {each.against + 1}" if several else ""),
            str(each.differing),
            str(each.of),
            "" if each.largest is None else f"{each.largest:.3g}",
            "" if each.relative is None else f"{each.relative:.2g}",
        )
        for each in one.apart
    ]
