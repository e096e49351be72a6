"""What the command says of a job that hangs, and of one that moves."""

import json
import subprocess
import sys

import pytest

from tests.scenarios.attach.running import marked, running
from tests.scenarios.running import clean_environment

pytestmark = pytest.mark.usefixtures("preloaded_python")


def attached(job, folder):
    command = ["attach", "--pid", str(job.pids[1]), "--folder", str(folder), "--format", "json"]
    return subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *command], env=clean_environment(), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


def test_the_rank_that_the_others_wait_for_is_named_with_its_line(tmp_path):
    with running("plain", tmp_path / "job") as job:
        done = attached(job, tmp_path)
        assert job.ends_well()

    verdict = json.loads(done.stdout)["verdict"]
    assert (done.returncode, verdict["code"], verdict["ranks"]) == (1, "DD601", [1])
    assert f"attached.py:{marked('FAULT')}" in verdict["summary"]


def test_a_job_that_moves_has_no_verdict(tmp_path):
    with running("moving", tmp_path / "job", settle=False) as job:
        done = attached(job, tmp_path)
        assert job.ends_well()

    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, None)
