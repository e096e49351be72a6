"""JUnit of a job: what its rules found is a failure, notes are not, and the job itself is a case."""

from xml.etree import ElementTree as ET

import pytest

from ddpdoctor.model.findings import Check, Confidence, Finding, JobStatus, JobSummary, Outcome, Report, Severity
from ddpdoctor.report.formats import render_junit


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
