"""Finds the run folder of this host's ranks, or makes it and starts its watcher. Reads what the watch has found."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.proc import safe_flags
from ddpdoctor.launch import attendance
from ddpdoctor.launch.run_folder import REPORT_NAME, RUN_FILES, choose_folder, make_default_dir, make_report_dir
from ddpdoctor.launch.stopping import is_same
from ddpdoctor.model.findings import Severity
from ddpdoctor.recorder.state import AGENT_VARIABLE, FOLDER_VARIABLE, start_ticks
from ddpdoctor.recorder.storage.files import check_json, make_record, read_plain
from ddpdoctor.report.formats import parse_report
from ddpdoctor.report.text import render_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.stopping import Target
    from ddpdoctor.model.findings import Report

BOOTSTRAP = Path(__file__).resolve().parents[1] / "recorder" / "bootstrap"
START_LIMIT_S = 10.0
# The shell ends at once, so that the watcher is no child of the rank: a script may wait for all of its children.
_IN_BACKGROUND = '"$@" </dev/null >/dev/null & echo $!'
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the caller of ``watch`` has chosen."""

    hang_timeout_s: float
    on_hang: str
    report_dir: Path | None
    entry: str = "ddpdoctor.watch"  # what the user has called, by whose names advice speaks of settings


def this_process() -> Target:
    return os.getpid(), start_ticks()


def take_place(asked: Asked, env: Mapping[str, str]) -> attendance.HostWatch:
    """Join the watch of this host's ranks; the first starts it. Raises ``UserError`` or ``OSError``."""
    process, number = this_process(), env.get("RANK", "")
    file = attendance.meeting_file(env, astuple(asked), process)
    with attendance.locked(file) as descriptor:
        meeting = attendance.read_meeting(descriptor)
        if meeting is None or not _is_ours(meeting, process, number):
            run_dir = _make_run_dir(asked.report_dir, env).resolve()
            record = choose_folder(run_dir)
            make_record(str(record))
            watcher = _start_watcher(asked, [str(run_dir), str(record), str(file)], env)
            meeting = attendance.HostWatch(record=record, run_dir=run_dir, watcher=watcher)
            attendance.write_meeting(descriptor, meeting)
        attendance.enter(meeting.record, process, number)
    return meeting


def _is_ours(meeting: attendance.HostWatch, process: Target, number: str) -> bool:
    """Return whether a watch is for this launch: its watcher lives, and no other process has this rank's number."""
    if not is_same(*meeting.watcher):
        return False
    present = attendance.read_attendance(meeting.record).present
    return not number or all(holder == process or taken != number for holder, taken in present.items())


def _make_run_dir(report_dir: Path | None, env: Mapping[str, str]) -> Path:
    """Make the run folder. One that was named and holds a run already gets a subfolder for each further run."""
    node = next((env[name] for name in _NODE_VARIABLES if env.get(name, "0") != "0"), "")
    if report_dir is None:
        script = sys.argv[0] if sys.argv else ""
        now = datetime.now()  # noqa: DTZ005  local time, as people look for it
        return make_default_dir(script, is_module=False, now=now, label=node)
    base = report_dir / f"node-{node}" if node else report_dir
    tries = (base if number == 1 else base / f"run-{number}" for number in range(1, 10_000))
    return make_report_dir(next(path for path in tries if not any((path / name).exists() for name in RUN_FILES)))


def watcher_command(asked: Asked, places: list[str]) -> list[str]:
    """``places`` are the run folder, the record's folder, and the meeting's file."""
    options = [str(asked.hang_timeout_s), asked.on_hang, asked.entry, *places]
    command = getattr(sys, "orig_argv", sys.argv)
    return [sys.executable, *safe_flags(), "-m", "ddpdoctor.cli.watching", *options, *command]


def watcher_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in {FOLDER_VARIABLE, AGENT_VARIABLE}}


def record_pythons(record: Path) -> dict[str, str | None]:
    """Set the variables that make Pythons record themselves in a folder. Return what ``restore`` takes."""
    path = os.pathsep.join(filter(None, (str(BOOTSTRAP), os.environ.get("PYTHONPATH"))))
    variables = {FOLDER_VARIABLE: str(record), "PYTHONPATH": path}
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    return former


def restore(former: Mapping[str, str | None]) -> None:
    for name, value in former.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _start_watcher(asked: Asked, places: list[str], env: Mapping[str, str]) -> Target:
    """Start the watcher in its own session, so that Ctrl-C and signals to the launcher's group do not reach it."""
    command = ["/bin/sh", "-c", _IN_BACKGROUND, "sh", *watcher_command(asked, places)]
    done = subprocess.run(
        command, env=watcher_environment(env), stdout=subprocess.PIPE, text=True, check=True, timeout=START_LIMIT_S,
        start_new_session=True,
    )  # fmt: skip
    pid = int(done.stdout)
    return pid, start_ticks(pid)


def read_report(run_dir: Path) -> Report | None:
    """Return the report of a run folder, if it is there. Raises ``UserError``, ``OSError`` or ``ValueError``."""
    file = run_dir / REPORT_NAME
    return parse_report(check_json(read_plain(file)).decode()) if file.exists() else None


def draw_verdict(run_dir: Path) -> str:
    """Return the report as text, or "" without an error or a warning in it. Raises what ``read_report`` raises."""
    report = read_report(run_dir)
    if report is None or all(finding.severity is Severity.INFO for finding in report.findings):
        return ""
    return render_text(report, width=WIDTH, color=False, run_dir=run_dir)
