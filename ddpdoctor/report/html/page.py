"""The report as a page: one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
from datetime import datetime
from functools import cache
from pathlib import Path, PurePosixPath
from statistics import median
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from ddpdoctor.model.consistency import Consistency
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.pictures import RankWaits, SourceExcerpt, SpanKind, Timeline
from ddpdoctor.model.words import format_digits, format_size, format_span, grouped
from ddpdoctor.report import blocks as bl
from ddpdoctor.report import findings
from ddpdoctor.report.bandwidth.measured import read_bandwidth
from ddpdoctor.report.findings import read_picture
from ddpdoctor.report.lines import clean, cleaned, format_hosts, format_place, format_ranks, format_time, title_of
from ddpdoctor.report.verbs.job import REPLICAS
from ddpdoctor.report.verbs.speed import read_paces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jinja2 import Environment

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.pictures import Span, WaitingRanks

RESULTS = "Results"
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
WIDTH, HEIGHT = 720, 340  # of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 58, 704, 12, 306  # where the axes are, in pixels
MAX_TICKS = 9
LEVEL_STYLE = 7  # The last of the colors of the page's style sheet, for levels. The others are for lines.
BOX_WIDTH, BOX_HEIGHT = 216, 66  # of a box, in pixels
ACROSS, DOWN, MARGIN = 64, 18, 10  # gaps between layers and between boxes, and around all
MAX_NODES = 40  # A larger graph is unreadable. The list beside it has all.
MAX_CHARACTERS = 31  # what fits a line of a box
TICKS_PER_MS = 100  # times are whole hundredths of a millisecond: 10 us is finer than a screen shows
ABSENT = -1
HEAT_LEVELS = 8  # shades of a heat map, for levels from 0 to 1
# In a text that is already escaped: a command between backticks, or an option such as --hang-timeout
OPTION = re.compile(r"`[^`\n]+`|(?<![\w-])--?[A-Za-z][\w./=-]*\w")
# The macro of a block that needs no more than itself
MACROS = {
    bl.Heading: "heading", bl.Text: "text", bl.Items: "items", bl.FactList: "facts", bl.Table: "table",
    bl.Places: "places",
}  # fmt: skip


def list_parts(content: bl.Content, pictures: Iterable[bl.Block]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the parts before the other findings, which support the verdict, and the parts behind them.

    A section without a title continues the part before it, and the graph of waits that of where the ranks are.
    """
    pictures = [block for block in pictures if not isinstance(block, SourceExcerpt)]  # the card of the verdict has it
    drawn = {_title(block) for block in pictures if not isinstance(block, RankWaits)} - {None}
    sections = [section for section in content.sections if section and _title(section[0]) not in drawn]
    places = [section for section in sections if (len(section) == 1 and isinstance(section[0], bl.Places))]
    first: list[bl.Section] = [*places] if len(places) == 1 else []  # with several, each belongs to an attempt
    first += [section for section in sections if any(isinstance(block, bl.Bars) for block in section)]
    rest = [section for section in sections if section not in first]
    before: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []
    for parts, those, prefix in ((before, (*first, *((block,) for block in pictures)), "p"), (behind, rest, "r")):
        for section in filter(None, those):
            head, tone, blocks = section[0], bl.Tone.STRONG, section
            if isinstance(head, bl.Heading):
                tone, blocks = head.tone, section[1:]
            title = _title(head)
            continues = title is None or isinstance(head, RankWaits)
            known = [part for part in parts if title in (None, part["title"])] if continues else []
            if known:
                known[-1]["blocks"] += blocks
            else:
                name = f"{prefix}{len(parts)}"
                parts.append({"id": name, "title": title or RESULTS, "tone": tone, "blocks": blocks})
    return before, behind


def _title(block: bl.Block) -> str | None:
    match block:
        case bl.Heading():
            return block.text
        case Timeline():
            return "Timeline"
        case bl.Places() | RankWaits():
            return "Where the ranks are"
        case bl.Tree() | bl.Grid() | bl.Series() | bl.Bars():
            return block.title
        case _:
            return None


