"""The report as Markdown, for issues and pull requests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.report.blocks import FactList, Heading, Items, Places, Table, Text, Tree
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import OUTCOME_WORDS, check_words
from ddpdoctor.report.lines import clean, format_ranks, format_time, merge_places, sureness_of, title_of
from ddpdoctor.report.text import fit_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.blocks import Block, Section, TreeNode

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
    parts += [_write_block(block) for block in blocks if isinstance(block, SourceExcerpt | Tree)]
    parts += _write_sections(content.sections)
    if report.checks:
        rows = []
        for check in sorted(report.checks, key=lambda check: list(Outcome).index(check.outcome)):
            quoted = re.sub(r"[`|\s]+", " ", clean(check.id))  # without what would end the inline code or the cell
            seen = _inline(check_words(check))
            rows.append((OUTCOME_WORDS[check.outcome], _inline(check.code), f"`{quoted}`", seen))
        table = _draw_rows(("outcome", "code", "check", "seen"), ["---"] * 4, rows)
        parts.append(f"<details><summary>All checks</summary>\n\n{table}\n\n</details>")
    parts.append(f"ddpdoctor {_inline(report.tool_version)}, {_inline(format_time(report.started_at))}")
    return "\n\n".join(parts) + "\n"


def _write_sections(sections: Iterable[Section]) -> list[str]:
    return [written for section in sections for block in section if (written := _write_block(block))]


def _write_block(block: Block) -> str:
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
            ranks = [(format_ranks(one.ranks), one.host, one.state, one.place) for one in block.classes]
            return _write_rows(("ranks", "host", "state", "where"), ranks)
        case SourceExcerpt():
            width = len(str(block.first + len(block.lines) - 1))
            numbered = [
                f"{'>' if number == block.blamed else ' '} {number:{width}} | {line}"
                for number, line in enumerate(block.lines, start=block.first)
            ]
            return f"{_inline(block.file)}:\n\n{_indent(numbered)}"
        case Tree():
            return f"{_inline(block.title)}:\n\n{_indent(draw_tree(block))}"
        case _:
            return ""  # of a chart, the numbers are in a table beside it


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


def draw_tree(tree: Tree) -> list[str]:
    """Return the lines of a tree in ASCII. It goes a level deeper only where ranks part.

    The ranks of a node are named where they are not those of the node above.
    """
    lines: list[str] = []
    todo: list[tuple[TreeNode, int, tuple[int, ...]]] = [(root, 0, ()) for root in reversed(tree.roots)]
    while todo:
        node, depth, above = todo.pop()
        ranks = f"  [{format_ranks(node.ranks)}]" if node.ranks != above else ""
        lines.append(f"{'> ' if node.blamed else '  '}{'  ' * depth}{node.text}{ranks}")
        parts = len(node.children) > 1 or any(child.ranks != node.ranks for child in node.children)
        todo += [(child, depth + parts, node.ranks) for child in reversed(node.children)]
    return lines
