"""What the command says of a job that hangs, and of one that moves."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ddpdoctor.model.errors import install_command
from tests.scenarios.attach.running import ROOT, marked, running
from tests.scenarios.running import begin

pytestmark = pytest.mark.usefixtures("preloaded_python")


def attached(job, folder, other=sys.executable, **env):
    command = ("attach", "--pid", job.pids[1], "--folder", folder, "--format", "json")
    process = begin(other, "-m", "ddpdoctor", *command, **env)
    stdout, stderr = process.communicate(timeout=100)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


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


def test_a_stopped_rank_stays_stopped_and_is_named_with_the_command_that_continues_it(tmp_path):
    with running("plain", tmp_path / "job") as job:
        os.kill(job.pids[1], signal.SIGSTOP)
        both = [attached(job, tmp_path) for _ in range(2)]  # the first look has not let it go on
        os.kill(job.pids[1], signal.SIGCONT)
        assert job.ends_well()

    for done in both:
        verdict = json.loads(done.stdout)["verdict"]
        assert (done.returncode, verdict["code"], verdict["ranks"]) == (1, "DD606", [1])
        assert f"`kill -CONT {job.pids[1]}`" in verdict["fix"]
        assert [place["line"] for place in verdict["where"]] == [marked("FAULT")]


def test_of_a_rank_that_waits_for_its_loader_the_line_of_the_worker_is_told(tmp_path):
    with running("loader", tmp_path / "job") as job:
        done = attached(job, tmp_path)
        assert job.ends_well()

    verdict = json.loads(done.stdout)["verdict"]
    assert (done.returncode, verdict["code"], verdict["ranks"]) == (1, "DD601", [1])
    at_fault = f"in wait_for_the_test (attached.py:{marked('FAULT')})"
    assert [
        line for line in verdict["evidence"] if line.startswith("the worker of rank 1 with pid ") and at_fault in line
    ]
    assert verdict["fix"] == f"check what the DataLoader workers of rank 1 do {at_fault}"


@pytest.fixture
def other_python():
    """Return a Python beside which there is no py-spy. ``attach`` needs nothing but the standard library."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    if sys.base_prefix == sys.prefix or (python.parent / "py-spy").exists():
        pytest.skip("this Python has py-spy, or there is no other")
    return str(python)


def without_py_spy(tmp_path, *, refuses=False):
    """Return the environment of a Python beside which there is no py-spy; if it ``refuses``, there is one on PATH."""
    found = tmp_path / "bin" / "py-spy"
    found.parent.mkdir()
    if refuses:
        found.write_text(
            "#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2; exit 1\n"
        )
        found.chmod(0o755)
    return {"PATH": f"{found.parent}:/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"}


def test_without_py_spy_the_jobs_own_server_gives_the_stacks(tmp_path, other_python):
    with running("plain", tmp_path / "job", by_hand=True) as job:
        done = attached(job, tmp_path, other_python, **without_py_spy(tmp_path))
        assert job.ends_well()

    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]["code"], report["verdict"]["ranks"]) == (1, "DD601", [1])
    assert report["data"]["evidence"]["notes"] == [
        f"py-spy of ranks 0 and 1: py-spy is not installed; {install_command('attach')}"
    ]


def test_without_the_right_to_trace_nobody_is_named_and_the_way_to_it_is_told(tmp_path, other_python):
    with running("plain", tmp_path / "job") as job:
        done = attached(job, tmp_path, other_python, **without_py_spy(tmp_path, refuses=True))
        assert job.ends_well()

    report = json.loads(done.stdout)
    evidence = report["data"]["evidence"]
    assert (done.returncode, report["verdict"]) == (4, None)
    assert evidence["unclear"] == "no sign of progress, and no stack of a rank was seen"
    (step,) = evidence["collect"]
    assert "SYS_PTRACE" in step
    assert [rank["state"] for rank in report["ranks"]] == ["sleeps", "sleeps"]
