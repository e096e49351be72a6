"""Blocks in every format, and the page without a browser: its parts, its data, and its pictures as coordinates."""

import json
import re
from dataclasses import replace
from typing import get_args

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.codec import encode
from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.findings import Check, Outcome, Place, RankRow, Severity
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
from tests import benches, pages
from tests.golden import Cases, table
from tests.pictures import report as small_report
from tests.rules.consistency.build import difference, stream

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
    """The page of a stuck job. Changes are fields of its report, or data."""
    monkeypatch.setitem(blocks.BUILDERS, "pictures", f"{__name__}:made")
    made.content = content or pages.content()
    data = {name: changes.pop(name) for name in ("run", "steps", "consistency") if name in changes}
    return render_html(replace(pages.report({"pictures": {}, **data}), **changes))


def made(report):
    del report
    return made.content


def test_parts_support_the_verdict_first_and_titles_are_said_once():
    content = pages.content()
    before, behind = list_parts(content, content.pictures)
    assert [part["title"] for part in before] == [
        "Where the ranks are", "Timeline", "Stacks", "Replicas by tensor", "Bandwidth between ranks, GB/s",
        "busbw in GB/s over size", "usual step by rank",
    ]  # fmt: skip
    assert [type(block) for block in before[0]["blocks"]] == [Places, RankWaits]
    assert [part["title"] for part in behind] == ["compared replicas"]


def test_what_a_picture_shows_is_not_shown_in_its_small_form_too():
    small = ((Heading(text=pages.heat().title), Text(text="a table")), (pages.SERIES,), (Text(text="kept"),))
    content = Content(headline="", sections=small, draw_pictures=lambda: (pages.heat(), pages.SERIES))
    before, behind = list_parts(content, content.pictures)
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


def facts_of(text):
    """The strip above the verdict: each name with its value."""
    strip = re.search(r'<dl class="summary">(.*?)</dl>', text, re.DOTALL)
    return re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", strip[1]) if strip else []


def test_the_strip_above_the_verdict_has_the_facts_of_a_run(monkeypatch):
    pace = dict.fromkeys(("before_forward_ms", "forward_ms", "between_ms", "backward_ms", "waited_ms"), 1.0)
    row = RankRow(rank=0, local_rank=0, host="node0", pid=1, state="exit status 0")
    equal = stream(compared=3)
    known = {
        "run": {"torch_version": "2.13.0", "backend": "cpu:gloo,cuda:nccl"},
        "steps": [{"rank": rank, "step_ms": 50.0, **pace} for rank in (0, 1)],
        "consistency": encode(Consistency(check_every=1, streams=(equal,))),
    }
    hosts = (row, replace(row, rank=1, host="node1"))
    text = page_of(monkeypatch, **{**known, "ranks": hosts})
    assert facts_of(text) == [
        ("Duration", "30 s"), ("Hosts", "node[0, 1]"), ("Ranks", "8"), ("torch", "2.13.0"), ("Backend", "gloo, nccl"),
        ("Steps/s", "20.0"), ("Replicas", "equal"),
    ]  # fmt: skip
    differs = encode(Consistency(check_every=1, streams=(equal, stream(difference(What.PARAMETER)))))
    assert facts_of(page_of(monkeypatch, consistency=differs))[-1] == ("Replicas", "differ")
    assert facts_of(page_of(monkeypatch, started_at="?", job=None)) == []


def test_a_bench_has_its_facts_in_the_strip():
    assert facts_of(render_html(benches.everything())) == [
        ("Duration", "30 s"), ("Hosts", "node[0, 1]"), ("Ranks", "8"), ("torch", "2.13.0"), ("Backend", "nccl"),
    ]  # fmt: skip


def test_the_card_of_the_verdict_has_three_lines_of_its_source_in_color(monkeypatch):
    text = page_of(monkeypatch)
    card = text[text.index('id="verdict"') : text.index("<nav")]
    assert '<code class="break">data.py:112</code>' in card
    lines = [re.sub("<[^>]*>", "", line) for line in re.findall(r"<td><code>(.*?)</code>", card)]
    blamed, carets = "        data = fetch(path)  # slow", "        ^^^^^^^^^^^^^^^^^^"
    assert lines == ["    with lock:", blamed, carets, "    return decode(data)"]
    assert '<span class="k">with</span>' in card
    assert text.count('<figure class="source">') == 1
    no_source = replace(pages.content(), draw_pictures=lambda: (pages.timeline(),))
    assert '<figure class="source">' not in page_of(monkeypatch, no_source)


def test_a_check_with_a_finding_has_the_word_of_the_finding(monkeypatch):
    """A passed check stays passed, and so does one that passed on another host."""
    checks = (
        Check(id="a", code="DD601", outcome=Outcome.FAILED), Check(id="b", code="DD801", outcome=Outcome.FAILED),
        Check(id="c", code="DD802", outcome=Outcome.PASSED), Check(id="d", code="DD603", outcome=Outcome.PASSED),
        Check(id="e", code="DD802", outcome=Outcome.PASSED, hosts=("node1",)),
        Check(id="f", code="DD604", outcome=Outcome.SKIPPED, reason="no crash"),
    )  # fmt: skip
    note = replace(pages.OTHERS[1], severity=Severity.INFO)
    text = page_of(monkeypatch, checks=checks, findings=(pages.STUCK, pages.OTHERS[0], note))
    text = text[text.index('id="checks-title"') :]
    rows = re.findall(r'<tr><td><span class="tag (\w+)">(.*?)</span>.*?\n<td class="nowrap">(\w)</td>', text)
    assert rows == [
        ("error", "error", "a"), ("warning", "warning", "b"), ("note", "note", "c"), ("good", "passed", "d"),
        ("good", "passed", "e"), ("skipped", "skipped", "f"),
    ]  # fmt: skip
    assert "<p>1 error, 1 warning, 1 note, 2 passed, 1 skipped</p>" in text
    assert "<details><summary>The 1 that were skipped</summary>" in text


def test_findings_are_other_ones_only_beside_a_verdict(monkeypatch):
    assert "Other findings" in page_of(monkeypatch)
    assert "Other findings" not in page_of(monkeypatch, verdict=None)


def test_options_in_a_fix_are_kept_whole(monkeypatch):
    verdict = replace(pages.STUCK, fix="raise --hang-timeout, or -n <2> of a well-known a-b, or run `ddpdoctor demo`")
    text = page_of(monkeypatch, verdict=verdict)
    option, command = (f'<span class="option">{words}</span>' for words in ("--hang-timeout", "`ddpdoctor demo`"))
    assert f"data-copied>raise {option}, or -n &lt;2&gt; of a well-known a-b, or run {command}</p>" in text


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
