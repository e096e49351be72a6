"""Renders a report as JUnit XML for the viewers of CI systems, with one test case per check.

There is no standard. This format uses only what the viewers of Jenkins, GitLab and GitHub have in common, according to
https://github.com/testmoapp/junitxml.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ddpdoctor.model.findings import JobStatus, Outcome, Severity
from ddpdoctor.report.findings import name_check
from ddpdoctor.report.lines import clean
from ddpdoctor.report.names import sureness_of, title_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.findings import Check, Finding, JobSummary, Report


def render_junit(report: Report, fail_on: Severity | None) -> str:
    """Render one test case per check. Findings below ``fail_on`` (None: nothing fails) are output, not failures."""
    cases = [_draw_case(check, report.findings, fail_on) for check in report.checks]
    if report.job is not None:
        cases.insert(0, _draw_job(report.job))
    root = Element("testsuites", name="ddpdoctor")
    suite = SubElement(root, "testsuite", {"name": "ddpdoctor", **_count(cases, report)})
    suite.extend(cases)
    indent(root)
    return "<?xml version='1.0' encoding='UTF-8'?>\n" + tostring(root, encoding="unicode") + "\n"


def _count(cases: Sequence[Element], report: Report) -> dict[str, str]:
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {name: str(sum(case.find(tag) is not None for case in cases)) for name, tag in kinds.items()}
    began, ended = _time(report.started_at), _time(report.ended_at)
    if began is None or ended is None:
        return {"tests": str(len(cases)), **counts}
    return {"tests": str(len(cases)), **counts, "time": f"{ended - began:.3f}", "timestamp": report.started_at}


def _time(stamp: str) -> float | None:
    """Return a time in seconds, or None if it is malformed, as in a damaged file."""
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def _draw_job(job: JobSummary) -> Element:
    """Render how the job ended, because a job may fail without a finding."""
    case = Element("testcase", classname="ddpdoctor.job", name="the job finishes", time="0")
    if job.status in {JobStatus.FAILED, JobStatus.HUNG, JobStatus.INTERRUPTED}:
        status = "" if job.exit_status is None else f", exit status {job.exit_status}"
        SubElement(case, "failure", type="error", message=f"{job.status.value}{status}")
    return case


def _draw_case(check: Check, findings: Sequence[Finding], fail_on: Severity | None) -> Element:
    # All texts are cleaned, because XML does not allow control characters even as references.
    group = check.group or "checks"
    case = Element("testcase", classname=f"ddpdoctor.{group}", name=name_check(check), time="0")
    own = [finding for finding in findings if check.id in {finding.kind, finding.code}]
    bad = [finding for finding in own if fail_on is not None and finding.severity.order <= fail_on.order]
    if bad:
        failure = SubElement(case, "failure", type=bad[0].severity.value, message=clean(bad[0].summary))
        failure.text = "\n\n".join(_write(finding) for finding in own)
    elif check.outcome is Outcome.SKIPPED:
        SubElement(case, "skipped", message=clean(check.reason))
    elif check.outcome in {Outcome.INCONCLUSIVE, Outcome.CRASHED}:
        SubElement(case, "error", type=check.outcome.value, message=clean(check.reason))
    else:
        SubElement(case, "system-out").text = "\n\n".join([clean(check.seen), *map(_write, own)])
    return case


def _write(finding: Finding) -> str:
    lines = [f"{finding.severity.value} {title_of(finding)} ({sureness_of(finding)}): {finding.summary}"]
    lines += [f"seen: {line}" for line in finding.evidence]
    return clean("\n".join([*lines, f"to do: {finding.fix}"] if finding.fix else lines))