def embed(data: Any, folder: Path | None = None) -> str:
    """Return data as JSON in ASCII without a character that HTML reads. Paths below ``folder`` lose it."""
    text = json.dumps(cleaned(data, folder), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def list_frames(tree: bl.Tree) -> list[tuple[str, bl.TreeNode]]:
    """Return what the template writes: the start ("open") of frames that can be folded, a "frame", a "fork", or an end.

    Frames in a row that the same ranks are in stand below each other, not nested.
    """
    steps: list[tuple[str, bl.TreeNode]] = []
    todo = [("frame", root) for root in reversed(tree.roots)]
    while todo:
        kind, node = todo.pop()
        if kind != "frame":
            steps.append((kind, node))
            continue
        row = [node]
        while len(row[-1].children) == 1 and row[-1].children[0].ranks == row[-1].ranks:
            row.append(row[-1].children[0])
        last = row[-1]
        if len(row) == 1 and not last.children:
            steps.append((kind, node))
            continue
        steps += [("open", node), *(("frame", one) for one in row[1:])]
        todo.append(("close", last))
        if last.children:
            steps.append(("fork", last))
            todo += [("frame", child) for child in reversed(last.children)]
    return steps


def lay_out_chart(series: bl.Series) -> dict[str, Any]:
    """Give each point its place, and return what the template draws. Points that are not above 0 are left out.

    A curve is its name, path, marks, style and whether it is a reference; a mark x, y and what hovering says.
    """
    lines = [(line, line.is_reference) for line in series.lines]
    lines += [(series.reference, True)] if series.reference is not None else []
    # Each line has a color of its own. An earlier run has that of the line before it, a level the last one.
    styles: list[int] = []
    for line, is_reference in lines:
        before = max((style for style in styles if style != LEVEL_STYLE), default=-1)
        is_level = is_reference and len({y for _, y in line.points}) == 1
        styles.append(LEVEL_STYLE if is_level else before if is_reference else (before + 1) % LEVEL_STYLE)
    drawable = [[(x, y) for x, y in line.points if x > 0 and y > 0 and math.isfinite(y)] for line, _ in lines]
    points = [point for those in drawable for point in those]
    chart: dict[str, Any] = {"title": series.title, "across": [], "up": [], "minor": [], "curves": []}
    if not points:
        return chart
    sizes = _limits([x for x, _ in points], room=1.0)
    heights = _limits([y for _, y in points], room=1.25)

    def place(x: float) -> float:
        return round(LEFT + bl.log_share(x, *sizes) * (RIGHT - LEFT), 1)

    def height(y: float) -> float:
        return round(BOTTOM + bl.log_share(y, *heights) * (TOP - BOTTOM), 1)

    first, last = math.ceil(math.log2(sizes[0]) - 1e-9), math.floor(math.log2(sizes[1]) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / MAX_TICKS))
    powers = [2**power for power in range(max(first, 0), last + 1, step)]
    # 1, 2 and 5 times the powers of ten within the axis, or the powers alone if those are enough
    decades = range(math.floor(math.log10(heights[0])), math.ceil(math.log10(heights[1])) + 1)
    values = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    ticks = fine = [value for value in values if heights[0] <= value <= heights[1]]
    if len(fine) > MAX_TICKS:
        ticks = [value for value in fine if value in values[::3]]
    ticks = ticks[:: max(1, math.ceil(len(ticks) / MAX_TICKS))]
    chart["minor"] = [height(value) for value in fine if value not in ticks] if len(fine) <= 3 * MAX_TICKS else []
    for style, (line, is_reference), those in zip(styles, lines, drawable, strict=True):
        marks = [(place(x), height(y), f"{line.name}: {y:.4g} at {format_size(x)}") for x, y in those]
        path = "M" + "L".join(f"{x} {y}" for x, y, _ in marks) if marks else ""
        name = f"{line.name}: {line.points[0][1]:.4g}" if style == LEVEL_STYLE else line.name
        chart["curves"].append((name, path, [] if is_reference else marks, style, is_reference))
    chart["across"] = [(place(size), format_size(size)) for size in powers]
    chart["up"] = [(height(value), f"{value:g}") for value in ticks]
    return chart


