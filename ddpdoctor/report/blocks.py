"""The blocks of a report: typed data that each format renders in its own way.

To add a command, write a function that turns its data into ``Content``, and register it in ``BUILDERS``. To add a
format, write a module that renders each kind of block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.model.codec import WrongValue
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.pictures import RankWaits, SourceExcerpt, Timeline
from ddpdoctor.model.words import count_of, grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ddpdoctor.model.findings import Finding

    Row = tuple[str, Mapping[int, "GridCell"]]
    from ddpdoctor.model.findings import Report

MAX_ROWS = 60
MAX_COLUMNS = 64  # Our choice: more is unreadable on a page. The report's data has the rest.
MARK = "> "  # the prefix of a row or column to look at, as in the tables of a terminal


class Tone(str, Enum):
    """What a text means to the reader. Each format chooses its style."""

    PLAIN = "plain"
    STRONG = "strong"
    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a section."""

    text: str
    tone: Tone = Tone.STRONG


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = Tone.PLAIN
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a list; ``fix`` is what to do about it."""

    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    items: tuple[Item, ...]
    mark: str = ""  # the prefix of each entry in formats without list marks


@dataclass(frozen=True, slots=True)
class FactEntry:
    """A label with one or more paragraphs."""

    label: str
    texts: tuple[str, ...]
    tone: Tone = Tone.STRONG  # the tone of the label
    whole: bool = False  # never wrap the text, because it is a command
    code: tuple[str, ...] = ()  # in formats of plain text, the source lines below the first text


@dataclass(frozen=True, slots=True)
class FactList:
    """A list of facts. A fact without texts is left out."""

    facts: tuple[FactEntry, ...]
    width: int = 0  # Width of the labels including the gap, so that several lists align. 0: use the longest label.


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its name, the name of its group over it, its unit, and its cells."""

    name: str
    cells: tuple[str, ...]
    group: str = ""
    unit: str = ""
    align: Literal["left", "right"] = "right"
    # If columns do not fit, the one with the least weight is dropped first. None: never drop it.
    weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length."""

    columns: tuple[Column, ...]
    tones: dict[int, Tone] = field(default_factory=dict)  # tones by row number, for rows that are not plain
    indent: int = 0
    legend: tuple[str, ...] = ()  # the meaning of its marks
    instead: tuple[Block, ...] = ()  # shown if the table is too wide


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A named line of a chart: (x, y) points, all above 0."""

    name: str
    points: tuple[tuple[int, float], ...]
    # A level or an earlier run to compare with. Documents draw it dashed; text charts leave it out.
    is_reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Lines over a common x, with both axes logarithmic. The reference is a level to compare them with."""

    title: str
    lines: tuple[ChartLine, ...]
    reference: ChartLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks in the same state at the same line. ``place`` is empty if the line is unknown."""

    ranks: tuple[int, ...]
    host: str  # empty if they are on several hosts, or if the job has only one
    state: str
    place: str
    blamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where ranks are: one row for ranks in the same state at the same line."""

    classes: tuple[RankClass, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A frame of merged stacks and the frames that it called. ``strong``: the user's own code."""

    text: str
    ranks: tuple[int, ...]
    strong: bool = False
    blamed: bool = False
    children: tuple[TreeNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Stacks of all ranks, merged from the outermost frame."""

    title: str
    roots: tuple[TreeNode, ...]


@dataclass(frozen=True, slots=True)
class GridCell:
    """One cell of a grid. ``about`` is what hovering says."""

    text: str = ""
    tone: Tone = Tone.PLAIN
    about: str = ""
    level: float | None = None  # from 0 (low) to 1 (high), for cells that are drawn as a heat map


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix, such as ranks by tensors or checks by hosts."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[GridCell, ...], ...]  # one tuple per row, one cell per column
    row_name: str = ""
    column_name: str = ""
    legend: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Stacked bars with one scale: what a step of each rank consists of. Documents draw them; text has a table."""

    title: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, bool, tuple[float, ...]], ...]  # name, whether a finding names it, and a value for each part
    unit: str
    legend: tuple[str, ...] = ()


# Blocks that formats of plain text draw in little, or leave out. The first three are what a report holds of them.
Picture = Timeline | RankWaits | SourceExcerpt | Tree | Grid | Bars
Block = Heading | Text | Items | FactList | Table | Series | Places | Picture
Section = tuple[Block, ...]  # Blocks that belong together. Formats separate sections.


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Measured values for programs."""

    names: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The command-specific content of a report. Findings and checks are rendered the same way for all commands."""

    # The verdict in one sentence, or that no problem was found. It is the first line, and the title of a document.
    headline: str
    tone: Tone = Tone.PLAIN  # of the headline without a verdict
    status: str = ""  # how it ended and how much was found, in one line below the headline
    verb: str = ""  # the command named in the title of a document
    about: tuple[Section, ...] = ()  # What was checked. It comes before everything else.
    sections: tuple[Section, ...] = ()  # the results, in reading order
    records: Records | None = None
    remarks: tuple[str, ...] = ()  # lines that belong to the status
    several_hosts: bool = False  # findings name their hosts
    # On a screen, only the verdict is shown with its evidence. Each other finding takes a line.
    ends_with_verdict: bool = False
    # Draws what a document has before the results: the timeline, who waits for whom, stacks, grids.
    draw_pictures: Callable[[], Iterable[Block]] = tuple
    others: tuple[Finding, ...] = ()  # with ``ends_with_verdict``: findings beside the verdict that no section shows
    is_checklist: bool = False  # count the outcomes of checks, and show notes only as details

    @property
    def pictures(self) -> tuple[Block, ...]:
        return tuple(self.draw_pictures())


