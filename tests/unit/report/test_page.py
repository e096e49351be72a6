"""Blocks in every format, and the page without a browser: its parts, its data, and its pictures as coordinates."""

import json
import re
from dataclasses import replace
from typing import get_args

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.findings import Check, Outcome, Place, Severity
from ddpdoctor.model.pictures import RankWaits, SpanKind, WaitingRanks
from ddpdoctor.report import blocks
from ddpdoctor.report.blocks import (
    Block,
    ChartLine,
    Column,
    Content,
    FactEntry,
    FactList,
    Grid,
    Heading,
    Item,
    Items,
    Places,
    RankClass,
    Records,
    Series,
    Table,
    Text,
    Tree,
    TreeNode,
)
from ddpdoctor.report.html.page import (
    MAX_NODES,
    BlockDrawer,
    embed,
    lane_rows,
    lay_out_graph,
    list_parts,
    make_environment,
    render_html,
    timeline_data,
)
from ddpdoctor.report.text import TextPage, add_blocks, render_text
from tests import pages
from tests.golden import Cases, table
from tests.pictures import report as small_report

CASES = Cases(__name__)
test_kept = CASES.test()

# Blocks in every format: what a verb says once is drawn by all of them, and a new verb needs one function.


BLOCKS = (
    Heading(text="a heading"),
    Text(text="a paragraph with [bold]markup[/bold] & <b>more</b>"),
    Items(items=(Item(text="an item", fix="do this"),), mark="  - "),
    FactList(facts=(FactEntry(label="label", texts=("one text", "another text")), FactEntry(label="none", texts=()))),
    Table(
        columns=(
            Column(name="name", cells=("weight", "bias"), align="left"),
            Column(name="size", unit="B", cells=("12", "4"), weight=1),
        ),
        legend=("a legend",),
    ),
    Series(title="a chart", lines=(ChartLine(name="a line", points=((1, 1.0), (1024, 10.0), (4096, 12.0))),)),
    Places(classes=(RankClass(ranks=(0, 1), host="", state="in fetch", place="train.py:3 in main", blamed=True),)),
)


def new_verb_content(report):
    """What a new verb has to write."""
    del report
    records = Records(names=("name", "ok"), rows=(("weight", True), ("bias", None)))
    return Content(headline="all is well", sections=(BLOCKS,), records=records)


NEW = replace(
    small_report(checks=[Check(id="shm", code="DD121", outcome=Outcome.PASSED, seen="64 MiB")], new={}),
    command=("ddpdoctor", "new-verb"),
)


@pytest.fixture(autouse=True)
def _new_verb(monkeypatch):
    monkeypatch.setitem(blocks.BUILDERS, "new", f"{__name__}:new_verb_content")


@CASES
def a_new_verb_is_drawn_in_every_format():
    screen = {"width": 80, "color": False, "run_dir": None}
    formats = {form: render(NEW, form, fail_on=Severity.ERROR) for form in ("markdown", "csv", "json", "junit")}
    return formats | {
        "text": render_text(NEW, **screen | {"width": None}), "terminal": render_text(NEW, **screen, verbose=True)
    }  # fmt: skip


def test_a_new_verb_is_drawn_as_html():
    text = render_html(NEW)
    for part in (
        '<h2 id="r0-title" class="strong">a heading</h2>', "&lt;b&gt;more", "an item", "do this", ">label</dt>",
        "<dd>one text</dd>\n<dd>another text</dd>", '<td class="left">weight</td><td class="right">12</td>',
        '<th scope="row">ranks 0, 1 <span class="tag error">culprit</span></th>', "<td>DD121</td>", "<td>64 MiB</td>",
        'aria-label="a chart: a line"', "<title>a line: 10 at 1 KiB</title>",
    ):  # fmt: skip
        assert part in text


def test_columns_go_where_there_is_no_room_and_wide_tables_have_something_to_show_instead():
    wide = Table(columns=(Column(name="", cells=("x" * 50,)),), instead=(Text(text="too wide"),))
    page = TextPage(width=40, cwd=None)
    add_blocks(page, (wide,))
    assert [line.plain for line in page.lines] == ["too wide"]


# The page without a browser: its parts, its data, and its pictures as coordinates.


BLOCKS_HTML = (
    Heading(text="heading"), Text(text="text"), Items(items=(Item(text="item"),)),
    FactList(facts=(FactEntry(label="label", texts=("fact",)),)),
    Table(columns=(Column(name="name", cells=("cell",)),)),
    *pages.content().sections[0], *pages.content().pictures,
)  # fmt: skip


def test_every_kind_of_block_is_drawn():
    draw = BlockDrawer(make_environment()).draw
    assert all("<" in draw(block) for block in BLOCKS_HTML)
    kinds = [kind for part in get_args(Block) for kind in get_args(part) or [part]]
    assert [kind for kind in kinds if not any(isinstance(block, kind) for block in BLOCKS_HTML)] == []


def page_of(monkeypatch, content=None, **changes):
    monkeypatch.setitem(blocks.BUILDERS, "pictures", f"{__name__}:made")
    made.content = content or pages.content()
    return render_html(replace(pages.report({"pictures": {}}), **changes))


def made(report):
    del report
    return made.content