def _limits(values: Sequence[float], room: float) -> tuple[float, float]:
    low, high = min(values) / room, max(values) * room
    return (low, high) if high > low else (low / 2, high * 2)


def lay_out_graph(graph: RankWaits) -> dict[str, Any]:
    """Give each node a box and each edge an arrow, the path of an SVG, and return what the template draws.

    ``words`` says each edge in a sentence, ``left_out`` counts nodes without a box.
    """
    count = min(len(graph.classes), MAX_NODES)
    edges = [(one, other) for one, other in graph.links if one < count and other < count and one != other]
    # Put each node right of all that wait for it, as far as no circle forbids it
    order, forward = _walk(count, edges)
    layer = dict.fromkeys(range(count), 0)
    for node in order:
        for one, other in forward:
            if one == node:
                layer[other] = max(layer[other], layer[node] + 1)
    # In each layer nodes stand after the middle of those that wait for them, so that few arrows cross
    layers: list[list[int]] = []
    for at in range(max(layer.values(), default=-1) + 1):
        row = {node: place for place, node in enumerate(layers[-1] if layers else ())}
        nodes = [node for node in layer if layer[node] == at]
        middle = {}
        for node in nodes:
            sources = [row[one] for one, other in edges if other == node and one in row]
            middle[node] = sum(sources) / max(len(sources), 1)
        layers.append(sorted(nodes, key=lambda node: middle[node]))
    at_layer = {node: layer for layer, nodes in enumerate(layers) for node in nodes}
    top = MARGIN + (DOWN if any(at_layer[other] - at_layer[one] > 1 for one, other in edges) else 0)
    places = {
        node: (MARGIN + layer * (BOX_WIDTH + ACROSS), top + row * (BOX_HEIGHT + DOWN))
        for layer, nodes in enumerate(layers)
        for row, node in enumerate(nodes)
    }
    sentences = []
    for one, other in graph.links:
        verb = "waits" if len(graph.classes[one].ranks) == 1 else "wait"
        sentences.append(f"{_words(graph.classes[one])} {verb} for {_words(graph.classes[other])}")
    boxes = []
    for at, place in sorted(places.items()):
        waiting = graph.classes[at]
        lines = (format_ranks(waiting.ranks), waiting.state, waiting.place.rpartition("/")[2])
        cut = [
            line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
            for line in map(clean, filter(None, lines))
        ]
        awaited = {rank for waits, other in graph.links if waits == at for rank in graph.classes[other].ranks}
        boxes.append((*place, cut, waiting.blamed, _words(waiting), format_ranks(awaited)))
    below = max((y for _, y in places.values()), default=0) + BOX_HEIGHT
    backward = [(one, other) for one, other in edges if places[other][0] <= places[one][0]]
    return {
        "width": 2 * MARGIN + len(layers) * (BOX_WIDTH + ACROSS) - ACROSS,
        "height": below + MARGIN + (DOWN * 2 if backward else 0),
        "boxes": boxes,
        "arrows": [_path(places[one], places[other], below) for one, other in edges],
        "words": sentences,
        "left_out": len(graph.classes) - count,
    }


