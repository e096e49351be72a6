"""A report as CSV, JUnit, SARIF and for GitHub."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    FaultOrigin,
    Finding,
    JobStatus,
    JobSummary,
    Outcome,
    Place,
    Report,
    Severity,
)
from ddpdoctor.model.pictures import SpanKind
from ddpdoctor.report import contents
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
    WaitGraph,
    WaitNode,
)
from ddpdoctor.report.formats import render_csv, render_github, render_junit, render_sarif
from ddpdoctor.report.html.drawings import (
    LEVEL_STYLE,
    MAX_NODES,
    lane_rows,
    lay_out_chart,
    lay_out_graph,
    timeline_data,
)
from ddpdoctor.report.html.page import BlockDrawer, embed, list_parts, make_environment, render_html
from ddpdoctor.report.text.report import render_text
from tests import benches, pages

# allreduce-bench as comma-separated values.


def read(report):
    return list(csv.DictReader(io.StringIO(render_csv(report))))


def test_the_columns_have_their_names_and_order_and_later_ones_come_behind():
    head = render_csv(benches.report()).splitlines()[0]
    assert head == (
        "collective,dtype,redop,mode,in_place,size_bytes,count,iterations,first_us,min_us,p50_us,p95_us,cv,algbw_gb_s,"
        "busbw_gb_s,wrong,p50_low_us,p50_high_us,warm"
    )


def test_a_row_a_measurement_with_all_its_digits():
    rows = read(benches.report())

    assert len(rows) == len(benches.results())
    first = benches.results()[0]
    assert float(rows[0]["p50_us"]) == first.p50_us
    assert {name: rows[0][name] for name in ("collective", "mode", "in_place", "size_bytes", "wrong", "warm")} == {
        "collective": "all_reduce", "mode": "latency", "in_place": "false", "size_bytes": "1024", "wrong": "0",
        "warm": "true",
    }  # fmt: skip


def test_what_has_no_value_is_empty():
    (row,) = read(benches.report(rows=[benches.measurement(1024, ranks=1, wrong=None)], ranks=1))
    assert (row["busbw_gb_s"], row["wrong"]) == ("", "")


def test_nothing_measured_is_a_head_alone():
    assert render_csv(benches.report(rows=())).count("\n") == 1


# Annotations of GitHub: a line a finding, at its place, and nothing that was collected becomes a command.


CWD = Path("/home/me/repo")
STUCK = Finding(
    code="DD601", kind="stuck", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="rank 1 is stuck",
    ranks=(1,), hosts=("node3",), where=(Place(rank=1, file="/home/me/repo/train.py", line=61, function="main"),),
    fix="Look at line 61.",
)  # fmt: skip
SHM = replace(STUCK, code="DD121", kind="shm", severity=Severity.WARNING, ranks=(), hosts=(), where=(), fix="")
REPORT = Report(
    command=("ddpdoctor",), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z", job=None, verdict=None,
    findings=(), checks=(), ranks=(),
)  # fmt: skip


def draw(*findings, cwd=CWD):
    return render_github(replace(REPORT, findings=findings), cwd).splitlines()


def test_a_finding_is_a_command_at_its_line():
    (line,) = draw(STUCK)
    command, _, message = line.partition("DD601 stuck::")
    assert command == "::error file=train.py,line=61,title="
    assert message.split("%0A") == [
        "rank 1 is stuck", "blamed: rank 1 on node3", "confidence high", "to do: Look at line 61.",
        "more: ddpdoctor explain DD601",
    ]  # fmt: skip


def test_a_finding_of_a_machine_names_it():
    (line,) = draw(replace(SHM, hosts=("node3",)))
    assert "%0Ablamed: node3%0A" in line


@pytest.mark.parametrize(("severity", "level"), [("error", "error"), ("warning", "warning"), ("info", "notice")])
def test_the_level_is_that_of_the_severity(severity, level):
    (line,) = draw(replace(SHM, severity=Severity(severity)))
    assert line == f"::{level} title=DD121 shm::rank 1 is stuck%0Aconfidence high%0Amore: ddpdoctor explain DD121"


def test_a_file_elsewhere_keeps_its_path_and_an_unknown_line_is_left_out():
    (line,) = draw(replace(STUCK, where=(Place(rank=1, file="/opt/data.py", line=0, function=""),)))
    assert line.startswith("::error file=/opt/data.py,title=")
    assert draw(STUCK, cwd=None)[0].startswith("::error file=/home/me/repo/train.py,line=61,")


def test_further_places_are_in_the_message():
    (line,) = draw(replace(STUCK, where=(*STUCK.where, Place(rank=0, file="/home/me/repo/b.py", line=2, function="f"))))
    assert "%0Aat rank 1: train.py:61 in main%0Aat rank 0: b.py:2 in f%0A" in line


def test_what_was_collected_ends_no_property_and_no_line():
    hostile = Place(rank=1, file="/home/me/repo/a,line=1::b\r\n%.py", line=3, function="f")
    (line,) = draw(replace(STUCK, summary="100%\n::set-output name=x::y\r##[error]z", where=(hostile,)))
    assert line.startswith("::error file=a%2Cline=1%3A%3Ab%0D%0A%25.py,line=3,title=DD601 stuck::100%25%0A\\x3a:set-")
    assert "\r" not in line


def test_without_findings_the_headline_says_so():
    assert draw() == ["::notice title=ddpdoctor::no problem found"]
    failed = replace(REPORT, job=JobSummary(world_size=2, nnodes=1, status=JobStatus.FAILED, exit_status=1))
    (line,) = render_github(failed, CWD).splitlines()
    assert line.startswith("::error title=ddpdoctor::")


def test_a_check_without_an_answer_is_a_warning():
    unknown = Check(id="shm", code="DD121", outcome=Outcome.INCONCLUSIVE, reason="/dev/shm cannot be read")
    passed = Check(id="xid", code="DD146", outcome=Outcome.PASSED)
    report = replace(REPORT, checks=(unknown, passed), data={"nodes": []})
    assert render_github(report, CWD).splitlines()[1:] == [
        "::warning title=DD121 shm::could not tell: /dev/shm cannot be read"
    ]


def test_paths_are_relative_to_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Place(rank=1, file=str(tmp_path / "train.py"), line=61, function="main")
    report = replace(REPORT, findings=(replace(STUCK, where=(place,)),))
    assert render(report, "github").startswith("::error file=train.py,line=61,")
    assert '"uri": "train.py"' in render(report, "sarif")


# JUnit of a job: what its rules found is a failure, notes are not, and the job itself is a case.


def report(status, *found, exit_status=0):
    findings = tuple(
        Finding(code=code, kind=kind, severity=severity, confidence=Confidence.HIGH, summary="it is wrong")
        for code, kind, severity in found
    )
    kinds = {"DD601": "stuck", "DD610": "straggler", "DD612": "exit-abort"}
    checks = [Check(id=kind, code=code, outcome=Outcome.PASSED) for code, kind in kinds.items()]
    return Report(
        command=("ddpdoctor",), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z",
        job=JobSummary(world_size=2, nnodes=1, status=status, exit_status=exit_status), verdict=None,
        findings=findings, checks=tuple(checks), ranks=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "fail_on", "failed"),
    [
        (report(JobStatus.FINISHED), Severity.INFO, []),
        (report(JobStatus.HUNG, ("DD601", "stuck", Severity.ERROR), exit_status=124), Severity.ERROR,
         ["the job finishes", "DD601 stuck"]),
        (report(JobStatus.FAILED, exit_status=1), Severity.ERROR, ["the job finishes"]),
        (report(JobStatus.FINISHED, ("DD610", "straggler", Severity.WARNING)), Severity.WARNING, ["DD610 straggler"]),
        (report(JobStatus.FINISHED, ("DD610", "straggler", Severity.WARNING)), Severity.ERROR, []),
        (report(JobStatus.FINISHED, ("DD612", "exit-abort", Severity.INFO)), Severity.ERROR, []),
    ],
)  # fmt: skip
def test_failures(seen, fail_on, failed):
    root = ET.fromstring(render_junit(seen, fail_on))
    cases = [case.get("name") for case in root.iter("testcase") if case.find("failure") is not None]
    assert cases == failed
    assert root.find("testsuite").get("failures") == str(len(failed))


# SARIF: the exact form of a finding, and what the standard asks of texts, lines and paths.


MAIN = Place(rank=1, file="/home/me/repo/train.py", line=61, function="main")
STUCK_IN_SARIF = Finding(
    code="DD601", kind="stuck", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="rank 1 is stuck",
    ranks=(1,), hosts=("node3",), where=(MAIN,), step=12, evidence=("it sleeps",), fix="Look at line 61.",
    origin=FaultOrigin.SCRIPT,
)  # fmt: skip
REPORT_SARIF = Report(
    command=("ddpdoctor",), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z", job=None, verdict=None,
    findings=(STUCK_IN_SARIF,), checks=(), ranks=(), tool_version="0.1.0",
)  # fmt: skip
PAGE = "https://github.com/ddpdoctor/ddpdoctor/blob/main/docs/rules/DD601-stuck.md"


def draw_as_sarif(*findings, checks=()):
    text = render_sarif(replace(REPORT_SARIF, findings=findings, checks=checks), {"DD601": "A rank is stuck"}, CWD)
    (run,) = json.loads(text)["runs"]
    return run


def place_of(place):
    (result,) = draw_as_sarif(replace(STUCK_IN_SARIF, where=(place,)))["results"]
    (location,) = result["locations"]
    return location["physicalLocation"]


def test_the_whole_file():
    """The form was validated with the schema of the standard, its errata 01."""
    assert json.loads(render_sarif(REPORT_SARIF, {"DD601": "A rank is stuck"}, CWD)) == {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "ddpdoctor",
                "version": "0.1.0",
                "informationUri": "https://github.com/ddpdoctor/ddpdoctor",
                "rules": [{
                    "id": "DD601",
                    "name": "stuck",
                    "shortDescription": {"text": "A rank is stuck"},
                    "help": {"text": f"ddpdoctor explain DD601 says what it means and what to do.\n{PAGE}"},
                    "helpUri": PAGE,
                }],
            }},
            "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": []}],
            "results": [{
                "ruleId": "DD601",
                "ruleIndex": 0,
                "level": "error",
                "message": {"text": "rank 1 is stuck\nTo do: Look at line 61."},
                "locations": [{
                    "physicalLocation": {
                        "artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"},
                        "region": {"startLine": 61},
                    },
                    "logicalLocations": [{"name": "main", "kind": "function"}],
                    "message": {"text": "rank 1"},
                }],
                "properties": {
                    "ranks": [1], "hosts": ["node3"], "confidence": "high", "origin": "script", "step": 12,
                    "tensor": None, "share": None, "evidence": ["it sleeps"], "fix": "Look at line 61.",
                },
            }],
        }],
    }  # fmt: skip


def test_the_page_of_a_rule_is_where_its_link_leads():
    assert (Path(__file__).parents[3] / PAGE.partition("/blob/main/")[2]).exists()


def test_the_title_of_a_rule_is_its_line_for_lists():
    from ddpdoctor.diagnose.files import read_page

    (rule,) = json.loads(render(REPORT_SARIF, "sarif"))["runs"][0]["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] == read_page("DD601").summary


def test_a_code_that_this_version_does_not_know_has_its_kind_as_title():
    report = replace(REPORT_SARIF, findings=(replace(STUCK_IN_SARIF, code="DD999", kind="later"),))
    (rule,) = json.loads(render(report, "sarif"))["runs"][0]["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] == "later"


@pytest.mark.parametrize(("severity", "level"), [("error", "error"), ("warning", "warning"), ("info", "note")])
def test_levels(severity, level):
    assert [one["level"] for one in draw_as_sarif(replace(STUCK_IN_SARIF, severity=Severity(severity)))["results"]] == [
        level
    ]


def test_results_point_to_their_rules():
    crash = replace(STUCK_IN_SARIF, code="DD604", kind="crash")
    run = draw_as_sarif(crash, STUCK_IN_SARIF, crash)
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["DD604", "DD601"]
    assert [one["ruleIndex"] for one in run["results"]] == [0, 1, 0]


@pytest.mark.parametrize(
    ("file", "drawn"),
    [
        ("/home/me/repo/a b:%.py", {"uri": "a%20b%3A%25.py", "uriBaseId": "%SRCROOT%"}),
        ("/opt/größe.py", {"uri": "file:///opt/gr%C3%B6%C3%9Fe.py"}),
        ("odd\udcff.py", {"uri": "odd%3F.py", "uriBaseId": "%SRCROOT%"}),
    ],
)
def test_paths(file, drawn):
    assert place_of(replace(MAIN, file=file))["artifactLocation"] == drawn


def test_an_unknown_line_is_no_region():
    assert "region" not in place_of(replace(MAIN, line=0))


def test_ranks_share_a_place_and_further_places_are_related():
    where = (MAIN, replace(MAIN, rank=0), replace(MAIN, rank=2, line=7))
    (result,) = draw_as_sarif(replace(STUCK_IN_SARIF, where=where))["results"]
    assert [one["message"]["text"] for one in result["locations"]] == ["ranks 0, 1"]
    assert [one["message"]["text"] for one in result["relatedLocations"]] == ["rank 2"]


def test_a_finding_without_a_place_has_no_locations():
    (result,) = draw_as_sarif(replace(STUCK_IN_SARIF, where=()))["results"]
    assert not {"locations", "relatedLocations"} & result.keys()


def test_what_was_collected_is_neither_link_nor_placeholder_nor_control_character():
    (result,) = draw_as_sarif(
        replace(STUCK_IN_SARIF, summary="[a](https://b) {0} {x} \x1b", fix="", evidence=("\udcff",))
    )["results"]
    assert result["message"]["text"] == "[a\\](https://b) {{0}} {x} \\x1b"
    assert result["properties"]["evidence"] == ["\\udcff"]


def test_checks_without_an_answer_are_notifications():
    crashed = Check(id="shm", code="DD121", outcome=Outcome.CRASHED, reason="KeyError")
    unknown = Check(id="xid", code="DD146", outcome=Outcome.INCONCLUSIVE, reason="no dmesg")
    assert draw_as_sarif(checks=(unknown,))["invocations"][0]["executionSuccessful"]
    (invocation,) = draw_as_sarif(checks=(crashed, unknown))["invocations"]
    assert not invocation["executionSuccessful"]
    assert [(one["level"], one["message"]["text"]) for one in invocation["toolExecutionNotifications"]] == [
        ("error", "DD121 shm: crashed: KeyError"),
        ("warning", "DD146 xid: could not tell: no dmesg"),
    ]


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
def new_report(monkeypatch):
    monkeypatch.setitem(contents.BUILDERS, "new", f"{__name__}:new_verb_content")
    return Report(
        command=("ddpdoctor", "new-verb"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:07.500+00:00", job=None, verdict=None, findings=(),
        checks=(Check(id="shm", code="DD121", outcome=Outcome.PASSED, seen="64 MiB"),), ranks=(), data={"new": {}},
        tool_version="1.2.3",
    )  # fmt: skip


def test_a_new_verb_is_drawn_as_text(new_report):
    assert render_text(new_report, width=None, color=False, run_dir=None) == TEXT
    on_a_terminal = render_text(new_report, width=80, color=False, run_dir=None)
    assert "a chart\no a line\n" in on_a_terminal
    assert "DD121  shm  64 MiB" in render_text(new_report, width=80, color=False, run_dir=None, verbose=True)


def test_a_new_verb_is_drawn_as_markdown(new_report):
    text = render(new_report, "markdown")
    for part in (
        "### a heading\n", "\\[bold\\]markup\\[/bold\\] & \\<b\\>more", "- an item\n  - do this\n",
        "- label: one text\n  - another text\n", "| name | size B |\n| --- | --: |\n| weight | 12 |", "- a legend",
        "| ranks 0, 1 |  | in fetch | train.py:3 in main |", "| passed | DD121 | `shm` | 64 MiB |",
    ):  # fmt: skip
        assert part in text


def test_a_new_verb_is_drawn_as_html(new_report):
    text = render_html(new_report)
    for part in (
        '<h2 id="r0-title" class="strong">a heading</h2>', "&lt;b&gt;more", "an item", "do this", ">label</dt>",
        "<dd>one text</dd>\n<dd>another text</dd>", '<td class="left">weight</td><td class="right">12</td>',
        '<th scope="row">ranks 0, 1 <span class="tag error">culprit</span></th>', "<td>DD121</td>", "<td>64 MiB</td>",
        'aria-label="a chart: a line"', "<title>a line: 10 at 1 KiB</title>",
    ):  # fmt: skip
        assert part in text


def test_a_new_verb_is_drawn_as_csv_json_and_junit(new_report):
    assert list(csv.reader(io.StringIO(render(new_report, "csv")))) == [
        ["name", "ok"],
        ["weight", "true"],
        ["bias", ""],
    ]
    assert '"new": {}' in render(new_report, "json")
    (case,) = ET.fromstring(render(new_report, "junit", fail_on=Severity.ERROR)).iter("testcase")
    assert case.get("name") == "DD121 shm"


def test_a_report_without_records_has_no_csv(new_report):
    with pytest.raises(UserError, match="no table"):
        render(Report(**{name: getattr(new_report, name) for name in new_report.__slots__} | {"data": {}}), "csv")


def test_columns_go_where_there_is_no_room_and_wide_tables_have_something_to_show_instead():
    from ddpdoctor.report.text.report import TextPage, add_blocks

    wide = Table(columns=(Column(name="", cells=("x" * 50,)),), instead=(Text(text="too wide"),))
    page = TextPage(width=40, cwd=None)
    add_blocks(page, (wide,))
    assert [line.plain for line in page.lines] == ["too wide"]


# The page without a browser: its parts, its data, and its pictures as coordinates.


BLOCKS_HTML = (
    Heading(text="heading"), Text(text="text"), Items(items=(Item(text="item"),)),
    FactList(facts=(FactEntry(label="label", texts=("fact",)),)),
    Table(columns=(Column(name="name", cells=("cell",)),)),
    *(block for section in (*pages.content().sections[:1], *pages.content().pictures) for block in section),
)  # fmt: skip


@pytest.mark.parametrize("kind", [kind for part in get_args(Block) for kind in get_args(part) or [part]])
def test_every_kind_of_block_is_drawn(kind):
    draw = BlockDrawer(make_environment()).draw
    drawn = [draw(block) for block in BLOCKS_HTML if isinstance(block, kind)]
    assert drawn
    assert all("<" in one for one in drawn)


def page_of(monkeypatch, content=None, **changes):
    monkeypatch.setitem(contents.BUILDERS, "pictures", f"{__name__}:made")
    made.content = content or pages.content()
    return render_html(replace(pages.report({"pictures": {}}), **changes))


def made(report):
    del report
    return made.content


def test_parts_support_the_verdict_first_and_titles_are_said_once():
    before, behind = list_parts(pages.content())
    assert [part.title for part in before] == [
        "Where the ranks are", "Timeline", "Who waits for whom", "Source", "Stacks", "Replicas by tensor",
        "Bandwidth between ranks, GB/s", "busbw in GB/s over size",
    ]  # fmt: skip
    assert [part.title for part in behind] == ["compared replicas"]


def test_what_a_picture_shows_is_not_shown_in_its_small_form_too():
    small = ((Heading(text=pages.heat().title), Text(text="a table")), (pages.SERIES,), (Text(text="kept"),))
    content = Content(headline="", sections=small, pictures=((pages.heat(),), (pages.SERIES,)))
    before, behind = list_parts(content)
    assert [part.title for part in before] == [pages.heat().title, pages.SERIES.title]
    assert [(part.title, part.blocks) for part in behind] == [("Results", (Text(text="kept"),))]


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
    assert [(row.ranks, row.blamed) for row in rows] == [((1,), True), ((0, 2, 3), False)]
    assert rows[1].last.endswith("from 10.88 s, not ended")


def test_a_timeline_whose_classes_and_lanes_disagree_is_drawn():
    timeline = replace(pages.timeline(4), classes=((0, 9), (8,)), lanes=pages.timeline(4).lanes[:3])
    assert timeline_data(timeline)["classes"] == [[1], [0], [2]]
    assert timeline_data(replace(timeline, lanes=()))["lanes"] == []


def node(rank, *, blamed=False):
    return WaitNode(ranks=(rank,), state="in recv", place="/a/train.py:1 in main", blamed=blamed)


def test_a_graph_has_who_is_waited_for_at_the_right_and_circles_lead_back():
    chain = lay_out_graph(WaitGraph(nodes=(node(0, blamed=True), node(1), node(2)), edges=((2, 1), (1, 0), (2, 0))))
    assert [box.x for box in chain.boxes] == sorted((box.x for box in chain.boxes), reverse=True)
    assert chain.boxes[0].lines == ("rank 0", "in recv", "train.py:1 in main")
    circle = lay_out_graph(WaitGraph(nodes=(node(0), node(1)), edges=((0, 1), (1, 0))))
    assert len({box.x for box in circle.boxes}) == len(circle.arrows) == 2
    assert (
        circle.words[1] == "rank 1 (in recv, /a/train.py:1 in main) waits for rank 0 (in recv, /a/train.py:1 in main)"
    )


def test_a_graph_that_is_too_large_says_how_much_is_left_out():
    nodes = tuple(map(node, range(MAX_NODES + 5)))
    drawing = lay_out_graph(WaitGraph(nodes=nodes, edges=tuple((at, at + 1) for at in range(len(nodes) - 1))))
    assert (len(drawing.boxes), drawing.left_out, len(drawing.words)) == (MAX_NODES, 5, MAX_NODES + 4)
    assert lay_out_graph(WaitGraph(nodes=(), edges=())).boxes == ()


def test_a_chart_draws_references_without_marks_and_leaves_out_what_logarithms_have_not():
    now = ChartLine(name="now", points=((0, 1.0), (1024, 0.0), (2048, 2.0), (4096, float("inf"))))
    then = ChartLine(name="then", points=((1024, 1.0), (4096, 4.0)), is_reference=True)
    level = ChartLine(name="level", points=((1024, 3.0), (4096, 3.0)))
    chart = lay_out_chart(Series(title="title", lines=(now, then), reference=level))
    assert [(curve.name, len(curve.marks), curve.style) for curve in chart.curves] == [
        ("now", 1, 0), ("then", 0, 0), ("level", 0, LEVEL_STYLE),
    ]  # fmt: skip
    assert chart.curves[0].marks[0].about == "now: 2 at 2 KiB"
    assert [tick.label for tick in chart.across] == ["1 KiB", "2 KiB", "4 KiB"]
    assert (chart.across[0].at, chart.across[-1].at) == (chart.left, chart.right)
    assert all(chart.top <= tick.at <= chart.bottom for tick in chart.up)
    assert max(tick.at for tick in chart.up) > chart.height / 2
    assert lay_out_chart(Series(title="none", lines=(replace(now, points=()),))).curves == ()
    assert lay_out_chart(Series(title="one", lines=(replace(now, points=((8, 3.0),)),))).curves[0].marks


def test_stacks_of_any_depth_are_drawn(monkeypatch):
    deepest = TreeNode(text="frame 0", ranks=(0,))
    for depth in range(1, 3000):
        deepest = TreeNode(text=f"frame {depth}", ranks=(0, *range(depth % 2)), children=(deepest,))
    content = replace(pages.content(), pictures=((Tree(title="Stacks", roots=(deepest,)),),))
    assert page_of(monkeypatch, content).count("frame ") == 3000


def test_frames_of_the_same_ranks_are_not_nested():
    top = TreeNode(text="a", ranks=(0, 1), children=(TreeNode(text="b", ranks=(0, 1), children=(
        TreeNode(text="c", ranks=(0,)), TreeNode(text="d", ranks=(1,)))),))  # fmt: skip
    drawn = str(BlockDrawer(make_environment()).draw(Tree(title="", roots=(top,))))
    assert drawn.count("<details") == 1
    assert drawn.count('class="leaf"') == 3


def test_an_empty_grid_and_every_kind_of_span_are_drawn(monkeypatch):
    empty = Grid(title="empty", rows=(), columns=(), cells=())
    page_of(monkeypatch, replace(pages.content(), pictures=((empty,),)))
    style = page_of(monkeypatch)
    assert all(f".k-{kind.value} " in style and f"--{kind.value}:" in style for kind in SpanKind)
