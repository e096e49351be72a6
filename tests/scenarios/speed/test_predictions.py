"""What a change would gain is predicted from a real run, and again with a curve that allreduce-bench measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.running import JOBS, PATIENT, clean_environment, finish, start

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a job whose buffers take long to send."""
    folder = tmp_path_factory.mktemp("slow") / "run"
    ran = finish(
        start(JOBS / "speed" / "buffers.py", folder, "--speed", *PATIENT, ranks=2, args=("mask",)), folder
    )  # fmt: skip
    assert ran.status == 0
    return folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a bench of this machine."""
    folder = tmp_path_factory.mktemp("bench")
    options = ("--max-size", "1MiB", "--factor", "32", "--iters", "3", "--warmup", "1", "--mode", "throughput")
    ran = doctor("allreduce-bench", "--nproc-per-node", "2", "--report-dir", str(folder / "run"), *options)
    assert (folder / "run" / "report.json").exists(), ran.stderr
    return folder / "run" / "report.json"


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpdoctor", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment(), timeout=200)


def predictions(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["setting"]: one for one in report["data"]["speed"]["predictions"]}


def test_a_run_predicts_what_its_buffers_cost(slow: Path) -> None:
    report = json.loads((slow / "report.json").read_text())
    (finding,) = (one for one in report["findings"] if one["kind"] == "buffer-broadcast")
    predicted = predictions(report)["buffers_off"]
    assert 1 - predicted["ratio"] == pytest.approx(finding["share"])
    shown = doctor("report", str(slow)).stdout
    assert "what a change would gain (predicted)" in shown
    assert "no broadcast of buffers" in shown


def test_a_measured_curve_is_used_in_place_of_the_run(slow: Path, bench: Path) -> None:
    ran = doctor("report", str(slow), "--curve", str(bench), "--format", "json")
    assert ran.returncode == 0, ran.stderr
    by_curve, by_run = predictions(json.loads(ran.stdout)), predictions(json.loads((slow / "report.json").read_text()))
    assert by_curve["buffers_off"] == by_run["buffers_off"]
    assert not any("fitted to this run" in one["assumes"] for one in by_curve.values())


def test_what_is_no_curve_is_refused(slow: Path, bench: Path) -> None:
    for arguments, says in (
        ((str(slow), "--curve", str(slow)), "is not a report of allreduce-bench"),
        ((str(slow), "--curve", "/nowhere"), "there is no /nowhere"),
        ((str(bench), "--curve", str(bench)), "run"),
    ):
        ran = doctor("report", *arguments)
        assert ran.returncode == 2, arguments
        assert says in ran.stderr
        assert "Traceback" not in ran.stderr
