"""What a report shows, as blocks: typed data that each format draws in its own way.

To add a verb, write one function that turns its data into ``Content`` and name it in ``contents.py``. To add a format,
write one module that draws each kind of block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Finding


class Tone(str, Enum):
    """What a text means to the reader; each format chooses a look for it."""

    PLAIN = "plain"
    STRONG = "strong"
    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The title of a section."""

    text: str
    tone: Tone = Tone.STRONG


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = Tone.PLAIN
    indent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry of a list; ``fix`` is what to do about it."""

    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list of sentences."""

    items: tuple[Item, ...]
    mark: str = ""
    """What stands before each entry where the format has no marks of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A label and what it holds, in one paragraph or more."""

    label: str
    texts: tuple[str, ...]
    tone: Tone = Tone.STRONG
    """Of the label."""
    whole: bool = False
    """A command: it is never broken into lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Labels with what they hold; a fact without texts is left out."""

    facts: tuple[Fact, ...]
    width: int = 0
    """Of the labels with the gap behind them, so that lists below each other line up; 0: by the longest label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: its name, the name of its group over it, its unit, and its cells."""

    name: str
    cells: tuple[str, ...]
    group: str = ""
    unit: str = ""
    align: Literal["left", "right"] = "right"
    weight: int | None = None
    """Of the columns that do not fit, those with the least weight go first; None: it always stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length."""

    columns: tuple[Column, ...]
    tones: dict[int, Tone] = field(default_factory=dict)
    """Tones of rows that are not plain, by their number."""
    indent: int = 0
    legend: tuple[str, ...] = ()
    """What its marks mean."""
    instead: tuple[Block, ...] = ()
    """Shown where the table is too wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named line of a chart: points of x and y, all above 0."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Lines over a common x, both axes logarithmic; the reference is a level to compare them with."""

    title: str
    lines: tuple[Line, ...]
    reference: Line | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks in the same state at the same line. ``place`` is empty where no line is known."""

    ranks: tuple[int, ...]
    host: str
    """Empty where they are on several hosts, or the job has one."""
    state: str
    place: str
    blamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where ranks stand: a row for those in the same state at the same line."""

    classes: tuple[RankClass, ...]


Block = Heading | Text | Items | Facts | Table | Series | Places
Section = tuple[Block, ...]
"""Blocks that belong together; sections are set apart from each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Values as they were measured, for programs."""

    names: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a verb has to show of its report; the findings and checks of a report are drawn alike for all verbs."""

    status: str
    """How it ended, in one line."""
    headline: str = ""
    """The title of a document; empty: as ``status``."""
    verb: str = ""
    """Named in the title of a document."""
    about: tuple[Section, ...] = ()
    """What was looked at: it stands before everything else."""
    sections: tuple[Section, ...] = ()
    """What was seen, in reading order."""
    records: Records | None = None
    remarks: tuple[str, ...] = ()
    """Lines that belong to the status."""
    several_hosts: bool = False
    """Findings name their hosts."""
    ends_with_verdict: bool = False
    """On a screen the verdict comes last, and the status first; else the status comes last."""
    others: tuple[Finding, ...] = ()
    """Then: findings beside the verdict that no section shows."""
    is_checklist: bool = False
    """The outcomes of checks are counted, and notes are details."""


def items(texts: tuple[str, ...] | list[str], mark: str = "") -> Items:
    """Return a list of plain sentences."""
    return Items(items=tuple(Item(text=text) for text in texts), mark=mark)


def titled_list(title: str, texts: tuple[str, ...] | list[str]) -> tuple[Section, ...]:
    """Return a section with a title and a list; nothing where the list is empty."""
    return ((Heading(text=title), items(texts, "  ")),) if texts else ()
