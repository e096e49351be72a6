"""The report of `allreduce-bench` as text: what was measured, what is wrong, what to do, and one line that closes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.report.bandwidth.changes import add_comparison
from ddpdoctor.report.bandwidth.closing import closing_line
from ddpdoctor.report.bandwidth.columns import draw_columns, fit_columns
from ddpdoctor.report.bandwidth.head import describe_run
from ddpdoctor.report.bandwidth.matrix import BLAMED, draw_matrix, make_matrices
from ddpdoctor.report.bandwidth.reading import read_bandwidth
from ddpdoctor.report.bandwidth.remarks import (
    describe_late,
    describe_left_out,
    describe_reason,
    find_late,
    name_reasons,
)
from ddpdoctor.report.bandwidth.results import list_columns, sort_series
from ddpdoctor.report.bandwidth.summary import add_curve, pick_curves
from ddpdoctor.report.bandwidth.terminal_curve import Line, draw_curve
from ddpdoctor.report.bandwidth.words import name_series
from ddpdoctor.report.checkup import add_untold
from ddpdoctor.report.findings import add_finding
from ddpdoctor.report.page import Page, draw
from ddpdoctor.report.rank_table import add_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.bandwidth import Stop
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.bandwidth.results import Series


def render_bandwidth(report: Report, *, width: int | None, colour: bool, run_dir: Path | None, cwd: Path | None) -> str:
    """Render the report; ``width`` None is for what is no terminal and wraps nothing. Raises ``UserError``."""
    bench = read_bandwidth(report)
    page = Page(width=width, cwd=cwd)
    for line in describe_run(bench):
        page.add(line)
    series = sort_series(bench.results)
    for one in series:
        _add_series(page, bench, one)
    _add_terminal_curve(page, bench, series)
    _add_who(page, report, bench)
    if bench.comparison is not None:
        add_comparison(page, bench.comparison)
    _add_lines(page, "what it means for DDP", bench.advice.text if bench.advice else ())
    _add_left_out(page, bench)
    _add_end(page, report, bench)
    page.gap()
    page.add(closing_line(report, bench, run_dir))
    return draw(page.lines, colour=colour)


def _add_series(page: Page, bench: Bandwidth, series: Series) -> None:
    page.gap()
    page.add(name_series(series) + (", in place" if series.in_place else ""), style="bold")
    lines = draw_columns(fit_columns(list_columns(series), page.width))
    heads = len(lines) - len(series.rows)
    for line in lines[:heads]:
        page.add(line, whole=True)
    for line, row in zip(lines[heads:], series.rows, strict=True):
        page.add(line, whole=True, style="bold red" if any(one.wrong for one in row.values()) else "")
    for curve in pick_curves(bench.curves, series):
        add_curve(page, curve)


def _add_terminal_curve(page: Page, bench: Bandwidth, series: tuple[Series, ...]) -> None:
    """Draw the curves of all series in one small picture, only where there is a terminal."""
    if page.width is None:
        return
    lines = [Line(name=name_series(one), points=_points(one)) for one in series]
    references = {curve.reference for curve in bench.curves if curve.reference is not None}
    reference = None
    if len(references) == 1:
        (known,) = references
        since = max(known.min_size_bytes, min((x for line in lines for x, _ in line.points), default=1))
        reference = Line(name=known.text, points=((since, known.gb_s), (max(since, *_sizes(lines)), known.gb_s)))
    drawn = draw_curve(lines, reference, page.width)
    if drawn:
        page.gap()
    for line in drawn:
        page.add(line, whole=True)


def _points(series: Series) -> tuple[tuple[int, float], ...]:
    mode = series.modes[-1]
    rows = [row[mode] for row in series.rows if mode in row]
    return tuple((one.size_bytes, one.busbw_gb_s) for one in rows if one.busbw_gb_s and math.isfinite(one.busbw_gb_s))


def _sizes(lines: list[Line]) -> list[int]:
    return [size for line in lines for size, _ in line.points]


def _add_who(page: Page, report: Report, bench: Bandwidth) -> None:
    """Add who is slow: the matrices, and a rank that comes late to all calls."""
    for matrix in make_matrices(report, bench):
        page.gap()
        page.add(matrix.title, style="bold")
        for line in draw_matrix(matrix, page.width):
            page.add(line, whole=line.startswith((BLAMED, "    ")), style="bold" if line.startswith(BLAMED) else "")
    late = find_late(bench)
    if late is not None:
        page.gap()
        page.add(describe_late(late))


def _add_left_out(page: Page, bench: Bandwidth) -> None:
    _add_lines(page, "not measured", [describe_left_out(one) for one in bench.left_out])
    _add_lines(page, "to know", bench.notes)


def _add_end(page: Page, report: Report, bench: Bandwidth) -> None:
    """Add how it ended, what could explain a low number, and the findings, the worst last."""
    if bench.stop is not None:
        _add_stop(page, report, bench, bench.stop)
    if any(check.outcome in {Outcome.INCONCLUSIVE, Outcome.CRASHED} for check in report.checks):
        page.gap()
    add_untold(page, report.checks)
    _add_reasons(page, bench)
    for finding in reversed(report.findings):
        add_finding(page, finding, several=len(bench.hosts) > 1)


def _add_stop(page: Page, report: Report, bench: Bandwidth, stop: Stop) -> None:
    page.gap()
    signal = f" by {stop.signal}" if stop.signal else ""
    phase = f" in phase {stop.phase}" if stop.phase else ""
    seen = "what is above was measured before" if bench.results else "nothing had been measured"
    page.add(f"{bench.ending.value}{signal}{phase}: the results are partial; {seen}", style="bold red")
    add_ranks(page, report)


def _add_reasons(page: Page, bench: Bandwidth) -> None:
    if not bench.reasons:
        return
    page.gap()
    page.add(name_reasons(bench), style="bold")
    for reason in bench.reasons:
        page.add(describe_reason(reason, several=len(bench.hosts) > 1), first="  - ")
        if reason.fix:
            page.add(reason.fix, first="    to do: ", whole=True)


def _add_lines(page: Page, title: str, lines: tuple[str, ...] | list[str]) -> None:
    if not lines:
        return
    page.gap()
    page.add(title, style="bold")
    for line in lines:
        page.add(line, first="  ")
