"""Reads what a watch has found, as text for a log or for a test's failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.launch.run_folder import REPORT_NAME
from ddpdoctor.model.findings import JobStatus, Severity
from ddpdoctor.recorder.storage.files import check_json, read_plain
from ddpdoctor.report.formats import parse_report
from ddpdoctor.report.text.report import render_text

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report

WIDTH = 100


def read_report(run_dir: Path) -> Report | None:
    """Return the report of a run folder, or None if there is none yet.

    Raises ``UserError``, ``OSError`` or ``ValueError`` if it is damaged.
    """
    file = run_dir / REPORT_NAME
    return parse_report(check_json(read_plain(file)).decode()) if file.exists() else None


def shows_failure(run_dir: Path) -> bool:
    """Return whether the report of a run folder is of a job that failed.

    Raises what ``read_report`` raises.
    """
    report = read_report(run_dir)
    return report is not None and report.job is not None and report.job.status is JobStatus.FAILED


def draw_verdict(run_dir: Path) -> str:
    """Return the report of a run folder as text, or "" if it has none, or none with an error or a warning.

    Raises what ``read_report`` raises.
    """
    report = read_report(run_dir)
    if report is None or all(finding.severity is Severity.INFO for finding in report.findings):
        return ""
    return render_text(report, width=WIDTH, color=False, run_dir=run_dir)
