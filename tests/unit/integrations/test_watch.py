"""What ``ddpdoctor.watch`` refuses, and what importing it costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.integrations import watch as watches
from ddpdoctor.launch.attendance import HostWatch
from ddpdoctor.model.findings import JobStatus, JobSummary
from ddpdoctor.recorder.state import start_ticks
from ddpdoctor.report.formats import render_json
from tests.pictures import finding, report


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hang_timeout": 0}, "hang_timeout is 0"),
        ({"hang_timeout": float("nan")}, "hang_timeout is nan"),
        ({"on_hang": "auto"}, "on_hang is 'auto'; it must be one of report, kill"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_before_anything_starts(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ddpdoctor.watch(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "statement", ["import ddpdoctor; ddpdoctor.watch()", "import ddpdoctor.integrations.pytest_plugin"]
)
def test_nothing_heavy_is_imported_before_it_starts(statement: str) -> None:
    code = f"import json, sys; old = set(sys.modules); {statement}; print(json.dumps([*set(sys.modules) - old]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    heavy = {"torch", "rich", "psutil", "numpy", "pytest", "ddpdoctor.launch", "ddpdoctor.recorder"}

    assert heavy.isdisjoint(json.loads(done.stdout))


def test_a_watch_that_has_not_started_has_no_report_and_may_be_stopped() -> None:
    watch = ddpdoctor.watch()
    watch.stop()

    assert watch.report() == ""


class Paused(BaseException):
    """It waits for something."""


def pause(_seconds: float) -> None:
    raise Paused


def save_report(folder: Path, status: JobStatus) -> None:
    job = JobSummary(world_size=2, nnodes=1, status=status, exit_status=1)
    (folder / "report.json").write_text(render_json(report(finding("DD604", "crash"), job=job)))


def test_a_rank_that_failed_waits_for_a_report_of_the_failure_and_not_for_the_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = os.getpid(), start_ticks()  # one that does not end
    watch = ddpdoctor.watch()
    watch._meeting, watch._has_failed = HostWatch(record=tmp_path, run_dir=tmp_path, watcher=watcher), True
    monkeypatch.setattr(watches.time, "sleep", pause)

    with pytest.raises(Paused):
        watch.report()
    save_report(tmp_path, JobStatus.RUNNING)
    with pytest.raises(Paused):
        watch.report()
    save_report(tmp_path, JobStatus.FAILED)
    assert "DD604 it is" in watch.report()
