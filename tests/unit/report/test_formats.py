"""A report as CSV, JUnit, SARIF and for GitHub."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ddpdoctor.cli.output import render
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
from ddpdoctor.report.formats import render_csv, render_github, render_junit, render_sarif
from tests import benches

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
