"""The report as a page: one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.words import grouped
from ddpdoctor.report.blocks import (
    FactList,
    Grid,
    Heading,
    Items,
    Lanes,
    Places,
    Series,
    SourceLines,
    Table,
    Text,
    Tone,
    Tree,
    WaitGraph,
)
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import (
    COMMAND,
    OUTCOME_TONES,
    OUTCOME_WORDS,
    TONES,
    UNKNOWN,
    check_words,
    count_checks,
    merge_findings,
    severity_word,
)
from ddpdoctor.report.html.drawings import lane_rows, lay_out_chart, lay_out_graph, timeline_data
from ddpdoctor.report.lines import clean, format_hosts, format_place, format_ranks, format_time, title_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2 import Environment

    from ddpdoctor.model.findings import Finding, Place, Report
    from ddpdoctor.report.blocks import Block, Column, Content, Section, TreeNode

RESULTS = "Results"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A part of a page. ``id`` is its name in links."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    tone: Tone = Tone.STRONG


def list_parts(content: Content) -> tuple[tuple[PagePart, ...], tuple[PagePart, ...]]:
    """Return the parts before the other findings, which support the verdict, and the parts behind them."""
    drawn = {title for section in content.pictures for block in section if (title := _title(block)) is not None}
    sections = [section for section in content.sections if section and _title(section[0]) not in drawn]
    places = [section for section in sections if (len(section) == 1 and isinstance(section[0], Places))]
    first = places if len(places) == 1 else []  # with several, each belongs to an attempt
    rest = [section for section in sections if section not in first]
    return _parts((*first, *content.pictures), "p"), _parts(rest, "r")


def _parts(sections: Iterable[Section], prefix: str) -> tuple[PagePart, ...]:
    """Make a part of each section. One without a title continues the part before it."""
    parts: list[PagePart] = []
    for section in filter(None, sections):
        head, tone, blocks = section[0], Tone.STRONG, section
        if isinstance(head, Heading):
            tone, blocks = head.tone, section[1:]
        title = _title(head)
        if title is None and parts:
            last = parts.pop()
            parts.append(PagePart(id=last.id, title=last.title, tone=last.tone, blocks=last.blocks + blocks))
        else:
            parts.append(PagePart(id=f"{prefix}{len(parts)}", title=title or RESULTS, tone=tone, blocks=blocks))
    return tuple(parts)


def _title(block: Block) -> str | None:
    """Return the title that a section has from its first block."""
    match block:
        case Heading():
            return block.text
        case Lanes():
            return "Timeline"
        case WaitGraph():
            return "Who waits for whom"
        case SourceLines():
            return "Source"
        case Places():
            return "Where the ranks are"
        case Tree() | Grid() | Series():
            return block.title
        case _:
            return None


ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def embed(data: Any, folder: Path | None = None) -> str:
    """Return data as JSON in ASCII without a character that HTML reads. Texts are cleaned as everywhere else.

    Paths below ``folder`` lose it.
    """
    text = json.dumps(_cleaned(data, folder), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def _cleaned(data: Any, folder: Path | None) -> Any:
    match data:
        case str():
            return clean(data, folder)
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: _cleaned(value, folder) for name, value in data.items()}
        case list() | tuple():
            return [_cleaned(value, folder) for value in data]
        case _:
            return data


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameStep:
    """What a template writes next: the start of frames that can be folded, a frame, a fork, or an end."""

    kind: Literal["open", "frame", "fork", "close"]
    node: TreeNode


def list_frames(tree: Tree) -> tuple[FrameStep, ...]:
    """Return the steps in order. Frames in a row that the same ranks are in stand below each other, not nested."""
    steps: list[FrameStep] = []
    todo = [FrameStep(kind="frame", node=root) for root in reversed(tree.roots)]
    while todo:
        step = todo.pop()
        if step.kind != "frame":
            steps.append(step)
            continue
        row = [step.node]
        while len(row[-1].children) == 1 and row[-1].children[0].ranks == row[-1].ranks:
            row.append(row[-1].children[0])
        last = row[-1]
        if len(row) == 1 and not last.children:
            steps.append(step)
            continue
        steps.append(FrameStep(kind="open", node=row[0]))
        steps += [FrameStep(kind="frame", node=node) for node in row[1:]]
        todo.append(FrameStep(kind="close", node=last))
        if last.children:
            steps.append(FrameStep(kind="fork", node=last))
            todo += [FrameStep(kind="frame", node=child) for child in reversed(last.children)]
    return tuple(steps)


HEAT_LEVELS = 8  # shades of a heat map, for levels from 0 to 1


class BlockDrawer:
    """Draws the blocks of one page, and gives those that are linked to or scripted a name of their own."""

    def __init__(self, env: Environment, folder: Path | None = None) -> None:
        env.globals |= {"draw": self.draw, "heat": lambda level: round(min(max(level, 0.0), 1.0) * (HEAT_LEVELS - 1))}
        self._macros: Any = env.get_template("blocks.html.jinja").module
        self._folder = folder
        self._numbers = itertools.count(1)

    def draw(self, block: Block, under: str = "") -> Any:  # noqa: PLR0911 - one for each kind
        """Return the markup of a block. ``under`` is the title above it, which a picture does not repeat."""
        macros, name = self._macros, f"b{next(self._numbers)}"
        match block:
            case Heading():
                return macros.heading(block)
            case Text():
                return macros.text(block)
            case Items():
                return macros.items(block)
            case FactList():
                return macros.facts(block)
            case Table():
                return macros.table(block)
            case Places():
                return macros.places(block)
            case Series():
                return macros.chart(lay_out_chart(block), under)
            case Lanes():
                data = embed(timeline_data(block.timeline), self._folder)
                return macros.lanes(block.timeline, lane_rows(block.timeline), data, name)
            case WaitGraph():
                return macros.graph(block, lay_out_graph(block), name)
            case Tree():
                return macros.tree(block.title, list_frames(block), under)
            case SourceLines():
                return macros.source(block)
            case Grid():
                return macros.grid(block, name, under)


FOLDER = Path(__file__).parent
# Joined in this order to the one script of a page.
SCRIPTS = ("page.js", "timeline_data.js", "timeline_drawing.js", "timeline.js")
CHECK_ORDER = (Outcome.FAILED, Outcome.CRASHED, Outcome.INCONCLUSIVE, Outcome.PASSED, Outcome.SKIPPED)


def render_html(report: Report) -> str:
    """Render the page. It loads nothing from elsewhere. Raises ``UserError`` if the report is damaged."""
    content = read_content(report)
    folder = find_folder(report)
    env = make_environment(folder)
    style, script = read_file("page.css"), "".join(map(read_file, SCRIPTS))
    # A policy under which nothing runs but the page's own script, and nothing is loaded
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    )
    # What the headline means to the reader
    if report.verdict is not None:
        tone = TONES[report.verdict.severity].value
    elif report.job is not None and report.job.ended_badly:
        tone = "warning"
    else:
        answered = any(check.outcome is Outcome.PASSED for check in report.checks)
        tone = "good" if answered or not report.checks else "note"
    verb = content.verb or "".join(word for word in report.command[1:2] if word.replace("-", "").isalpha())
    return env.get_template("page.html.jinja").render(
        report=report,
        content=content,
        title=f"ddpdoctor {verb}".strip(),
        verdict=report.verdict,
        headline=content.headline,
        tone=tone,
        parts=list_parts(content),
        others=_others(report, content),
        draw=BlockDrawer(env, folder).draw,
        folder=folder,
        style=style,
        script=script,
        policy=policy,
        counts=count_checks(report),
        checks=sorted(report.checks, key=lambda check: CHECK_ORDER.index(check.outcome)),
        has_unknown=any(check.outcome in UNKNOWN for check in report.checks),
    )


def find_folder(report: Report) -> Path | None:
    """Return the folder of the user's code. Paths below it are shown without it, save in the verdict and commands."""
    places = [*(report.verdict.where if report.verdict else ()), *(row.where for row in report.ranks if row.where)]
    folder = PurePosixPath(places[0].file).parent if places else PurePosixPath()
    return Path(folder) if folder.is_absolute() and folder.parent != folder else None


