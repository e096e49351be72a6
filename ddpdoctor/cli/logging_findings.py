"""Puts the findings of a job into the TensorBoard logs that its script wrote: ``wrap --log-findings``.

``tensorboard`` writes them in a child process with a time limit, since it may hang on a file system. What fails costs a
message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from ddpdoctor.cli.output import render, say
from ddpdoctor.launch.folders.report_dir import REPORT_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report

LIMIT_S = 60.0
"""Our choice: on a busy machine, importing tensorboard takes seconds."""
TAG = "ddpdoctor"
SUFFIX = ".ddpdoctor"
"""The end of the name of the event file."""
MISSING = "ModuleNotFoundError"


def log_findings(run_dir: Path, report: Report, file: Path) -> None:
    """Add the report to the script's TensorBoard logs, if it has findings and this host reports of the job."""
    if not report.findings or file.name != REPORT_NAME:
        return
    try:
        problem = _log(run_dir, report)
    except Exception as error:  # noqa: BLE001 - a log must not cost the job its exit status
        problem = f"{type(error).__name__}: {error}"
    if problem:
        say(sys.stderr, f"--log-findings: {problem}")


def _log(run_dir: Path, report: Report) -> str:
    """Return what went wrong, or an empty string."""
    from ddpdoctor.diagnose.loggers import find_log_place

    place = find_log_place(run_dir, report)
    if place is None:
        return "the script made no SummaryWriter of torch.utils.tensorboard, so the findings are logged nowhere"
    if not place.folder.is_dir():
        return f"the folder {place.folder}, where the script logged, is gone"
    job = {"folder": str(place.folder), "step": place.step, "text": render(report, "markdown")}
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), text=True, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"tensorboard had not written the findings after {LIMIT_S:.0f} s"
    if MISSING in done.stderr:
        return f"tensorboard is not installed for {sys.executable}: pip install tensorboard"
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"the findings could not be logged: {last}" if done.returncode else ""


def write_event(folder: str, step: int, text: str) -> None:
    """Write an event file of its own, with the report as a text that TensorBoard shows."""
    import time

    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder, filename_suffix=SUFFIX)
    writer.add_event(Event(wall_time=time.time(), step=step, summary=text_pb(f"{TAG}/report", text)))
    writer.close()


if __name__ == "__main__":
    write_event(**json.load(sys.stdin))
