"""``tune --scaling`` launches a job with several numbers of ranks, and says what more ranks cost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.running import JOBS, clean_environment, free_port, hold_to_schema

pytestmark = pytest.mark.usefixtures("preloaded_python")

JOB = JOBS / "speed" / "scaling.py"


def tune(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "ddpdoctor", "tune", f"--master-port={free_port()}", f"--report-dir={tmp_path / 'run'}",
        *arguments,
    ]  # fmt: skip
    env = clean_environment()
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=250)


@pytest.mark.parametrize(("way", "kind"), [("of_each_rank", "weak"), ("of_all_ranks", "strong")])
def test_the_batch_of_a_rank_decides_which_efficiency_is_shown(tmp_path: Path, way: str, kind: str) -> None:
    ran = tune(tmp_path, "--scaling", "1,2", str(JOB), way)
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    hold_to_schema(report)
    scaling = report["data"]["scaling"]
    assert [(one["kind"], one["ranks"]) for one in scaling["launches"]] == [("alone", 1), ("share", 2), ("job", 2)]
    (row,) = scaling["rows"]
    assert row["kind"] == kind
    assert row["threads"] * row["contention"] * row["communication"] == pytest.approx(row["efficiency"])
    assert scaling["predicted"] or scaling["reason"]
    assert report["findings"] == []
    assert f"{kind} efficiency" in ran.stderr
    again = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "report", str(tmp_path / "run")], check=True, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert "scaling efficiency (measured)" in again.stdout


def test_a_job_that_is_too_short_has_no_efficiency(tmp_path: Path) -> None:
    ran = tune(tmp_path, "--scaling", "1,2", str(JOB), "short")
    assert ran.returncode == 4
    assert "launch 1 has no result" in ran.stderr
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scaling", "1", str(JOB)), "one of them above 1"),
        (("--scaling", "two", str(JOB)), "not a list of rank counts"),
        (("--scaling", "1,2", "--nproc-per-node=2", str(JOB)), "with --nproc-per-node"),
        (("--scaling", "1,2", "--only", "bucket_cap", str(JOB)), "with --only"),
        (("--scaling", "1,2", "--", "python", str(JOB)), "needs a script"),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    ran = tune(tmp_path, *arguments) if "--" not in arguments else tune_command(tmp_path, *arguments)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "run").exists()


def tune_command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it without torchrun's options, which a command does not take."""
    command = [sys.executable, "-m", "ddpdoctor", "tune", f"--report-dir={tmp_path / 'run'}", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment(), timeout=60)