def _walk(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    order: list[int] = []
    forward: list[tuple[int, int]] = []
    open_nodes: set[int] = set()

    def visit(node: int) -> None:
        open_nodes.add(node)
        for edge in edges:
            if edge[0] == node and edge[1] not in open_nodes:
                forward.append(edge)
                if edge[1] not in order:
                    visit(edge[1])
        open_nodes.remove(node)
        order.insert(0, node)

    awaited = {other for _, other in edges}
    for node in sorted(range(count), key=lambda node: node in awaited):
        if node not in order:
            visit(node)
    return order, forward


def _path(start: tuple[int, int], end: tuple[int, int], below: int) -> str:
    """Return a curve from a box's right to another's left: above those between, below all if it leads back."""
    x, y = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT // 2
    to_x, to_y = end[0], end[1] + BOX_HEIGHT // 2
    if to_x > x + ACROSS:
        high = min(y, to_y) - BOX_HEIGHT
        return f"M{x} {y - DOWN}C{x + ACROSS} {high} {to_x - ACROSS} {high} {to_x} {to_y - DOWN}"
    if to_x > x:
        middle = (x + to_x) // 2
        return f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
    from_x, into_x, low = start[0] + BOX_WIDTH // 2, end[0] + BOX_WIDTH // 2, below + DOWN * 2
    return f"M{from_x} {start[1] + BOX_HEIGHT}C{from_x} {low} {into_x} {low} {into_x} {end[1] + BOX_HEIGHT}"


def _words(node: WaitingRanks) -> str:
    about = ", ".join(part for part in (node.state, node.place) if part)
    return f"{format_ranks(node.ranks)} ({about})" if about else format_ranks(node.ranks)


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline for the script. ``timeline_data.js`` reads it.

    ``whats`` holds what spans have in common: [kind, label, group, shape, place]. A lane's spans are one flat list,
    four numbers each: what, start after the start of the span before, duration (-1: not ended), number (-1: none).
    """
    whats: dict[tuple[Any, ...], int] = {}
    lanes = []
    for lane in timeline.lanes:
        about = {"rank": lane.rank, "host": lane.host, "state": lane.state, "blamed": lane.blamed}
        lanes.append({**about, "coarse": _pack(lane.coarse, whats), "detail": _pack(lane.detail, whats)})
    return {
        "kinds": [kind.value for kind in SpanKind],
        "startedAt": timeline.started_at,
        "lengthMs": timeline.length_ms,
        "detailFromMs": timeline.detail_from_ms,
        "lanes": lanes,
        "classes": _classes(timeline),
        "events": [
            {"atMs": event.at_ms, "label": event.label, "ranks": event.ranks, "fault": event.fault}
            for event in timeline.events
        ],
        "whats": list(whats),
    }


def lane_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row for each class of ranks: what they did, and the last thing of it. Those to blame come first."""
    by_rank = {lane.rank: lane for lane in timeline.lanes}
    rows = []
    for ranks in _classes(timeline):
        lanes = [by_rank[rank] for rank in ranks]
        lane = next((one for one in lanes if one.detail), lanes[0])
        blamed = any(one.blamed for one in lanes)
        # The last call of a lane, else the last thing that it did
        spans = lane.detail or lane.coarse
        calls = [span for span in spans if span.kind in {SpanKind.COLLECTIVE, SpanKind.POINT_TO_POINT}] or spans
        words = ""
        if calls:
            last = max(calls, key=lambda span: span.start_ms)
            number = "" if last.number is None else f"number {last.number}"
            group = f"in {last.group}" if last.group else ""
            ended = "not ended" if last.end_ms is None else f"to {last.end_ms / 1e3:.2f} s"
            when = f"from {last.start_ms / 1e3:.2f} s, {ended}"
            words = ", ".join(filter(None, (last.label, group, number, last.shape, last.place, when)))
        rows.append({"ranks": ranks, "state": lane.state, "blamed": blamed, "last": words})
    return rows


def _classes(timeline: Timeline) -> list[list[int]]:
    """Return the classes, those to blame first. A rank without a lane is left out, one without a class has its own."""
    blamed = {lane.rank: lane.blamed for lane in timeline.lanes}
    classes = [[rank for rank in ranks if rank in blamed] for ranks in timeline.classes]
    known = {rank for ranks in classes for rank in ranks}
    classes += [[rank] for rank in blamed if rank not in known]
    return sorted((ranks for ranks in classes if ranks), key=lambda ranks: not any(blamed[rank] for rank in ranks))


def _pack(spans: Iterable[Span], whats: dict[tuple[Any, ...], int]) -> list[int]:
    kinds = list(SpanKind)
    packed: list[int] = []
    before = 0
    for span in sorted(spans, key=lambda span: span.start_ms):
        key = (kinds.index(span.kind), span.label, span.group, span.shape, span.place)
        start = _ticks(span.start_ms)
        duration = ABSENT if span.end_ms is None else max(0, _ticks(span.end_ms) - start)
        number = ABSENT if span.number is None else span.number
        packed += [whats.setdefault(key, len(whats)), start - before, duration, number]
        before = start
    return packed


def _ticks(time_ms: float) -> int:
    return round(time_ms * TICKS_PER_MS) if math.isfinite(time_ms) else 0


class BlockDrawer:
    """Draws the blocks of one page, and gives those that are linked to or scripted their own names.

    A timeline opens at ``step``, if that is given.
    """

    def __init__(self, env: Environment, folder: Path | None = None, step: int | None = None) -> None:
        env.globals |= {
            "draw": self.draw,
            "step": step,
            "heat": lambda level: round(min(max(level, 0.0), 1.0) * (HEAT_LEVELS - 1)),
            "frame": {
                "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM,
                "box_width": BOX_WIDTH, "box_height": BOX_HEIGHT,
            },
        }  # fmt: skip
        self._macros: Any = env.get_template("blocks.html.jinja").module
        self._folder = folder
        self._numbers = itertools.count(1)

    def draw(self, block: bl.Block, under: str = "") -> Any:
        """Return the markup of a block. ``under`` is the title above it, which a picture does not repeat."""
        macros, name = self._macros, f"b{next(self._numbers)}"
        if (macro := MACROS.get(type(block))) is not None:
            return getattr(macros, macro)(block)
        match block:
            case bl.Series():
                return macros.chart(lay_out_chart(block), under)
            case Timeline():
                data = embed(timeline_data(block), self._folder)
                return macros.lanes(block, lane_rows(block), data, name)
            case RankWaits():
                return macros.graph(block, lay_out_graph(block), name)
            case bl.Tree():
                return macros.tree(block.title, list_frames(block), under)
            case bl.Grid():
                return macros.grid(block, name, under)
            case bl.Bars():
                return macros.bars(block)
            case SourceExcerpt():
                code = dedent("\n".join(clean(line).replace("\n", " ") for line in block.lines))
                colored = highlight(code, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
                return macros.source(block, list(zip(code.split("\n"), map(Markup, colored.split("\n")), strict=False)))


FOLDER = Path(__file__).parent
# Joined in this order to the one script of a page.
SCRIPTS = ("page.js", "timeline_data.js", "timeline_drawing.js", "timeline.js")
OUTCOMES = ("error", "crashed", "could not tell", "warning", "note", "passed", "skipped")  # as a page lists checks


def render_html(report: Report) -> str:
    """Render the page. It loads nothing from elsewhere. Raises ``UserError`` if the report is damaged."""
    content, verdict = bl.read_content(report), report.verdict
    # The folder of the user's code. Paths below it are shown without it, save in the verdict and commands.
    places = [*(verdict.where if verdict else ()), *(row.where for row in report.ranks if row.where)]
    parent = PurePosixPath(places[0].file).parent if places else PurePosixPath()
    folder = Path(parent) if parent.is_absolute() and parent.parent != parent else None
    env = make_environment(folder)
    style, script = read_file("page.css"), "".join(map(read_file, SCRIPTS))
    # A policy under which nothing runs but the page's own script, and nothing is loaded
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; "
    policy += f"style-src {_hash(style)}; script-src {_hash(script)}"
    # What the headline means to the reader
    if verdict is not None:
        tone = findings.TONES[verdict.severity].value
    elif report.job is not None and report.job.ended_badly:
        tone = "warning"
    else:
        answered = any(check.outcome is Outcome.PASSED for check in report.checks)
        tone = "good" if answered or not report.checks else "note"
    verb = content.verb or "".join(word for word in report.command[1:2] if word.replace("-", "").isalpha())
    others = content.others if content.ends_with_verdict else report.findings
    ordered = sorted(others, key=lambda finding: finding.severity.order)
    # A check with a finding has the word and the tone of that finding, also if it passed with a note
    worst = {f.code: f.severity for f in sorted(report.findings, key=lambda f: -f.severity.order)}
    checks = []
    for check in report.checks:
        word, check_tone = findings.OUTCOME_WORDS[check.outcome], findings.OUTCOME_TONES[check.outcome]
        severity = worst.get(check.code)
        noted = check.outcome is Outcome.PASSED and severity is Severity.INFO and not check.hosts
        if severity is not None and (noted or check.outcome is Outcome.FAILED):
            word, check_tone = findings.severity_word(severity), findings.TONES[severity]
        checks.append(("error" if word == "failed" else word, check_tone.value, check))
    return env.get_template("page.html.jinja").render(
        report=report, content=content, verdict=verdict, headline=content.headline, tone=tone, folder=folder,
        title=f"ddpdoctor {verb}".strip(), style=style, script=script, policy=policy, outcomes=OUTCOMES,
        summary=list_summary(report), parts=list_parts(content, pictures := content.pictures),
        sources=[block for block in pictures if isinstance(block, SourceExcerpt)],
        others=findings.merge_findings(finding for finding in ordered if finding != verdict),
        draw=BlockDrawer(env, folder, verdict.step if verdict and verdict.code.startswith(REPLICAS) else None).draw,
        checks=sorted(checks, key=lambda row: OUTCOMES.index(row[0])),
    )  # fmt: skip


def list_summary(report: Report) -> list[tuple[str, str]]:
    """Return the facts of the strip above the verdict, each with its name. What is not known is left out."""
    job, run, rates = report.job, report.data.get("run"), [pace["step_ms"] for pace in read_paces(report).values()]
    hosts, torch, backend = {row.host: None for row in report.ranks}, "", ""
    if isinstance(run, dict):
        torch, backend = (str(run.get(name) or "") for name in ("torch_version", "backend"))
    if "results" in report.data:
        bench = read_bandwidth(report)
        hosts, backend = dict.fromkeys(bench.hosts), bench.settings.backend
        torch = ", ".join(dict.fromkeys(member.torch for member in bench.members))
    try:
        start, end = (datetime.fromisoformat(at.replace("Z", "+00:00")) for at in (report.started_at, report.ended_at))
        duration = format_span(max(0.0, (end - start).total_seconds()))
    except (ValueError, TypeError):  # a damaged or foreign file
        duration = ""
    consistency = read_picture(Consistency, report.data.get("consistency"))
    compared = [stream for stream in consistency.streams if stream.compared] if consistency else []
    facts = (
        ("Duration", duration),
        ("Hosts", format_hosts(filter(None, hosts)) or (str(job.nnodes) if job else "")),
        ("Ranks", str(job.world_size or "") if job else ""),
        ("torch", torch),
        ("Backend", ", ".join(dict.fromkeys(part.rpartition(":")[2] for part in backend.split(",")))),
        ("Steps/s", format_digits(1e3 / median(rates)) if rates and median(rates) > 0 else ""),
        ("Replicas", ("differ" if any(stream.differences for stream in compared) else "equal") if compared else ""),
    )
    return [(name, value) for name, value in facts if value]


def make_environment(folder: Path | None = None) -> Environment:
    """Return the templates' environment. Paths below ``folder`` lose it, unless the filter ``whole`` keeps them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def finalize(value: Any) -> Any:
        """Show control and bidi characters of a plain text. Markup has been through this already."""
        return value if hasattr(value, "__html__") or not isinstance(value, str) else clean(value, folder)

    def whole(text: str) -> Markup:
        """Show a text with all its paths, and keep each option or quoted command on one line."""
        return Markup(OPTION.sub(r'<span class="option">\g<0></span>', str(escape(clean(text)))))  # noqa: S704 - escaped before

    def by_group(columns: tuple[bl.Column, ...]) -> list[tuple[str, int]]:
        groups = itertools.groupby(columns, lambda column: column.group)
        return [(group, len(list(members))) for group, members in groups]

    env = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    env.filters |= {
        "ranks": format_ranks, "hosts": format_hosts, "time": format_time, "word": findings.severity_word,
        "tone": lambda severity: findings.TONES[severity].value,
        "is_command": lambda fix: findings.COMMAND.match(fix) is not None, "whole": whole,
        "title_of": title_of, "check_words": findings.check_words, "by_group": by_group,
        "by_place": lambda where: [
            (tuple(place.rank for place in alike), alike[0])
            for alike in grouped((format_place(place), place) for place in where).values()
        ],
        "rows": lambda table: list(zip(*(column.cells for column in table.columns), strict=True)),
    }  # fmt: skip
    return env


@cache
def read_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
