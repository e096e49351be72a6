"""The report of `allreduce-bench` as Markdown, to paste into an issue: the verdict, the findings, the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.bandwidth.changes import count_changes, list_change_columns, pick_changes
from ddpdoctor.report.bandwidth.closing import headline
from ddpdoctor.report.bandwidth.columns import fit_columns
from ddpdoctor.report.bandwidth.head import describe_run, describe_time
from ddpdoctor.report.bandwidth.matrix import draw_matrix, make_matrices
from ddpdoctor.report.bandwidth.reading import read_bandwidth
from ddpdoctor.report.bandwidth.remarks import describe_left_out, describe_reason, name_reasons
from ddpdoctor.report.bandwidth.results import list_columns, sort_series
from ddpdoctor.report.bandwidth.summary import describe_curve, pick_curves
from ddpdoctor.report.bandwidth.words import name_series
from ddpdoctor.report.markdown import inline, write_checks, write_finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.bandwidth import Comparison, Curve
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.columns import Column
    from ddpdoctor.report.bandwidth.matrix import Matrix
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.bandwidth.results import Series

WIDTH = 110
"""Of the table, as on a screen: where issues are read it would be scrolled sideways else. report.json has it all."""


def render_bandwidth_markdown(report: Report) -> str:
    """Render the report; raises ``UserError`` where it is damaged."""
    bench = read_bandwidth(report)
    blocks = [f"## ddpdoctor allreduce-bench: {inline(headline(report, bench))}"]
    blocks.append("\n".join(f"- {inline(line)}" for line in describe_run(bench)))
    blocks += [write_finding(finding) for finding in report.findings]
    several = len(bench.hosts) > 1
    blocks += _list(name_reasons(bench).capitalize(), [describe_reason(one, several=several) for one in bench.reasons])
    for series in sort_series(bench.results):
        blocks += _write_series(bench, series)
    blocks += [_write_matrix(matrix) for matrix in make_matrices(report, bench)]
    blocks += _write_comparison(bench.comparison) if bench.comparison else []
    blocks += _list("What it means for DDP", bench.advice.text if bench.advice else ())
    blocks += _list("Not measured", [describe_left_out(one) for one in bench.left_out])
    blocks += _list("To know", bench.notes)
    blocks += [write_checks(report.checks)] if report.checks else []
    blocks.append(f"ddpdoctor {inline(report.tool_version)}, {inline(describe_time(report))}")
    return "\n\n".join(blocks) + "\n"


def _write_series(bench: Bandwidth, series: Series) -> list[str]:
    curves = [line for curve in pick_curves(bench.curves, series) for line in _write_curve(curve)]
    table = write_table(fit_columns(list_columns(series), WIDTH))
    return [f"### {inline(name_series(series))}", *(["\n".join(curves)] if curves else []), table]


def _write_curve(curve: Curve) -> list[str]:
    figures = [f"  - {inline(line)}" for line in describe_curve(curve)]
    return [f"- {curve.mode.value}: {inline(curve.verdict)}", *figures]


def write_table(columns: Sequence[Column]) -> str:
    """Write a table of right-aligned columns."""
    groups = len({column.group for column in columns if column.group}) > 1
    heads = [" ".join(filter(None, [column.group if groups else "", column.name, column.unit])) for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    lines = [heads, ["--:"] * len(heads), *([inline(cell.strip()) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write_matrix(matrix: Matrix) -> str:
    """Write it as it stands on a screen: as a block of code it keeps its columns."""
    lines = "\n".join(f"    {line}" for line in draw_matrix(matrix, None))
    return f"### {inline(matrix.title)}\n\n{lines}"


def _write_comparison(comparison: Comparison) -> list[str]:
    matter = pick_changes(comparison.changes)
    lines = [count_changes(comparison), *(f"not alike: {difference}" for difference in comparison.differences)]
    table = [write_table(list_change_columns(matter))] if matter else []
    return [*_list(f"Against {comparison.baseline}", lines), *table]


def _list(title: str, lines: Iterable[str]) -> list[str]:
    items = [f"- {inline(line)}" for line in lines]
    return [f"### {inline(title)}", "\n".join(items)] if items else []
