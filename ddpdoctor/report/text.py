"""A report as text for people. Everything collected is plain text here, never markup; the verdict comes last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import JobStatus, Outcome, Severity
from ddpdoctor.report.attempts import add_earlier, read_attempts, without_earlier
from ddpdoctor.report.classes import merge_findings, merge_places
from ddpdoctor.report.findings import STYLES
from ddpdoctor.report.page import LABEL_WIDTH, Page, draw, plural
from ddpdoctor.report.rank_table import add_ranks
from ddpdoctor.report.ranks import format_ranks
from ddpdoctor.report.replicas import replica_words

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Finding, Report


def render_text(
    report: Report,
    *,
    width: int | None,
    colour: bool,
    run_dir: Path | None,
    cwd: Path | None = None,
) -> str:
    """Render a report; ``width`` None is for what is no terminal and wraps nothing.

    Paths below ``cwd`` are shown relative to it. A job that ended well without findings is a line, or two where its
    replicas were compared.
    """
    page = Page(width=width, cwd=cwd)
    attempts = read_attempts(report)
    others = without_earlier(tuple(f for f in report.findings if f != report.verdict), attempts)
    if report.verdict is not None:
        _add_status(page, report, run_dir)
    add_earlier(page, report, attempts)
    if _ended_badly(report):
        add_ranks(page, report)
    _add_checks(page, report)
    _add_others(page, others)
    if report.verdict is not None:
        _add_verdict(page, report.verdict)
    else:
        _add_status(page, report, run_dir)
    return draw(page.lines, colour=colour)


def _ended_badly(report: Report) -> bool:
    return report.job is not None and report.job.status not in {JobStatus.FINISHED, JobStatus.NOT_RUN}


def _add_status(page: Page, report: Report, run_dir: Path | None) -> None:
    """Add the line that says how the job ended, and one of what was compared where it ended well."""
    if page.lines:
        page.gap()
    restarts = len(read_attempts(report)) - 1
    parts = [*_job_words(report), *([f"after {plural(restarts, 'restart')}"] if restarts > 0 else [])]
    parts += [] if report.verdict else [_count_findings(report)]
    parts += _crashed_words(report)
    where = "" if run_dir is None else f"; report in {run_dir}"
    page.add(f"ddpdoctor: {', '.join(parts)}{where}")
    told = None if _ended_badly(report) else replica_words(report)
    if told is not None:
        page.add(told, first="  ")


def _job_words(report: Report) -> list[str]:
    if report.job is None:
        return []
    words = [report.job.status.value]
    if report.job.world_size is not None:
        words.append(plural(report.job.world_size, "rank"))
    if report.job.exit_status:
        words.append(f"exit status {report.job.exit_status}")
    return words


def _count_findings(report: Report) -> str:
    """Say that nothing, only notes, or no cause was found: three different things."""
    notes = sum(finding.severity is Severity.INFO for finding in report.findings)
    if notes == len(report.findings) > 0:
        nothing = "no cause found, " if _ended_badly(report) else ""
        return nothing + plural(notes, "note")
    if report.findings:
        return plural(len(report.findings), "finding")
    return "no cause found" if _ended_badly(report) else "no findings"


def _crashed_words(report: Report) -> list[str]:
    crashed = sum(check.outcome is Outcome.CRASHED for check in report.checks)
    return [f"{plural(crashed, 'check')} crashed"] if crashed else []


def _add_checks(page: Page, report: Report) -> None:
    """Add what could not be judged, where there is something to judge: it must not read like "passed"."""
    words = {Outcome.INCONCLUSIVE: "could not tell", Outcome.CRASHED: "crashed"}
    checks = [check for check in report.checks if check.outcome in words]
    if not checks or not (_ended_badly(report) or report.findings):
        return
    page.gap()
    for check in checks:
        page.add(f"{check.code} {check.id}".strip() + f": {words[check.outcome]}: {check.reason}", first="  ")


def _add_others(page: Page, findings: tuple[Finding, ...]) -> None:
    if not findings:
        return
    page.gap()
    for finding in merge_findings(findings):
        style = STYLES[finding.severity]
        head = f"  {finding.severity.value.ljust(LABEL_WIDTH)}"
        page.add(f"{title_of(finding)}: {finding.summary}", first=head, style=style, styled=len(head))
        if finding.severity is not Severity.INFO:
            page.add_labelled("", (f"at {place}" for place in merge_places(finding.where)))
            page.add_labelled("", [f"to do: {finding.fix}"] if finding.fix else [])


def _add_verdict(page: Page, verdict: Finding) -> None:
    """Add what is wrong, on which ranks, at which line, what was seen, what to do: in this order."""
    page.gap()
    title = f"{title_of(verdict)} (confidence {verdict.confidence.value})"
    page.add(title, style=STYLES[verdict.severity])
    page.add_labelled("wrong", [verdict.summary])
    page.add_labelled("where", [*merge_places(verdict.where), *_where_else(verdict)])
    page.add_labelled("seen", verdict.evidence)
    page.add_labelled("to do", [verdict.fix] if verdict.fix else [])
    page.add_labelled("more", [f"ddpdoctor explain {verdict.code}"])


def title_of(finding: Finding) -> str:
    """Return the code and kind of a finding, and whom it blames."""
    hosts = f"on {', '.join(finding.hosts)}" if finding.hosts else ""
    blamed = " ".join(part for part in (format_ranks(finding.ranks), hosts) if part)
    return ", ".join(part for part in (f"{finding.code} {finding.kind}", blamed) if part)


def _where_else(finding: Finding) -> list[str]:
    step = [] if finding.step is None else [f"step {finding.step}"]
    tensor = [] if finding.tensor is None else [f"tensor {finding.tensor}"]
    return [", ".join(step + tensor)] if step or tensor else []
