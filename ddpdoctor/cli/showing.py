"""Shows and saves the report of a check, and picks the exit status."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.cli.output import save_report, show_report
from ddpdoctor.launch.folders.report_dir import make_report_dir
from ddpdoctor.model.exit_status import report_status
from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from ddpdoctor.launch.command.options import FailOn, ReportFormat
    from ddpdoctor.model.findings import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How the user wants a report, and from which severity on it is a failure."""

    verbose: bool
    format: ReportFormat
    fail_on: FailOn
    report_dir: Path | None


def show_check(report: Report, shown: Shown) -> int:
    """Write a report to stdout, and to its folder; return the exit status. Raises ``UserError`` for the folder."""
    least = None if shown.fail_on == "never" else Severity(shown.fail_on)
    folder = None if shown.report_dir is None else make_report_dir(shown.report_dir)
    if folder is not None:
        save_report(folder, report)
    show_report(report, shown.format, sys.stdout, shown.report_dir, verbose=shown.verbose, fail_on=least)
    return report_status(report, least)
