"""The pictures of a job: which blocks a report gives, and what text and Markdown draw of them."""

import re
from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import encode_timeline
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Confidence, Finding, JobStatus, JobSummary, Place, RankRow, Report, Severity
from ddpdoctor.model.pictures import (
    Lane,
    RankWaits,
    SourceExcerpt,
    Span,
    SpanKind,
    Timeline,
    TimelineEvent,
    WaitingRanks,
)
from ddpdoctor.report.blocks import ChartLine, Lanes, Series, SourceLines, Tree, WaitGraph
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.text.pictures import MOST_ROWS, STRIP_WIDTH, draw_sparks, draw_strip
from ddpdoctor.report.text.report import render_text
from ddpdoctor.report.tree import MOST_FRAMES, draw_tree, stack_tree
from ddpdoctor.report.verbs.job import job_content

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
SCRIPT = "/home/me/train.py"


def span(kind, start, end, label="x"):
    return Span(kind=kind, start_ms=float(start), end_ms=None if end is None else float(end), label=label)


def lane(rank, *detail, blamed=False):
    return Lane(rank=rank, host="h", state="s", blamed=blamed, coarse=(), detail=detail)


BEFORE = tuple(
    span(kind, at + start, at + end)
    for at in range(0, 480, 20)
    for kind, start, end in ((SpanKind.FORWARD, 0, 10), (SpanKind.BACKWARD, 10, 20))
)
STUCK = (*BEFORE, span(SpanKind.HOST, 480, None))
WAITS = (*BEFORE, span(SpanKind.FORWARD, 480, 500), span(SpanKind.WAIT, 500, None))
TIMELINE = Timeline(
    started_at="2026-01-01T00:00:00+00:00", length_ms=60_000.0, detail_from_ms=0.0,
    lanes=(lane(0, *WAITS), lane(1, *STUCK, blamed=True), lane(2)), classes=((0, 2), (1,)),
    events=(TimelineEvent(at_ms=480.0, label="DD601 stuck", ranks=(1,), fault=True),),
)  # fmt: skip
ROWS = tuple(
    RankRow(
        rank=n, local_rank=n, host="h", pid=n, state="in the script" if n == 1 else "in backward",
        where=Place(rank=n, file=SCRIPT, line=8 if n == 1 else 17, function="read" if n == 1 else "main"),
        stack=(f"{SCRIPT}:30 <module>",
               *((f"{SCRIPT}:16 main", f"{SCRIPT}:8 read") if n == 1
                 else (f"{SCRIPT}:17 main", f"{TORCH}/_tensor.py:623 backward"))),
    )
    for n in range(3)
)  # fmt: skip
VERDICT = Finding(
    code="DD601", kind="stuck", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="rank 1 is stuck",
    ranks=(1,), where=(ROWS[1].where,),
)  # fmt: skip
GRAPH = RankWaits(
    classes=(
        WaitingRanks(ranks=(0, 2), state="in backward", place=f"{SCRIPT}:17 in main", blamed=False),
        WaitingRanks(ranks=(1,), state="in the script", place=f"{SCRIPT}:8 in read", blamed=True),
    ),
    links=((0, 1), (0, 7)),
)
SOURCE = SourceExcerpt(file=SCRIPT, first=7, lines=("def read():", "    `sleep`(9)  # <b>", "    return 1"), blamed=8)
REPORT = Report(
    command=("ddpdoctor", "wrap", "train.py"), started_at="2026-01-01T00:00:00.000+00:00", ended_at="", checks=(),
    job=JobSummary(world_size=3, nnodes=1, status=JobStatus.HUNG, exit_status=124), verdict=VERDICT,
    findings=(VERDICT,), ranks=ROWS,
    data={"timeline": encode_timeline(TIMELINE), "waits": encode(GRAPH), "source": encode(SOURCE)},
)  # fmt: skip


def test_a_job_has_four_pictures():
    (lanes,), (graph,), (source,), (tree,) = job_content(REPORT).pictures
    assert lanes == Lanes(timeline=TIMELINE)
    assert isinstance(graph, WaitGraph)
    assert ([node.ranks for node in graph.nodes], graph.edges) == ([(0, 2), (1,)], ((0, 1),))
    assert source == SourceLines(file=SCRIPT, first=7, lines=SOURCE.lines, blamed=8)
    assert isinstance(tree, Tree)


def test_a_report_of_an_earlier_version_has_the_stacks_alone():
    old = replace(REPORT, data={})
    assert [type(section[0]) for section in job_content(old).pictures] == [Tree]
    assert " v" not in render_text(old, width=None, color=False, run_dir=None)
    assert job_content(replace(old, ranks=())).pictures == ()


@pytest.mark.parametrize("name", ["timeline", "waits", "source"])
def test_damaged_data_costs_its_picture_and_nothing_else(name):
    damaged = replace(REPORT, data={**REPORT.data, name: {"lanes": 3}})
    assert len(job_content(damaged).pictures) == 3
    assert "rank 1 is stuck" in render_text(damaged, width=80, color=False, run_dir=None)


def test_the_strip_stands_above_the_verdict():
    text = render_text(REPORT, width=None, color=False, run_dir=None)
    rows = text.splitlines()
    strip = draw_strip(TIMELINE, STRIP_WIDTH)
    assert rows.index(strip[0]) + len(strip) + 1 == next(n for n, line in enumerate(rows) if line.startswith("DD601"))
    assert "\n".join(strip[:-1]) + f"\n  {strip[-1]}\n" in text
    assert max(map(len, strip)) <= 80
    assert text.isascii()
    assert "`sleep`" not in text


