"""Annotations of GitHub: a line a finding, at its place, and nothing that was collected becomes a command."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    Finding,
    JobStatus,
    JobSummary,
    Outcome,
    Place,
    Report,
    Severity,
)
from ddpdoctor.report.formats import render_github

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
