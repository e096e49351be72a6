"""Blocks in every format: what a verb says once is drawn by all of them, and a new verb needs one function."""

import csv
import io
from xml.etree import ElementTree as ET

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, Outcome, Report, Severity
from ddpdoctor.report import contents
from ddpdoctor.report.blocks import (
    ChartLine,
    Column,
    Content,
    FactEntry,
    FactList,
    Heading,
    Item,
    Items,
    Places,
    RankClass,
    Records,
    Series,
    Table,
    Text,
)
from ddpdoctor.report.html.page import render_html
from ddpdoctor.report.text.report import render_text

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
TEXT = """\
ddpdoctor: all is well

a heading
a paragraph with [bold]markup[/bold] & <b>more</b>
  - an item
    to do: do this
  label  one text
         another text
name    size
           B
weight    12
bias       4
  a legend
a chart, 1 B to 4 KiB
a line  _*#  1 to 12
> ranks 0, 1  in fetch  train.py:3 in main
"""


def new_verb_content(report):
    """What a new verb has to write."""
    del report
    records = Records(names=("name", "ok"), rows=(("weight", True), ("bias", None)))
    return Content(headline="all is well", sections=(BLOCKS,), records=records)


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setitem(contents.BUILDERS, "new", f"{__name__}:new_verb_content")
    return Report(
        command=("ddpdoctor", "new-verb"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:07.500+00:00", job=None, verdict=None, findings=(),
        checks=(Check(id="shm", code="DD121", outcome=Outcome.PASSED, seen="64 MiB"),), ranks=(), data={"new": {}},
        tool_version="1.2.3",
    )  # fmt: skip


def test_a_new_verb_is_drawn_as_text(report):
    assert render_text(report, width=None, color=False, run_dir=None) == TEXT
    on_a_terminal = render_text(report, width=80, color=False, run_dir=None)
    assert "a chart\no a line\n" in on_a_terminal
    assert "DD121  shm  64 MiB" in render_text(report, width=80, color=False, run_dir=None, verbose=True)


def test_a_new_verb_is_drawn_as_markdown(report):
    text = render(report, "markdown")
    for part in (
        "### a heading\n", "\\[bold\\]markup\\[/bold\\] & \\<b\\>more", "- an item\n  - do this\n",
        "- label: one text\n  - another text\n", "| name | size B |\n| --- | --: |\n| weight | 12 |", "- a legend",
        "| ranks 0, 1 |  | in fetch | train.py:3 in main |", "| passed | DD121 | `shm` | 64 MiB |",
    ):  # fmt: skip
        assert part in text


def test_a_new_verb_is_drawn_as_html(report):
    text = render_html(report)
    for part in (
        '<h2 id="r0-title" class="strong">a heading</h2>', "&lt;b&gt;more", "an item", "do this", ">label</dt>",
        "<dd>one text</dd>\n<dd>another text</dd>", '<td class="left">weight</td><td class="right">12</td>',
        '<th scope="row">ranks 0, 1 <span class="tag error">culprit</span></th>', "<td>DD121</td>", "<td>64 MiB</td>",
        'aria-label="a chart: a line"', "<title>a line: 10 at 1 KiB</title>",
    ):  # fmt: skip
        assert part in text


def test_a_new_verb_is_drawn_as_csv_json_and_junit(report):
    assert list(csv.reader(io.StringIO(render(report, "csv")))) == [["name", "ok"], ["weight", "true"], ["bias", ""]]
    assert '"new": {}' in render(report, "json")
    (case,) = ET.fromstring(render(report, "junit", fail_on=Severity.ERROR)).iter("testcase")
    assert case.get("name") == "DD121 shm"


def test_a_report_without_records_has_no_csv(report):
    with pytest.raises(UserError, match="no table"):
        render(Report(**{name: getattr(report, name) for name in report.__slots__} | {"data": {}}), "csv")


def test_columns_go_where_there_is_no_room_and_wide_tables_have_something_to_show_instead():
    from ddpdoctor.report.text.report import TextPage, add_blocks

    wide = Table(columns=(Column(name="", cells=("x" * 50,)),), instead=(Text(text="too wide"),))
    page = TextPage(width=40, cwd=None)
    add_blocks(page, (wide,))
    assert [line.plain for line in page.lines] == ["too wide"]
