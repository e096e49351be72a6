"""SARIF: the exact form of a finding, and what the standard asks of texts, lines and paths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.findings import Check, Confidence, FaultOrigin, Finding, Outcome, Place, Report, Severity
from ddpdoctor.report.formats import render_sarif

CWD = Path("/home/me/repo")
MAIN = Place(rank=1, file="/home/me/repo/train.py", line=61, function="main")
STUCK = Finding(
    code="DD601", kind="stuck", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="rank 1 is stuck",
    ranks=(1,), hosts=("node3",), where=(MAIN,), step=12, evidence=("it sleeps",), fix="Look at line 61.",
    origin=FaultOrigin.SCRIPT,
)  # fmt: skip
REPORT = Report(
    command=("ddpdoctor",), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z", job=None, verdict=None,
    findings=(STUCK,), checks=(), ranks=(), tool_version="0.1.0",
)  # fmt: skip
PAGE = "https://github.com/ddpdoctor/ddpdoctor/blob/main/docs/rules/DD601-stuck.md"


def draw(*findings, checks=()):
    text = render_sarif(replace(REPORT, findings=findings, checks=checks), {"DD601": "A rank is stuck"}, CWD)
    (run,) = json.loads(text)["runs"]
    return run


def place_of(place):
    (result,) = draw(replace(STUCK, where=(place,)))["results"]
    (location,) = result["locations"]
    return location["physicalLocation"]


def test_the_whole_file():
    """The form was validated with the schema of the standard, its errata 01."""
    assert json.loads(render_sarif(REPORT, {"DD601": "A rank is stuck"}, CWD)) == {
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
    from ddpdoctor.diagnose.pages import read_page

    (rule,) = json.loads(render(REPORT, "sarif"))["runs"][0]["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] == read_page("DD601").summary


def test_a_code_that_this_version_does_not_know_has_its_kind_as_title():
    report = replace(REPORT, findings=(replace(STUCK, code="DD999", kind="later"),))
    (rule,) = json.loads(render(report, "sarif"))["runs"][0]["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] == "later"


@pytest.mark.parametrize(("severity", "level"), [("error", "error"), ("warning", "warning"), ("info", "note")])
def test_levels(severity, level):
    assert [one["level"] for one in draw(replace(STUCK, severity=Severity(severity)))["results"]] == [level]


def test_results_point_to_their_rules():
    crash = replace(STUCK, code="DD604", kind="crash")
    run = draw(crash, STUCK, crash)
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
    (result,) = draw(replace(STUCK, where=where))["results"]
    assert [one["message"]["text"] for one in result["locations"]] == ["ranks 0, 1"]
    assert [one["message"]["text"] for one in result["relatedLocations"]] == ["rank 2"]


def test_a_finding_without_a_place_has_no_locations():
    (result,) = draw(replace(STUCK, where=()))["results"]
    assert not {"locations", "relatedLocations"} & result.keys()


def test_what_was_collected_is_neither_link_nor_placeholder_nor_control_character():
    (result,) = draw(replace(STUCK, summary="[a](https://b) {0} {x} \x1b", fix="", evidence=("\udcff",)))["results"]
    assert result["message"]["text"] == "[a\\](https://b) {{0}} {x} \\x1b"
    assert result["properties"]["evidence"] == ["\\udcff"]


def test_checks_without_an_answer_are_notifications():
    crashed = Check(id="shm", code="DD121", outcome=Outcome.CRASHED, reason="KeyError")
    unknown = Check(id="xid", code="DD146", outcome=Outcome.INCONCLUSIVE, reason="no dmesg")
    assert draw(checks=(unknown,))["invocations"][0]["executionSuccessful"]
    (invocation,) = draw(checks=(crashed, unknown))["invocations"]
    assert not invocation["executionSuccessful"]
    assert [(one["level"], one["message"]["text"]) for one in invocation["toolExecutionNotifications"]] == [
        ("error", "DD121 shm: crashed: KeyError"),
        ("warning", "DD146 xid: could not tell: no dmesg"),
    ]
