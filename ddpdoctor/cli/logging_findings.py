"""Puts the findings of a job into the logs that its script wrote: ``wrap --log-findings``.

Each log is written in a child process with a time limit, since a library may wait for a server or a file system that
hangs. What fails costs a message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ddpdoctor.cli import log_writers
from ddpdoctor.cli.log_writers import Entry
from ddpdoctor.cli.output import render, say
from ddpdoctor.collect.bounded import safe_flags
from ddpdoctor.launch.run_folder import REPORT_NAME
from ddpdoctor.model.findings import JobStatus

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.facts import Logger
    from ddpdoctor.model.findings import Report

LIMIT_S = 60.0
"""Our choice: on a busy machine importing a library takes seconds, and so does an upload."""
MISSING = "ModuleNotFoundError"
NOWHERE = "the script did not log to TensorBoard, W&B or MLflow, so the findings are logged nowhere"


def log_findings(run_dir: Path, report: Report, file: Path) -> None:
    """Add the report to the script's logs, if it has findings and this host reports of the job."""
    if not report.findings or file.name != REPORT_NAME:
        return
    try:
        problems = _log(run_dir, report)
    except Exception as error:  # noqa: BLE001 - a log must not cost the job its exit status
        problems = [f"{type(error).__name__}: {error}"]
    for problem in problems:
        say(sys.stderr, f"--log-findings: {problem}")


def _log(run_dir: Path, report: Report) -> list[str]:
    """Return what went wrong."""
    from ddpdoctor.diagnose.live import find_loggers

    loggers = find_loggers(run_dir)
    if not loggers:
        return [NOWHERE]
    entry = _entry(report)
    return [problem for logger in loggers if (problem := _write(logger, entry))]


def _entry(report: Report) -> Entry:
    finding = report.verdict or report.findings[0]
    return Entry(
        verdict=f"{finding.summary} ({finding.code})",
        step=max((row.step or 0 for row in report.ranks), default=0),
        has_finished=report.job is not None and report.job.status == JobStatus.FINISHED,
        text=render(report, "markdown"),
    )


def _write(logger: Logger, entry: Entry) -> str:
    """Have a child write; return what went wrong, or an empty string."""
    job = asdict(logger) | {"entry": asdict(entry)}
    command = [sys.executable, *safe_flags(), "-m", log_writers.__name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), text=True, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{logger.name} had not written the findings after {LIMIT_S:.0f} s"
    if not done.returncode:
        return ""
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if last.startswith(MISSING):
        return f"{logger.name} is not installed for {sys.executable}: pip install {logger.name}"
    return f"{logger.name} did not log the findings: {last}"
