"""The report as Markdown, for issues and pull requests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import FactList, Heading, Items, Places, Series, SourceLines, Table, Text, Tree
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import CHECK_HEADS, PLACE_HEADS, check_rows, place_rows
from ddpdoctor.report.lines import clean, format_time, merge_places, sureness_of, title_of
from ddpdoctor.report.text.report import fit_columns
from ddpdoctor.report.tree import draw_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.blocks import Block, Section

# Width of tables, as on a screen. Wider tables would scroll sideways in issues. report.json has all columns.
WIDTH = 110


def render_markdown(report: Report) -> str:
    """Render what was checked, the findings (worst first), the results, and a table of all checks."""
    content = read_content(report)
    title = " ".join(part for part in ("ddpdoctor", content.verb) if part)
    parts = [f"## {title}: {_inline(content.headline)}"]
    parts += _write_sections(content.about)
    parts += [_write_finding(finding) for finding in report.findings]
    blocks = [block for section in content.pictures for block in section]
    parts += [_write_block(block) for block in blocks if isinstance(block, SourceLines | Tree)]
    parts += _write_sections(content.sections)
    if report.checks:
        rows = []
        for outcome, code, name, seen in check_rows(report.checks):
            quoted = re.sub(r"[`|\s]+", " ", clean(name))  # without what would end the inline code or the cell
            rows.append((outcome, _inline(code), f"`{quoted}`", _inline(seen)))
        table = _draw_rows(CHECK_HEADS, ["---"] * len(CHECK_HEADS), rows)
        parts.append(f"<details><summary>All checks</summary>\n\n{table}\n\n</details>")
    parts.append(f"ddpdoctor {_inline(report.tool_version)}, {_inline(format_time(report.started_at))}")
    return "\n\n".join(parts) + "\n"


def _write_sections(sections: Iterable[Section]) -> list[str]:
    return [written for section in sections for block in section if (written := _write_block(block))]


def _write_block(block: Block) -> str:  # noqa: PLR0911 - one for each kind
    match block:
        case Heading():
            return f"### {_inline(block.text)}"
        case Text():
            return _inline(block.text)
        case Items():
            return "\n".join(_write_item(item.text, [item.fix] if item.fix else []) for item in block.items)
        case FactList():
            facts = [fact for fact in block.facts if fact.texts]
            return "\n".join(_write_item(f"{fact.label}: {fact.texts[0]}", fact.texts[1:]) for fact in facts)
        case Table():
            columns = fit_columns(block.columns, WIDTH)
            groups = len({column.group for column in columns if column.group}) > 1
            heads = [
                " ".join(filter(None, [column.group if groups else "", column.name, column.unit])) for column in columns
            ]
            aligned = [column.align == "right" for column in columns]
            rows = list(zip(*(column.cells for column in columns), strict=True))
            legend = [f"- {_inline(line)}" for line in block.legend]
            return "\n".join([_write_rows(heads, rows, aligned), *([""] if legend else []), *legend])
        case Places():
            return _write_rows(PLACE_HEADS, place_rows(block))
        case Series():
            return ""  # the numbers are in a table beside it
        case SourceLines():
            width = len(str(block.first + len(block.lines) - 1))
            numbered = [
                f"{'>' if number == block.blamed else ' '} {number:{width}} | {line}"
                for number, line in enumerate(block.lines, start=block.first)
            ]
            return f"{_inline(block.file)}:\n\n{_indent(numbered)}"
        case Tree():
            return f"{_inline(block.title)}:\n\n{_indent(draw_tree(block))}"
        case _:
            return ""


def _indent(lines: Iterable[str]) -> str:
    """Write lines as code. Indented code, unlike a fence, cannot be ended by what is in it."""
    return "\n".join(f"    {part}" for line in lines for part in clean(line).splitlines())


def _write_item(text: str, more: Sequence[str]) -> str:
    return "\n".join([f"- {_inline(text)}", *(f"  - {_inline(line)}" for line in more)])


def _write_rows(heads: Sequence[str], rows: Iterable[Sequence[str]], to_right: Sequence[bool] = ()) -> str:
    marks = ["--:" if right else "---" for right in to_right or [False] * len(heads)]
    return _draw_rows(list(map(_inline, heads)), marks, [list(map(_inline, row)) for row in rows])


def _draw_rows(heads: Sequence[str], marks: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, marks, *rows))


def _write_finding(finding: Finding) -> str:
    lines = [
        f"### {finding.severity.value}: {_inline(title_of(finding))} ({sureness_of(finding)})",
        "",
        _inline(finding.summary),
        "",
    ]
    lines += [f"- at {_inline(place)}" for place in merge_places(finding.where)]
    lines += [f"- {_inline(line)}" for line in finding.evidence]
    if finding.fix:
        lines += ["", "To do:", "", _indent([finding.fix])]
    return "\n".join(lines)


def _inline(text: str) -> str:
    """Escape collected data so that it is not read as markup."""
    return re.sub(r"([\\`*_<>\[\]|#~])", r"\\\1", " ".join(clean(text).split()))
