"""Two ranks over NCCL: a hang is found where the waiting rank stands in item(), and a healthy job stays silent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scenarios.running import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
JOB = Path(__file__).parent / "jobs" / "stuck_nccl.py"


def test_a_rank_that_sleeps_is_blamed(tmp_path: Path) -> None:
    verdict = run(JOB, tmp_path, "--debug-level", "OFF", ranks=2, SEEDED="1").report["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == ("stuck", [1]), verdict
    lines = JOB.read_text().splitlines()
    assert lines[verdict["where"][0]["line"] - 1].endswith("# FAULT")


def test_a_healthy_job_stays_silent(tmp_path: Path) -> None:
    ran = run(JOB, tmp_path, "--debug-level", "OFF", ranks=2, SEEDED="0")
    assert ran.report["verdict"] is None, ran.report["verdict"]
    assert ran.report["job"]["status"] == "finished"
