"""The report as text for a terminal or a pipe."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.pictures import SpanKind, Timeline
from ddpdoctor.model.words import count_of, format_size, format_time, grouped
from ddpdoctor.report.blocks import (
    FactEntry,
    FactList,
    Heading,
    Items,
    Places,
    Series,
    Table,
    Tone,
    items,
    log_share,
    read_content,
)
from ddpdoctor.report.blocks import Text as Paragraph
from ddpdoctor.report.findings import LABEL_WIDTH as FACT_WIDTH
from ddpdoctor.report.findings import (
    OUTCOME_TONES,
    OUTCOME_WORDS,
    TONES,
    UNKNOWN,
    check_words,
    count_checks,
    finding_facts,
    merge_findings,
    name_check,
    severity_word,
    verdict_section,
)
from ddpdoctor.report.lines import clean, format_ranks, merge_places, title_of, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.pictures import Lane, Span
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
GAP = 2  # number of blanks between two columns


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
        if self.lines:
            self.lines.append(Text())

    def clean(self, text: str) -> str:
        """Make collected text safe to print, with paths relative to this page's ``cwd``."""
        return clean(text, self.cwd)


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


def _add_table(page: TextPage, table: Table) -> None:
    """Add the groups of columns, their names and units, and a line for each row; its replacement if it is too wide."""
    space = None if page.width is None else page.width - table.indent
    cleaned = [
        replace(each, cells=tuple(map(page.clean, each.cells)), name=page.clean(each.name)) for each in table.columns
    ]
    columns = fit_columns(cleaned, space)
    if table.instead and space is not None and _total(columns) > space:
        add_blocks(page, table.instead)
        return
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + GAP + _width(column))
        else:
            spans.append((column.group, _width(column)))
    # Each group's name above its columns is padded with dashes: "-- latency ---"
    drawn = (f" {name} ".center(width, "-")[:width] if name else " " * width for name, width in spans)
    groups = (" " * GAP).join(drawn).rstrip()
    lines = [groups] if groups else []
    heads = [line for line in ([one.name for one in columns], [one.unit for one in columns]) if any(line)]
    for cells in (*heads, *zip(*(one.cells for one in columns), strict=True)):
        padded = []
        for one, cell in zip(columns, cells, strict=True):
            padding = " " * (_width(one) - cell_len(cell))
            padded.append(cell + padding if one.align == "left" else padding + cell)
        lines.append((" " * GAP).join(padded))
    rows = len(table.columns[0].cells)
    for number, line in enumerate(lines, start=rows - len(lines)):
        page.add((" " * table.indent + line).rstrip(), whole=True, tone=table.tones.get(number, Tone.PLAIN))
    for line in table.legend:
        page.add(line, first="  ")


def fit_columns(columns: Sequence[Column], width: int | None) -> tuple[Column, ...]:
    """Drop columns with a weight, the least first, until the others fit. If ``width`` is None, keep all."""
    kept = list(columns)
    while width is not None and len(kept) > 1 and _total(kept) > width:
        weighted = [(one.weight, -at) for at, one in enumerate(kept) if one.weight is not None]
        if not weighted:
            break
        del kept[-min(weighted)[1]]
    return tuple(kept)


def _width(column: Column) -> int:
    return max(map(cell_len, (column.name, column.unit, *column.cells)))


def _total(columns: Sequence[Column]) -> int:
    return sum(map(_width, columns)) + GAP * (len(columns) - 1)


