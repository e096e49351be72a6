"""The report of `allreduce-bench` as one page of HTML that needs nothing else: the plot, the tables, the findings."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ddpdoctor.report.bandwidth.closing import headline
from ddpdoctor.report.bandwidth.figure import draw_figure
from ddpdoctor.report.bandwidth.head import describe_run, describe_time
from ddpdoctor.report.bandwidth.remarks import describe_left_out, describe_reason, name_reasons
from ddpdoctor.report.bandwidth.results import list_columns, sort_series
from ddpdoctor.report.bandwidth.summary import describe_curve, pick_curves
from ddpdoctor.report.bandwidth.words import name_series
from ddpdoctor.report.lines import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.bandwidth.columns import Column
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.bandwidth.results import Series

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 85em; padding: 0 1em }
body { color: #111; background: #fff }
svg { max-width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd }
pre { background: #f4f4f4; padding: .6em; overflow-x: auto }
"""


def render_html(report: Report, bench: Bandwidth) -> str:
    """Render the page. Everything collected is text in it, never markup; nothing is loaded from elsewhere."""
    several = len(bench.hosts) > 1
    parts = [
        f"<h1>allreduce-bench: {_text(headline(report, bench))}</h1>",
        _list("", describe_run(bench)),
        _inline_svg(draw_figure(report, bench, "svg")),
        *(_write_finding(finding) for finding in report.findings),
        _list(name_reasons(bench).capitalize(), (describe_reason(one, several=several) for one in bench.reasons)),
        *(_write_series(bench, series) for series in sort_series(bench.results)),
        _list("What it means for DDP", bench.advice.text if bench.advice else ()),
        _list("Not measured", (describe_left_out(one) for one in bench.left_out)),
        _list("To know", bench.notes),
        f"<p>ddpdoctor {_text(report.tool_version)}, {_text(describe_time(report))}</p>",
    ]
    body = "\n".join(part for part in parts if part)
    head = f'<meta charset="utf-8"><title>ddpdoctor allreduce-bench</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _inline_svg(svg: bytes) -> str:
    """Cut off what stands before the root: within a page it is no document of its own."""
    text = svg.decode()
    return f'<div role="img" aria-label="The numbers are in the tables below.">{text[text.index("<svg") :]}</div>'


def _write_series(bench: Bandwidth, series: Series) -> str:
    curves = [
        line
        for curve in pick_curves(bench.curves, series)
        for line in (f"{curve.mode.value}: {curve.verdict}", *describe_curve(curve))
    ]
    return f"<h2>{_text(name_series(series))}</h2>\n{_list('', curves)}\n{_write_table(list_columns(series))}"


def _write_table(columns: Sequence[Column]) -> str:
    heads = "".join(
        f"<th>{_text(' '.join(filter(None, (column.group, column.name, column.unit))))}</th>" for column in columns
    )
    rows = zip(*(column.cells for column in columns), strict=True)
    lines = [f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f'<div class="wide"><table>\n<tr>{heads}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _write_finding(finding: Finding) -> str:
    title = f"{finding.severity.value} {finding.code} {finding.kind}: {finding.summary}"
    fix = f"<pre>{_text(finding.fix)}</pre>" if finding.fix else ""
    return f"<h2>{_text(title)}</h2>\n{_list('', finding.evidence)}{fix}"


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    head = f"<h2>{_text(title)}</h2>\n" if title else ""
    return f"{head}<ul>{items}</ul>" if items else ""


def _text(text: str) -> str:
    return escape(clean(text))