def test_parts_support_the_verdict_first_and_titles_are_said_once():
    before, behind = list_parts(pages.content())
    assert [part["title"] for part in before] == [
        "Where the ranks are", "Timeline", "Who waits for whom", "Source", "Stacks", "Replicas by tensor",
        "Bandwidth between ranks, GB/s", "busbw in GB/s over size",
    ]  # fmt: skip
    assert [part["title"] for part in behind] == ["compared replicas"]


def test_what_a_picture_shows_is_not_shown_in_its_small_form_too():
    small = ((Heading(text=pages.heat().title), Text(text="a table")), (pages.SERIES,), (Text(text="kept"),))
    content = Content(headline="", sections=small, draw_pictures=lambda: (pages.heat(), pages.SERIES))
    before, behind = list_parts(content)
    assert [part["title"] for part in before] == [pages.heat().title, pages.SERIES.title]
    assert [(part["title"], part["blocks"]) for part in behind] == [("Results", (Text(text="kept"),))]


def test_paths_below_the_folder_of_the_code_are_short_but_commands_stay_whole(monkeypatch):
    file = "/home/me/project/train.py"
    verdict = replace(
        pages.STUCK, where=(Place(rank=1, file=file, line=3, function="main"),), evidence=(f"it is at {file}:3",),
        fix=f"python {file}",
    )  # fmt: skip
    text = page_of(monkeypatch, verdict=verdict)
    assert "<li>it is at train.py:3</li>" in text
    assert f"data-copied>python {file}</p>" in text
    assert '<span class="dim folder">/home/me/project/</span>' in text


def test_embedded_data_cannot_end_its_element_and_reads_back():
    text = embed({"a": "</script><!--&\u202e\u2028", "b": [1.5, float("nan"), None]})
    assert not re.search(r"[<>&]|[^\x00-\x7f]", text)
    assert json.loads(text) == {"a": "</script><!--&\\u202e\\u2028", "b": [1.5, None, None]}


def test_the_spans_of_a_lane_are_packed_and_those_to_blame_come_first():
    timeline = pages.timeline(4)
    data = timeline_data(timeline)
    assert data["classes"] == [[1], [0, 2, 3]]
    what, _, duration, number = data["lanes"][0]["detail"][-8:-4]
    assert [data["kinds"][data["whats"][what][0]], *data["whats"][what][1:]] == [
        "collective", "all_reduce", "default", "float32 [1024, 16]", pages.LINE,
    ]  # fmt: skip
    assert (duration, number) == (-1, 240)
    assert sum(data["lanes"][0]["detail"][1:-4:4]) == 1088000
    rows = lane_rows(timeline)
    assert [(row["ranks"], row["blamed"]) for row in rows] == [([1], True), ([0, 2, 3], False)]
    assert rows[1]["last"].endswith("from 10.88 s, not ended")


def test_a_timeline_whose_classes_and_lanes_disagree_is_drawn():
    timeline = replace(pages.timeline(4), classes=((0, 9), (8,)), lanes=pages.timeline(4).lanes[:3])
    assert timeline_data(timeline)["classes"] == [[1], [0], [2]]
    assert timeline_data(replace(timeline, lanes=()))["lanes"] == []


def node(rank, *, blamed=False):
    return WaitingRanks(ranks=(rank,), state="in recv", place="/a/train.py:1 in main", blamed=blamed)


NOW = ChartLine(name="now", points=((0, 1.0), (1024, 0.0), (2048, 2.0), (4096, float("inf"))))
THEN = ChartLine(name="then", points=((1024, 1.0), (4096, 4.0)), is_reference=True)
LEVEL = ChartLine(name="level", points=((1024, 3.0), (4096, 3.0)))


def test_of_a_graph_that_is_too_large_a_part_is_left_out():
    nodes = tuple(map(node, range(MAX_NODES + 5)))
    large = lay_out_graph(RankWaits(classes=nodes, links=tuple((at, at + 1) for at in range(len(nodes) - 1))))
    assert (len(large["boxes"]), large["left_out"], len(large["words"])) == (MAX_NODES, 5, MAX_NODES + 4)


test_rows = table("page", "ddpdoctor.report.html.page", globals())


def test_stacks_of_any_depth_are_drawn(monkeypatch):
    deepest = TreeNode(text="frame 0", ranks=(0,))
    for depth in range(1, 3000):
        deepest = TreeNode(text=f"frame {depth}", ranks=(0, *range(depth % 2)), children=(deepest,))
    content = replace(pages.content(), draw_pictures=lambda: (Tree(title="Stacks", roots=(deepest,)),))
    assert page_of(monkeypatch, content).count("frame ") == 3000


def test_frames_of_the_same_ranks_are_not_nested():
    top = TreeNode(text="a", ranks=(0, 1), children=(TreeNode(text="b", ranks=(0, 1), children=(
        TreeNode(text="c", ranks=(0,)), TreeNode(text="d", ranks=(1,)))),))  # fmt: skip
    drawn = str(BlockDrawer(make_environment()).draw(Tree(title="", roots=(top,))))
    assert drawn.count("<details") == 1
    assert drawn.count('class="leaf"') == 3


def test_an_empty_grid_and_every_kind_of_span_are_drawn(monkeypatch):
    empty = Grid(title="empty", rows=(), columns=(), cells=())
    page_of(monkeypatch, replace(pages.content(), draw_pictures=lambda: (empty,)))
    style = page_of(monkeypatch)
    assert all(f".k-{kind.value} " in style and f"--{kind.value}:" in style for kind in SpanKind)