def test_the_strip_marks_the_fault_and_says_what_each_rank_did():
    head, blamed, others, legend = draw_strip(TIMELINE, STRIP_WIDTH)
    at = head.index("v")
    assert (head.split(), blamed[:8], others[:12]) == (
        ["DD601", "stuck,", "rank", "1", "v"],
        "> rank 1",
        "  ranks 0, 2",
    )
    assert set(blamed[14:at]) == {"F", "B"}
    assert set(blamed[at:]) == {"."}
    assert others.rstrip("w")[-1] == "F"
    assert len(others) - at == pytest.approx((len(others) - 14) / 4, abs=1)
    assert legend.startswith("F forward, B backward, w wait, . script; each ")


def test_the_strip_is_narrow_on_a_narrow_terminal_and_has_few_rows():
    assert max(map(len, draw_strip(TIMELINE, 40)[:-1])) <= 40
    lanes = tuple(lane(n, *STUCK, blamed=n == 11) for n in range(12))
    many = replace(TIMELINE, lanes=lanes, classes=tuple((n,) for n in range(12)))
    lines = draw_strip(many, 80)
    assert lines[1].startswith("> rank 11")
    assert len(lines) == 1 + MOST_ROWS + 2
    assert lines[-2] == "  and 4 more rows in report.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"events": ()},
        {"lanes": ()},
        {"classes": ()},
        {"classes": ((77,),)},
        {"length_ms": float("nan")},
        {"events": (TimelineEvent(at_ms=float("inf"), label="", fault=True),)},
        {"events": (TimelineEvent(at_ms=0.0, label="", fault=True),)},
    ],
)
def test_without_a_fault_or_calls_before_it_there_is_no_strip(changes):
    assert draw_strip(replace(TIMELINE, **changes), 80) == []


def test_the_inner_one_of_nested_spans_counts():
    nested = (*BEFORE[:-1], span(SpanKind.BACKWARD, 240, 480), span(SpanKind.COLLECTIVE, 300, 420))
    timeline = replace(TIMELINE, lanes=(lane(1, *nested, blamed=True),), classes=((1,),), length_ms=480.0)
    row = draw_strip(timeline, 80)[1]
    assert re.search(r"B{8,}c{16,}B{8,}$", row)


def test_stacks_are_merged_from_the_outermost_frame():
    tree = stack_tree(ROWS, VERDICT)
    (root,) = tree.roots
    assert (root.text, root.ranks, root.strong, root.blamed) == (f"{SCRIPT}:30 in <module>", (0, 1, 2), True, False)
    most, blamed = root.children
    (inner,) = most.children
    assert (most.ranks, inner.text, inner.strong) == ((0, 2), "torch/_tensor.py:623 in backward", False)
    assert (blamed.ranks, blamed.blamed, blamed.children[0].blamed) == ((1,), False, True)
    assert draw_tree(tree) == [
        f"  {SCRIPT}:30 in <module>  [ranks 0-2]",
        f"    {SCRIPT}:17 in main  [ranks 0, 2]",
        "    torch/_tensor.py:623 in backward",
        f"    {SCRIPT}:16 in main  [rank 1]",
        f">   {SCRIPT}:8 in read",
    ]


def test_the_line_is_blamed_on_the_blamed_rank_alone():
    same = (replace(ROWS[1], rank=2), replace(ROWS[0], stack=(f"{SCRIPT}:8 read",)))
    assert [root.blamed for root in stack_tree(same, VERDICT).roots] == [False, False]
    assert stack_tree((replace(ROWS[0], stack=()),), None) is None


def test_deep_and_strange_stacks():
    deep = replace(ROWS[0], stack=tuple(f"/a.py:{n} f" for n in range(5000)))
    node = stack_tree((deep,), None).roots[0]
    depth = 1
    while node.children:
        node, depth = node.children[0], depth + 1
    assert (depth, node.text) == (MOST_FRAMES, "/a.py:4999 in f")
    odd = replace(ROWS[0], stack=("no frame", "/a.py:" + "9" * 5000 + " f", "\x1b[31m:1 \n"))
    assert len(draw_tree(stack_tree((odd,), None))) == 3


def test_markdown_has_source_and_stacks_as_code():
    text = render_markdown(REPORT)
    assert "/home/me/train.py:\n\n      7 | def read():\n    > 8 |     `sleep`(9)  # <b>\n      9 |     return" in text
    assert "    >   /home/me/train.py:8 in read\n" in text
    assert text.index("rank 1 is stuck") < text.index("def read()") < text.index("| ranks |")


def test_sparks_have_a_line_for_each_curve():
    points = tuple((4**n, float(2**n)) for n in range(8))
    lines = draw_sparks(
        Series(title="busbw in GB/s over size", lines=(
            ChartLine(name="all_reduce", points=points), ChartLine(name="barrier", points=points[:1]),
            ChartLine(name="gather", points=tuple((x, 3.0) for x, _ in points)),
        ))
    )  # fmt: skip
    assert lines == [
        "busbw in GB/s over size, 1 B to 16 KiB",
        "all_reduce  _.:-=+*#  1 to 128",
        "gather      ________  3 to 3",
    ]
    assert draw_sparks(Series(title="", lines=())) == []