def make_environment(folder: Path | None = None) -> Environment:
    """Return the environment of the templates. It escapes what is not markup of its own.

    Paths below ``folder`` lose it, unless the filter ``whole`` keeps them.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import escape

    def finalize(value: Any) -> Any:
        """Show control and bidi characters of a plain text. Markup has been through this already."""
        return value if hasattr(value, "__html__") or not isinstance(value, str) else clean(value, folder)

    def by_place(where: tuple[Place, ...]) -> list[tuple[tuple[int, ...], Place]]:
        """Return each line of code once, with its ranks."""
        places = {format_place(place): place for place in reversed(where)}
        ranks = grouped((format_place(place), place.rank) for place in where)
        return [(tuple(at), places[line]) for line, at in ranks.items()]

    def by_group(columns: tuple[Column, ...]) -> list[tuple[str, int]]:
        """Return the groups over the columns, with the number of columns of each."""
        return [(group, len(list(members))) for group, members in itertools.groupby(columns, lambda one: one.group)]

    env = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    env.filters |= {
        "ranks": format_ranks, "hosts": format_hosts, "time": format_time, "word": severity_word,
        "tone": lambda severity: TONES[severity].value, "outcome_tone": lambda outcome: OUTCOME_TONES[outcome].value,
        "outcome_word": OUTCOME_WORDS.get, "is_command": lambda fix: COMMAND.match(fix) is not None,
        "whole": lambda text: escape(clean(text)),
        "title_of": title_of, "check_words": check_words, "by_place": by_place, "by_group": by_group,
        "rows": lambda table: list(zip(*(column.cells for column in table.columns), strict=True)),
    }  # fmt: skip
    return env


@cache
def read_file(name: str) -> str:
    """Return a file of this package."""
    return (FOLDER / name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _others(report: Report, content: Content) -> tuple[Finding, ...]:
    """Return the findings beside the verdict, the worst first."""
    found = content.others if content.ends_with_verdict else report.findings
    ordered = sorted(found, key=lambda finding: list(Severity).index(finding.severity))
    return merge_findings(finding for finding in ordered if finding != report.verdict)
