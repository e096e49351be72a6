"""Ranks that an operator or a hand has started, each under its own ``wrap``, and what batch systems send to them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.running import (
    JOBS,
    PATIENT,
    begin,
    finish,
    free_port,
    has_called,
    job_pids,
    kill_job,
    start,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")

LIMIT_S = 250


def start_ranks(folder: Path, *command: str) -> list[subprocess.Popen[str]]:
    """Start two ranks as an operator would: by variables alone, with one --report-dir."""
    reported = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    wrap = [sys.executable, "-m", "ddpdoctor", "wrap", *PATIENT, "--report-dir", str(folder)]
    return [begin(*wrap, *command, **reported, RANK=str(rank)) for rank in range(2)]


def test_two_processes_become_the_ranks_that_their_variables_name(tmp_path):
    processes = start_ranks(tmp_path, str(JOBS / "over_nodes.py"), "nothing", "20")
    try:
        ended = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for folder in (tmp_path, tmp_path / "nodes" / "1"):
            kill_job(folder)
    assert [process.returncode for process in processes] == [0, 0], ended
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["job"] == {"world_size": 2, "nnodes": 1, "status": "finished", "exit_status": 0}
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["findings"] == []
    assert "becoming rank 0 of 2, because RANK and WORLD_SIZE are set" in ended[0][1]
    assert "becoming rank" not in ended[1][1]


def test_a_report_is_there_before_a_job_that_takes_its_time_has_ended(tmp_path):
    process = start("ignores_sigterm", tmp_path, "--hang-timeout", "200", ranks=2)
    assert wait_for(lambda: has_called(tmp_path, "barrier"))
    process.send_signal(signal.SIGTERM)
    # torchrun gives its ranks half a minute.
    assert wait_for((tmp_path / "report.json").exists)
    assert len(job_pids(tmp_path)) >= 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["job"]["status"] == "interrupted"
    assert len(report["ranks"]) == 2
    process.send_signal(signal.SIGTERM)
    assert finish(process, tmp_path).report["job"]["status"] == "interrupted"
