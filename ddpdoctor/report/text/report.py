"""The report as text for a terminal or a pipe."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.words import count_of, grouped
from ddpdoctor.report.blocks import FactList, Heading, Items, Lanes, Places, Series, Table, Tone, items
from ddpdoctor.report.blocks import Text as Paragraph
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import (
    OUTCOME_TONES,
    OUTCOME_WORDS,
    TONES,
    UNKNOWN,
    check_tone,
    check_words,
    count_checks,
    finding_section,
    findings_in_short,
    merge_findings,
    name_check,
    verdict_section,
)
from ddpdoctor.report.lines import clean, format_ranks, wrap
from ddpdoctor.report.text.pictures import STRIP_WIDTH, draw_chart, draw_sparks, draw_strip

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Check, Report
    from ddpdoctor.report.blocks import Block, Column, Content, Section

STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.GOOD: "green",
    Tone.NOTE: "cyan",
    Tone.WARNING: "bold yellow",
    Tone.ERROR: "bold red",
    Tone.SKIPPED: "dim",
    Tone.CRASHED: "bold magenta",
}


@dataclass(kw_only=True)
class TextPage:
    """The lines so far. Each is plain text with one style for its first characters."""

    width: int | None
    cwd: Path | None
    lines: list[Text] = field(default_factory=list)

    def add(
        self, text: str, *, first: str = "", tone: Tone = Tone.PLAIN, styled: int | None = None, whole: bool = False
    ) -> None:
        """Add a paragraph, wrapped unless ``whole``. ``tone`` applies to the first ``styled`` characters, or to all."""
        for number, line in enumerate(wrap(self.clean(text), None if whole else self.width, first=first)):
            drawn = Text(line)
            if tone is not Tone.PLAIN and (styled is None or number == 0):
                drawn.stylize(STYLES[tone], 0, styled)
            self.lines.append(drawn)

    def gap(self) -> None:
        """Add an empty line, unless the page is empty."""
        if self.lines:
            self.lines.append(Text())

    def clean(self, text: str) -> str:
        """Make collected text safe to print, with paths relative to this page's ``cwd``."""
        return clean(text, self.cwd)


def width_of(text: str) -> int:
    """Return the width of a text in terminal columns."""
    return cell_len(text)


def draw(page: TextPage, *, color: bool) -> str:
    """Let Rich add only colors: no wrapping, no markup, no highlighting."""
    console = Console(
        file=io.StringIO(),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as drawn:
        for line in page.lines:
            console.print(line, soft_wrap=True)
    return drawn.get()


GAP = 2  # number of blanks between two columns


def draw_table(table: Table, page: TextPage) -> list[str] | None:
    """Return the lines of a table, headers first, or None if it is too wide and has a replacement."""
    space = None if page.width is None else page.width - table.indent
    cleaned = [
        replace(one, cells=tuple(map(page.clean, one.cells)), name=page.clean(one.name)) for one in table.columns
    ]
    columns = fit_columns(cleaned, space)
    if table.instead and space is not None and _total(columns) > space:
        return None
    return [(" " * table.indent + line).rstrip() for line in draw_columns(columns)]


def draw_columns(columns: Sequence[Column]) -> list[str]:
    """Draw the headers, if there are any, and a line for each row of cells."""
    heads = [line for line in ([one.name for one in columns], [one.unit for one in columns]) if any(line)]
    groups = _draw_groups(columns)
    lines = [groups] if groups else []
    for cells in (*heads, *zip(*(one.cells for one in columns), strict=True)):
        padded = []
        for one, cell in zip(columns, cells, strict=True):
            padding = " " * (_width(one) - width_of(cell))
            padded.append(cell + padding if one.align == "left" else padding + cell)
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def fit_columns(columns: Sequence[Column], width: int | None) -> tuple[Column, ...]:
    """Drop columns with a weight, the least first, until the others fit. If ``width`` is None, keep all."""
    kept = list(columns)
    while width is not None and len(kept) > 1 and _total(kept) > width:
        weighted = [(one.weight, -at) for at, one in enumerate(kept) if one.weight is not None]
        if not weighted:
            break
        del kept[-min(weighted)[1]]
    return tuple(kept)


def _draw_groups(columns: Sequence[Column]) -> str:
    """Draw each group's name above its columns, padded with dashes: "-- latency ---"."""
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + GAP + _width(column))
        else:
            spans.append((column.group, _width(column)))
    drawn = (f" {name} ".center(width, "-")[:width] if name else " " * width for name, width in spans)
    return (" " * GAP).join(drawn).rstrip()


