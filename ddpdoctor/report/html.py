"""Renders a report as one self-contained HTML page. Collected data is always escaped, never markup."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import FactList, Heading, Items, Places, Series, Table, Text
from ddpdoctor.report.classes import PLACE_HEADS, place_rows
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import CHECK_HEADS, check_rows
from ddpdoctor.report.lines import clean
from ddpdoctor.report.names import format_time, merge_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.blocks import Block, Section

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 85em; padding: 0 1em }
body { color: #111; background: #fff }
svg { max-width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15em .7em; text-align: left; border-bottom: 1px solid #ddd }
td.right, th.right { text-align: right }
pre { background: #f4f4f4; padding: .6em; overflow-x: auto }
"""


def render_html(report: Report, picture: bytes | None = None) -> str:
    """Render the page. ``picture`` is an SVG of the report's curves. The page loads nothing from elsewhere."""
    content = read_content(report)
    parts = [
        f"<h1>{_text(content.verb or 'ddpdoctor')}: {_text(content.headline)}</h1>",
        *_write_sections(content.about),
        *([_inline_svg(picture)] if picture is not None else []),
        *(_write_finding(finding) for finding in report.findings),
        *_write_sections(content.sections),
        _write_checks(report) if report.checks else "",
        f"<p>ddpdoctor {_text(report.tool_version)}, {_text(format_time(report.started_at))}</p>",
    ]
    body = "\n".join(part for part in parts if part)
    title = " ".join(part for part in ("ddpdoctor", content.verb) if part)
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _inline_svg(svg: bytes) -> str:
    """Return the SVG without its XML header, because it is embedded in the page."""
    text = svg.decode()
    return f'<div role="img" aria-label="The numbers are in the tables below.">{text[text.index("<svg") :]}</div>'


def _write_sections(sections: Iterable[Section]) -> list[str]:
    return [_write_block(block) for section in sections for block in section]


def _write_block(block: Block) -> str:  # noqa: PLR0911 - one for each kind
    match block:
        case Heading():
            return f"<h2>{_text(block.text)}</h2>"
        case Text():
            return f"<p>{_text(block.text)}</p>"
        case Items():
            return _list([item.text if not item.fix else f"{item.text}: {item.fix}" for item in block.items])
        case FactList():
            return _write_facts(block)
        case Table():
            return _write_table(block)
        case Places():
            return _write_rows(PLACE_HEADS, place_rows(block))
        case Series():
            return ""  # in the picture
        case _:
            return ""


def _write_facts(block: FactList) -> str:
    rows = [
        f"<dt>{_text(fact.label)}</dt>" + "".join(f"<dd>{_text(text)}</dd>" for text in fact.texts)
        for fact in block.facts
        if fact.texts
    ]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _write_table(table: Table) -> str:
    heads = [" ".join(filter(None, (column.group, column.name, column.unit))) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    drawn = _write_rows(heads, rows, [column.align == "right" for column in table.columns])
    return drawn + _list(table.legend)


def _write_rows(heads: Sequence[str], rows: Iterable[Sequence[str]], to_right: Sequence[bool] = ()) -> str:
    def write(tag: str, cells: Sequence[str]) -> str:
        marks = [' class="right"' if right else "" for right in to_right or [False] * len(heads)]
        return "".join(f"<{tag}{mark}>{_text(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))

    lines = [write("th", heads), *(write("td", row) for row in rows)]
    return '<div class="wide"><table>\n' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def _write_finding(finding: Finding) -> str:
    title = f"{finding.severity.value} {finding.code} {finding.kind}: {finding.summary}"
    fix = f"<pre>{_text(finding.fix)}</pre>" if finding.fix else ""
    return f"<h2>{_text(title)}</h2>\n{_list([*merge_places(finding.where), *finding.evidence])}{fix}"


def _write_checks(report: Report) -> str:
    table = _write_rows(CHECK_HEADS, check_rows(report.checks))
    return f"<details><summary>All checks</summary>\n{table}\n</details>"


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _text(text: str) -> str:
    return escape(clean(text))