def table_of(
    heads: Sequence[str | tuple[str, str]],
    rows: Sequence[Sequence[str]],
    left: int | Collection[str] = 1,
    *,
    weights: Mapping[str, int] | None = None,
    **more: Any,
) -> Table:
    """Return an indented table of rows. A head is a name, or a name and a unit.

    The first ``left`` columns, or those of these names, are aligned to the left. ``more`` are fields of a table.
    """
    columns = []
    for at, head in enumerate(heads):
        name, unit = (head, "") if isinstance(head, str) else head
        align: Literal["left", "right"] = "left" if (at < left if isinstance(left, int) else name in left) else "right"
        cells = tuple(row[at] for row in rows)
        columns.append(Column(name=name, unit=unit, cells=cells, align=align, weight=(weights or {}).get(name)))
    return Table(columns=tuple(columns), indent=2, **more)


def items(texts: tuple[str, ...] | list[str], mark: str = "") -> Items:
    return Items(tuple(Item(text) for text in texts), mark=mark)


def titled_list(title: str, texts: tuple[str, ...] | list[str]) -> tuple[Section, ...]:
    """Return a section with a title and a list, or nothing if the list is empty."""
    return ((Heading(title), items(texts, "  ")),) if texts else ()


def grid_by_member(
    title: str,
    rows: Sequence[Row],
    members: Iterable[int],
    name: Callable[[Sequence[int]], str],
    *,
    axes: tuple[str, str],
    legend: Iterable[str] = (),
) -> Grid:
    """Return a grid of rows by members, with at most ``MAX_COLUMNS`` columns. ``name`` names members with equal cells.

    A member without a cell in a row has an empty one. ``axes`` say what a row and a column is.
    """
    empty = GridCell()
    columns = ((tuple(cells.get(member, empty) for _, cells in rows), member) for member in members)
    folded = list(grouped(columns).items())
    shown = folded[:MAX_COLUMNS]
    more = sum(len(those) for _, those in folded[MAX_COLUMNS:])
    labels, names = tuple(label for label, _ in rows), tuple(name(those) for _, those in shown)
    body = tuple(tuple(cells[at] for cells, _ in shown) for at in range(len(rows)))
    return Grid(title, labels, names, body, *axes, (*legend, *not_shown(more, axes[1])))


def not_shown(count: int, noun: str) -> tuple[str, ...]:
    """Return the line of a legend about what a grid leaves out, or nothing if it shows everything."""
    return (f"Not shown: {count_of(count, f'more {noun}')}.",) if count > 0 else ()


def linear_level(value: float, high: float) -> float | None:
    """Return the place of a value between 0 and ``high``, from 0 to 1. None if it has none."""
    if not (math.isfinite(value) and math.isfinite(high)) or high <= 0:
        return None
    return round(min(max(value / high, 0.0), 1.0), 3)


def log_share(value: float, low: float, high: float) -> float:
    """Return the place of a value between ``low`` (0) and ``high`` (1) by its logarithm."""
    return math.log(value / low) / (math.log(high / low) or 1.0)


def log_level(value: float, low: float, high: float) -> float | None:
    """Return the place of a value between ``low`` and ``high`` by its logarithm, from 0 to 1. None if it has none."""
    if not all(math.isfinite(one) and one > 0 for one in (value, low, high)) or low >= high:
        return None
    return round(min(max(log_share(value, low, high), 0.0), 1.0), 3)


JOB = "ddpdoctor.report.verbs.job:job_content"
CHECKS = "ddpdoctor.report.verbs.checks:checklist_content"
# Module and function by key in ``Report.data``. The first key that the report has counts. Modules load on demand.
BUILDERS = {
    "scaling": "ddpdoctor.report.verbs.tuning:scaling_content",
    "tune": "ddpdoctor.report.verbs.tuning:tune_content",
    "results": "ddpdoctor.report.bandwidth.content:bandwidth_content",
    "trial": "ddpdoctor.report.verbs.trial:trial_content",
    "diff": "ddpdoctor.report.verbs.checks:diff_content",
    "rendezvous": "ddpdoctor.report.verbs.rendezvous:rendezvous_content",
    "shares": "ddpdoctor.report.verbs.checks:shares_content",
    "drawn": "ddpdoctor.report.verbs.checks:drawn_content",
    "files": "ddpdoctor.report.verbs.checks:checkpoint_content",
    "comparison": "ddpdoctor.report.verbs.speed:comparison_content",
    "run_differences": "ddpdoctor.report.verbs.speed:run_diff_content",
    "evidence": "ddpdoctor.report.verbs.job:logs_content",
    "nodes": CHECKS,
}


def read_content(report: Report) -> Content:
    """Return the content of a report. Raises ``UserError`` if its data is damaged."""
    key = next((key for key in BUILDERS if key in report.data), "")
    path = BUILDERS.get(key) or (CHECKS if report.job is None else JOB)
    module, _, name = path.partition(":")
    build: Callable[[Report], Content] = getattr(import_module(module), name)
    try:
        return build(report)
    except WrongValue as error:
        problem = f"the report cannot be read: data.{key}.{error}"
        raise UserError(problem, help="The file is damaged: run the check again.") from error