def _width(column: Column) -> int:
    return max(map(width_of, (column.name, column.unit, *column.cells)))


def _total(columns: Sequence[Column]) -> int:
    return sum(map(_width, columns)) + GAP * (len(columns) - 1)


MAX_CLASSES = 40  # More rows than this do not help on a screen. The report file has all of them.
MAX_RANKS_WIDTH = 28  # a longer list of ranks gets its own lines


def add_sections(page: TextPage, sections: Iterable[Section]) -> None:
    """Add sections, each separated from the previous one."""
    for section in sections:
        before = len(page.lines)
        page.gap()
        after_gap = len(page.lines)
        add_blocks(page, section)
        if len(page.lines) == after_gap:
            del page.lines[before:]


def add_blocks(page: TextPage, blocks: Iterable[Block]) -> None:
    """Add blocks one below the other."""
    for block in blocks:
        match block:
            case Heading():
                page.add(block.text, tone=block.tone)
            case Paragraph():
                page.add(block.text, first=" " * block.indent, tone=block.tone)
            case Items():
                for item in block.items:
                    page.add(item.text, first=block.mark)
                    if item.fix:
                        page.add(item.fix, first=f"{' ' * len(block.mark)}to do: ", whole=True)
            case FactList():
                _add_facts(page, block)
            case Table():
                _add_table(page, block)
            case Series():  # a chart on a terminal with room for it, else a line for each curve
                chart = draw_chart(block, page.width) if page.width is not None else []
                for line in chart or draw_sparks(block):
                    page.add(line, whole=True)
            case Places():
                _add_places(page, block)
            case Lanes():
                width = STRIP_WIDTH if page.width is None else min(page.width, STRIP_WIDTH)
                *rows, legend = draw_strip(block.timeline, width) or [""]
                for line in (*rows, *(wrap(legend, width, first="  ") if legend else [])):
                    page.add(line, whole=True)


def _add_table(page: TextPage, table: Table) -> None:
    lines = draw_table(table, page)
    if lines is None:
        add_blocks(page, table.instead)
        return
    rows = len(table.columns[0].cells)
    for number, line in enumerate(lines, start=rows - len(lines)):
        page.add(line, whole=True, tone=table.tones.get(number, Tone.PLAIN))
    for line in table.legend:
        page.add(line, first="  ")


def _add_facts(page: TextPage, block: FactList) -> None:
    width = block.width or max((width_of(fact.label) for fact in block.facts), default=0) + 2
    for fact in block.facts:
        head = f"  {fact.label.ljust(width)}"
        for number, text in enumerate(fact.texts):
            first, tone = (" " * len(head), Tone.PLAIN) if number else (head, fact.tone)
            page.add(text, first=first, tone=tone, styled=len(head), whole=fact.whole)


def _add_places(page: TextPage, block: Places) -> None:
    """Add ranks, one row per place. ">" marks the ranks that the verdict blames."""
    shown = block.classes[:MAX_CLASSES]
    names = [format_ranks(one.ranks) + (f" on {page.clean(one.host)}" if one.host else "") for one in shown]
    names_width = min(max(map(len, names), default=0), MAX_RANKS_WIDTH)
    state_width = max((width_of(page.clean(one.state)) for one in shown), default=0)
    for one, name in zip(shown, names, strict=True):
        mark, tone = ("> ", Tone.STRONG) if one.blamed else ("  ", Tone.PLAIN)
        state = page.clean(one.state)
        padding = " " * (state_width - width_of(state))
        whole = f"{mark}{name.ljust(names_width)}  {state}{padding}  {page.clean(one.place)}".rstrip()
        if len(name) <= MAX_RANKS_WIDTH and (page.width is None or width_of(whole) <= page.width):
            page.add(whole, tone=tone, whole=True)
            continue
        page.add(name, first=mark, tone=tone)
        for text in filter(None, (state, one.place)):
            page.add(text, first="      ", tone=tone)
    if len(block.classes) > len(shown):
        page.add(f"and {len(block.classes) - len(shown)} more rows in report.json", first="  ")


MAX_REASONS = 5
WORD_WIDTH = max(map(len, OUTCOME_WORDS.values()))