MARKS = {  # of a strip, and what its legend calls them
    SpanKind.BATCH: ("d", "data"),
    SpanKind.FORWARD: ("F", "forward"),
    SpanKind.BACKWARD: ("B", "backward"),
    SpanKind.COLLECTIVE: ("c", "collective"),
    SpanKind.POINT_TO_POINT: ("p", "send/recv"),
    SpanKind.CHECKPOINT: ("k", "checkpoint"),
    SpanKind.WAIT: ("w", "wait"),
    SpanKind.HOST: (".", "script"),
}
MOST_ROWS = 8
STRIP_WIDTH = 78  # our choice: a strip fits into 80 columns also where the width is not known
NAME_WIDTH = 22  # a longer list of ranks is cut
CALLS_BEFORE = 24  # our choice: the strip begins so many calls before the fault, which is a few steps
SHARE_AFTER = 0.25  # our choice: this part of the strip is after the fault, if the job lived as long


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The time that a strip shows, and its columns."""

    start_ms: float
    end_ms: float
    columns: int

    @property
    def slice_ms(self) -> float:
        return (self.end_ms - self.start_ms) / self.columns

    def column(self, at_ms: float) -> int:
        return min(self.columns - 1, max(0, math.floor((at_ms - self.start_ms) / self.slice_ms)))


def draw_strip(timeline: Timeline, width: int) -> list[str]:
    """Return the lines of a strip in ASCII, the last one its legend; nothing without a fault or calls around it."""
    fault = next((event for event in timeline.events if event.fault), None)
    lanes = {lane.rank: lane for lane in timeline.lanes}
    rows = [
        (ranks, lane)
        for ranks in timeline.classes
        if (lane := next((lanes[rank] for rank in ranks if rank in lanes and lanes[rank].detail), None)) is not None
    ]
    rows.sort(key=lambda row: not row[1].blamed)
    shown = rows[:MOST_ROWS]
    names = [format_ranks(ranks) for ranks, _ in shown]
    names = [name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..." for name in names]
    name_width = max(map(len, names), default=0)
    columns = width - name_width - 4
    if fault is None:
        return []
    # From a few calls before the fault to a little after it
    before = 0.0
    for _, lane in shown:
        starts = [span.start_ms for span in lane.detail if span.kind is not SpanKind.HOST]
        earlier = [start_ms for start_ms in starts if start_ms < fault.at_ms]
        before = max(before, fault.at_ms - earlier[-CALLS_BEFORE:][0] if earlier else 0.0)
    after = min(timeline.length_ms - fault.at_ms, before * SHARE_AFTER / (1 - SHARE_AFTER))
    if not (math.isfinite(before + after) and before > 0 and after >= 0) or columns < 2:
        return []
    window = _Window(start_ms=fault.at_ms - before, end_ms=fault.at_ms + max(after, before / columns), columns=columns)
    drawn = [_draw(lane, window) for _, lane in shown]
    # The line above the rows, whose mark stands at the time of the fault
    at = name_width + 4 + window.column(fault.at_ms)
    label = fault.label + (f", {format_ranks(fault.ranks)}" if fault.ranks else "")
    left = f"{label} v"
    lines = [left.rjust(at + 1) if at + 1 >= len(left) else " " * at + f"v {label}"]
    for name, (_, lane), marks in zip(names, shown, drawn, strict=True):
        lines.append(f"{'> ' if lane.blamed else '  '}{name.ljust(name_width)}  {marks}".rstrip())
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more rows in report.json")
    marks = "".join(drawn)
    used = [f"{mark} {word}" for mark, word in MARKS.values() if mark in marks]
    return [*lines, f"{', '.join(used)}; each {format_time(window.slice_ms * 1e3)}"]


def _draw(lane: Lane, window: _Window) -> str:
    """Return a character for each slice: what the rank did for most of it. The inner one of nested spans counts."""
    marks: list[dict[str, float]] = [{} for _ in range(window.columns)]
    for span, start_ms, end_ms in _innermost(lane.detail, window):
        mark, _ = MARKS.get(span.kind, (" ", ""))
        for column in range(window.column(start_ms), window.column(end_ms) + 1):
            from_ms = window.start_ms + column * window.slice_ms
            part_ms = min(end_ms, from_ms + window.slice_ms) - max(start_ms, from_ms)
            if part_ms > 0:
                marks[column][mark] = marks[column].get(mark, 0.0) + part_ms
    return "".join(max(took, key=lambda mark: took[mark], default=" ") for took in marks)


def _innermost(spans: Sequence[Span], window: _Window) -> Iterator[tuple[Span, float, float]]:
    """Yield the parts of spans in the window that no later span covers."""
    free = [(window.start_ms, window.end_ms)]
    for span in reversed(spans):
        end_ms = window.end_ms if span.end_ms is None else span.end_ms
        left: list[tuple[float, float]] = []
        for start, end in free:
            inside = max(start, span.start_ms), min(end, end_ms)
            if inside[0] >= inside[1]:
                left.append((start, end))
                continue
            yield span, *inside
            left += [part for part in ((start, inside[0]), (inside[1], end)) if part[0] < part[1]]
        free = left


ROWS = 9
MAX_COLUMNS = 72  # in a wider chart, a curve of twenty sizes only gets flatter
MIN_COLUMNS = 20  # a narrower chart is unreadable
CURVE_MARKS = "ox+*#%@"
REFERENCE = "-"
LABEL_WIDTH = 8
# The characters of a curve on one line, the lowest first.
LEVELS = "_.:-=+*#"
MAX_SPARKS = 20  # our choice: the table has all numbers
MAX_CLASSES = 40  # More rows than this do not help on a screen. The report file has all of them.
MAX_RANKS_WIDTH = 28  # a longer list of ranks gets its own lines
MAX_REASONS = 5
WORD_WIDTH = max(map(len, OUTCOME_WORDS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low: float
    high: float
    steps: int

    def place(self, value: float) -> int:
        """Return the step of a value, from 0 to ``steps`` - 1."""
        return round(log_share(value, self.low, self.high) * (self.steps - 1))

    def value(self, step: int) -> float:
        return self.low * math.pow(self.high / self.low, step / max(self.steps - 1, 1))


def draw_chart(series: Series, width: int) -> list[str]:
    """Draw the lines, or return nothing if there are too few points or there is too little room."""
    columns = min(width - LABEL_WIDTH - 3, MAX_COLUMNS)
    known = [line for line in series.lines if len(line.points) > 1 and not line.is_reference]
    drawn, reference = known[: len(CURVE_MARKS)], series.reference
    if not drawn or columns < MIN_COLUMNS:
        return []
    points = [point for line in (*drawn, *([reference] if reference else ())) for point in line.points]
    across = _Scale(low=min(x for x, _ in points), high=max(x for x, _ in points), steps=columns)
    up = _Scale(low=min(y for _, y in points), high=max(y for _, y in points), steps=ROWS)
    grid = [[" "] * columns for _ in range(ROWS)]
    if reference:
        (first, height), (last, _) = reference.points[0], reference.points[-1]
        for column in range(across.place(first), across.place(last) + 1):
            grid[up.place(height)][column] = REFERENCE
    for mark, line in zip(CURVE_MARKS, drawn, strict=False):
        for x, y in line.points:
            grid[up.place(y)][across.place(x)] = mark
    title = series.title + ("" if known == drawn else f", the first {len(drawn)} of {len(known)} series")
    legend = [f"{mark} {line.name}" for mark, line in zip(CURVE_MARKS, drawn, strict=False)]
    legend += [f"{REFERENCE} {reference.name}"] if reference else []
    left, right = format_size(int(across.low)), format_size(int(across.high))
    labels = [f"{up.value(row):.3g}" if row in {0, ROWS // 2, ROWS - 1} else "" for row in range(ROWS)]
    rows = [f"{labels[row].rjust(LABEL_WIDTH)} |{''.join(grid[row])}".rstrip() for row in reversed(range(ROWS))]
    return [title, *legend, *rows, " " * (LABEL_WIDTH + 2) + left + right.rjust(across.steps - len(left))]


def draw_sparks(series: Series) -> list[str]:
    """Draw each line in one line of characters, for where a chart has no room or nobody scrolls back to it."""
    known = [line for line in series.lines if len(line.points) > 1 and not line.is_reference]
    if not known:
        return []
    sizes = [x for line in known for x, _ in line.points]
    width = max(len(line.name) for line in known[:MAX_SPARKS])
    lines = []
    for line in known[:MAX_SPARKS]:  # a character for each point, and the lowest and the highest value
        values = [y for _, y in line.points]
        scale = _Scale(low=min(values), high=max(values), steps=len(LEVELS))
        curve = "".join(LEVELS[scale.place(y)] for y in values)
        lines.append(f"{line.name.ljust(width)}  {curve}  {scale.low:.3g} to {scale.high:.3g}")
    more = [f"and {len(known) - MAX_SPARKS} more"] if len(known) > MAX_SPARKS else []
    return [f"{series.title}, {format_size(min(sizes))} to {format_size(max(sizes))}", *lines, *more]


def add_sections(page: TextPage, sections: Iterable[Section]) -> None:
    for section in sections:
        before = len(page.lines)
        page.gap()
        after_gap = len(page.lines)
        add_blocks(page, section)
        if len(page.lines) == after_gap:
            del page.lines[before:]


def add_blocks(page: TextPage, blocks: Iterable[Block]) -> None:
    for block in blocks:
        drawn: list[str] = []
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
                drawn = chart or draw_sparks(block)
            case Places():
                _add_places(page, block)
            case Timeline():
                width = STRIP_WIDTH if page.width is None else min(page.width, STRIP_WIDTH)
                *rows, legend = draw_strip(block, width) or [""]
                drawn = [*rows, *(wrap(legend, width, first="  ") if legend else [])]
        for line in drawn:
            page.add(line, whole=True)


def _add_facts(page: TextPage, block: FactList) -> None:
    width = block.width or max((cell_len(fact.label) for fact in block.facts), default=0) + 2
    for fact in block.facts:
        head = f"  {fact.label.ljust(width)}"
        for number, text in enumerate(fact.texts):
            first, tone = (" " * len(head), Tone.PLAIN) if number else (head, fact.tone)
            page.add(text, first=first, tone=tone, styled=len(head), whole=fact.whole)
            for line in () if number else fact.code:
                shown = " " * len(head) + page.clean(line)
                if page.width is not None and cell_len(shown) > page.width:
                    shown = set_cell_size(shown, page.width - 3) + "..."
                page.add(shown, tone=Tone.STRONG if line.endswith("^") else Tone.PLAIN, whole=True)


def _add_places(page: TextPage, block: Places) -> None:
    """Add ranks, one row per place. ">" marks the ranks that the verdict blames."""
    shown = block.classes[:MAX_CLASSES]
    names = [format_ranks(one.ranks) + (f" on {page.clean(one.host)}" if one.host else "") for one in shown]
    names_width = min(max(map(len, names), default=0), MAX_RANKS_WIDTH)
    state_width = max((cell_len(page.clean(one.state)) for one in shown), default=0)
    for one, name in zip(shown, names, strict=True):
        mark, tone = ("> ", Tone.STRONG) if one.blamed else ("  ", Tone.PLAIN)
        state = page.clean(one.state)
        padding = " " * (state_width - cell_len(state))
        whole = f"{mark}{name.ljust(names_width)}  {state}{padding}  {page.clean(one.place)}".rstrip()
        if len(name) <= MAX_RANKS_WIDTH and (page.width is None or cell_len(whole) <= page.width):
            page.add(whole, tone=tone, whole=True)
            continue
        page.add(name, first=mark, tone=tone)
        for text in filter(None, (state, one.place)):
            page.add(text, first="      ", tone=tone)
    if len(block.classes) > len(shown):
        page.add(f"and {len(block.classes) - len(shown)} more rows in report.json", first="  ")


def render_text(
    report: Report,
    *,
    width: int | None,
    color: bool,
    run_dir: Path | None,
    cwd: Path | None = None,
    verbose: bool = False,
) -> str:
    """Render a report. ``width`` is None if the output is not a terminal. Then nothing is wrapped."""
    content = read_content(report)
    page = TextPage(width=width, cwd=cwd)
    _add_head(page, report, content, run_dir, verbose=verbose)
    # The verdict says the rest.
    pictures = content.pictures if content.ends_with_verdict else ()  # no other has a timeline
    strips = [(block,) for block in pictures if isinstance(block, Timeline)]
    add_sections(page, (*content.about, *content.sections, *strips))
    if content.ends_with_verdict:
        # Add checks without an answer, other findings in short, and the verdict last, so that it stays on the screen
        unknown = [check for check in report.checks if check.outcome in UNKNOWN]
        if unknown and (report.findings or (report.job is not None and report.job.ended_badly)):
            reasons = [f"{name_check(check)}: {OUTCOME_WORDS[check.outcome]}: {check.reason}" for check in unknown]
            add_sections(page, [(items(reasons, "  "),)])
        facts = []
        for finding in merge_findings(content.others):
            places = [f"at {place}" for place in merge_places(finding.where)]
            fix = [f"to do: {finding.fix}"] if finding.fix else []
            more = [] if finding.severity is Severity.INFO else [*places, *fix]
            texts = (f"{title_of(finding)}: {finding.summary}", *more)
            facts.append(FactEntry(finding.severity.value, texts, tone=TONES[finding.severity]))
        add_sections(page, [(FactList(tuple(facts), width=FACT_WIDTH),)])
        if report.verdict is not None:
            add_sections(page, [verdict_section(report, report.verdict)])
    else:
        _add_checks(page, report, content, verbose=verbose)
    # A terminal opens the files of a job's own lines. Paths in logs may be of any machine.
    lines = [*(row.where for row in report.ranks), *(report.verdict.where if report.verdict is not None else ())]
    named = {(at.file, at.line) for at in lines if at is not None and at.file.startswith("/")}
    for file, number in named if color and report.job is not None else ():
        shown = re.compile(rf"(?<![\w./-]){re.escape(page.clean(f'{file}:{number}'))}(?!\d)")
        for line in page.lines:
            line.highlight_regex(shown, f"link file://{quote(file, errors='replace')}")
    return draw(page, color=color)


def render_verdict(report: Report) -> str:
    """Render only the headline, how it ended, and what backs the verdict, for a program that has the rest as data."""
    content = read_content(report)
    page = TextPage(width=None, cwd=None)
    _add_head(page, report, content, None, verbose=True)
    if report.verdict is not None:
        add_sections(page, [verdict_section(report, report.verdict)])
    return draw(page, color=False)


def _add_head(page: TextPage, report: Report, content: Content, run_dir: Path | None, *, verbose: bool) -> None:
    """Add the answer as the first line, then how it ended, the number of checks, the run folder, and remarks."""
    tone = content.tone if report.verdict is None else TONES[report.verdict.severity]
    page.add(content.headline, first="ddpdoctor: ", tone=tone)
    details = "" if verbose else " (-v shows each)"
    checks = f"checks: {count_checks(report)}{details}" if content.is_checklist else ""
    place = "" if run_dir is None else f"report in {run_dir}"
    for line in ("; ".join(filter(None, (content.status, checks, place))), *content.remarks):
        if line:
            page.add(line, first="  ")


def _add_checks(page: TextPage, report: Report, content: Content, *, verbose: bool) -> None:
    checks = report.checks
    if verbose:
        # Add every check and what it found, by group. If it has findings, their worst severity stands for its outcome.
        width = max((len(check.id) for check in checks), default=0)
        for group, members in grouped((check.group, check) for check in checks).items():
            page.gap()
            page.add(group or "checks", tone=Tone.STRONG)
            for check in members:
                word, tone = OUTCOME_WORDS[check.outcome], OUTCOME_TONES[check.outcome]
                severities = [finding.severity for finding in report.findings if finding.kind == check.id]
                if check.outcome in {Outcome.PASSED, Outcome.FAILED} and severities:
                    worst = min(severities, key=lambda severity: severity.order)
                    word, tone = severity_word(worst), TONES[worst]
                head = f"  {word.ljust(WORD_WIDTH)}  {check.code}  {check.id.ljust(width)}  "
                page.add(check_words(check), first=head, tone=tone, styled=2 + len(word))
    else:
        unknown = [check for check in checks if check.outcome in UNKNOWN]
        if unknown:  # they must not read like "passed"
            page.gap()
        for check in unknown:
            head, tone = f"{OUTCOME_WORDS[check.outcome]}  ", OUTCOME_TONES[check.outcome]
            page.add(f"{name_check(check)}: {check_words(check)}", first=head, tone=tone, styled=len(head))
        if {check.outcome for check in checks} == {Outcome.SKIPPED}:
            for reason, times in Counter(check.reason for check in checks).most_common(MAX_REASONS):
                of = name_check(checks[0]) if len(checks) == 1 else count_of(times, "check")
                page.add(f"{of}: {reason}", first="skipped  ")
    for finding in reversed(report.findings):
        if verbose or not content.is_checklist or finding.severity is not Severity.INFO:
            title = f"{severity_word(finding.severity)}  {title_of(finding, hosts=content.several_hosts)}"
            label = "note" if finding.severity is Severity.INFO else "wrong"
            backing = finding_facts(finding, explain=finding == report.verdict)
            facts = FactList((FactEntry(label, (finding.summary,)), *backing), width=FACT_WIDTH)
            add_sections(page, [(Heading(title, tone=TONES[finding.severity]), facts)])