def render_text(
    report: Report,
    *,
    width: int | None,
    color: bool,
    run_dir: Path | None,
    cwd: Path | None = None,
    verbose: bool = False,
) -> str:
    """Render a report. ``width`` is None if the output is not a terminal. Then nothing is wrapped.

    Paths below ``cwd`` are shown relative to it. Raises ``UserError`` if the report is damaged.
    """
    content = read_content(report)
    page = TextPage(width=width, cwd=cwd)
    _add_headline(page, report, content)
    _add_status(page, report, content, run_dir, verbose=verbose)
    # The verdict says the rest.
    strips = [section for section in content.pictures if any(isinstance(block, Lanes) for block in section)]
    add_sections(page, (*content.about, *content.sections, *strips))
    if content.ends_with_verdict:
        # Add checks without an answer, other findings in short, and the verdict last, so that it stays on the screen
        unknown = [check for check in report.checks if check.outcome in UNKNOWN]
        if report.findings or (report.job is not None and report.job.ended_badly):
            texts = [f"{name_check(check)}: {OUTCOME_WORDS[check.outcome]}: {check.reason}" for check in unknown]
            add_sections(page, [(items(texts, "  "),)])
        add_sections(page, [(findings_in_short(merge_findings(content.others)),)])
        if report.verdict is not None:
            add_sections(page, [verdict_section(report.verdict)])
    else:
        _add_checks(page, report, content, verbose=verbose)
    return draw(page, color=color)


def render_verdict(report: Report) -> str:
    """Render only the headline, how it ended, and what backs the verdict, for a program that has the rest as data.

    Raises ``UserError`` if the report is damaged.
    """
    content = read_content(report)
    page = TextPage(width=None, cwd=None)
    _add_headline(page, report, content)
    _add_status(page, report, content, None, verbose=True)
    if report.verdict is not None:
        add_sections(page, [verdict_section(report.verdict)])
    return draw(page, color=False)


def _add_headline(page: TextPage, report: Report, content: Content) -> None:
    """Add the answer as the first line."""
    tone = Tone.PLAIN if report.verdict is None else TONES[report.verdict.severity]
    page.add(content.headline, first="ddpdoctor: ", tone=tone)


def _add_status(page: TextPage, report: Report, content: Content, run_dir: Path | None, *, verbose: bool) -> None:
    """Add how it ended, the number of checks, the run folder, and remarks."""
    details = "" if verbose else " (-v shows each)"
    parts = [
        content.status,
        f"checks: {count_checks(report)}{details}" if content.is_checklist else "",
        "" if run_dir is None else f"report in {run_dir}",
    ]
    for line in ("; ".join(filter(None, parts)), *content.remarks):
        if line:
            page.add(line, first="  ")


def _add_checks(page: TextPage, report: Report, content: Content, *, verbose: bool) -> None:
    """Add checks and findings, the worst last."""
    if verbose:
        # Add every check and what it found, by group
        groups = grouped((check.group, check) for check in report.checks)
        width = max((len(check.id) for check in report.checks), default=0)
        for group, members in groups.items():
            page.gap()
            page.add(group or "checks", tone=Tone.STRONG)
            for check in members:
                word, tone = check_tone(check, report.findings)
                head = f"  {word.ljust(WORD_WIDTH)}  {check.code}  {check.id.ljust(width)}  "
                page.add(check_words(check), first=head, tone=tone, styled=2 + len(word))
    else:
        _add_unknown(page, report.checks)
    for finding in reversed(report.findings):
        if verbose or not content.is_checklist or finding.severity is not Severity.INFO:
            is_verdict = finding == report.verdict
            section = finding_section(finding, several_hosts=content.several_hosts, is_verdict=is_verdict)
            add_sections(page, [section])


def _add_unknown(page: TextPage, checks: Sequence[Check]) -> None:
    """Add the checks without an answer. They must not read like "passed"."""
    unknown = [check for check in checks if check.outcome in UNKNOWN]
    if unknown:
        page.gap()
    for check in unknown:
        head = f"{OUTCOME_WORDS[check.outcome]}  "
        tone = OUTCOME_TONES[check.outcome]
        page.add(f"{name_check(check)}: {check_words(check)}", first=head, tone=tone, styled=len(head))
    if {check.outcome for check in checks} == {Outcome.SKIPPED}:
        # Add the reasons for skipped checks. Called only if all checks were skipped.
        reasons = Counter(check.reason for check in checks)
        for reason, times in reasons.most_common(MAX_REASONS):
            of = name_check(checks[0]) if len(checks) == 1 else count_of(times, "check")
            page.add(f"{of}: {reason}", first="skipped  ")
