"""check-env, check-consistency and analyze on a machine with a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.judging import Ran, outcomes, report_of
from tests.gpu.running import Done

MUST_RUN = {"gpu-count", "other-procs", "throttle", "compute-mode", "gpu-alloc"}


@pytest.mark.gpu_job("check_env_deep")
def test_a_gpu_is_read_and_does_its_work(ran: Ran, *, dry: bool) -> None:
    """check-env --deep reads the GPU and gives it work."""
    report = report_of(ran("check_env_deep"))
    checks = {check["id"]: check for check in report["checks"]}
    if dry:
        return
    for kind in MUST_RUN:
        assert checks[kind]["outcome"] in {"passed", "failed"}, checks[kind]
    assert checks["gpu-alloc"]["outcome"] == "passed", report["findings"]
    assert str(torch.cuda.device_count()) in checks["gpu-alloc"]["seen"]


@pytest.mark.gpu_job("check_env")
def test_nothing_is_crashed_or_timed_out(ran: Ran, *, dry: bool) -> None:
    """check-env comes to the end of each check."""
    found = outcomes(report_of(ran("check_env")))
    assert "crashed" not in found.values(), found
    assert dry or found["gpu-count"] == "passed"


@pytest.mark.gpu_job("check_env_hidden")
def test_a_hidden_gpu_is_reported_and_no_fault(ran: Ran) -> None:
    """CUDA_VISIBLE_DEVICES that hides the GPU is reported, as no fault."""
    done = ran("check_env_hidden")
    (finding,) = report_of(done)["findings"]
    assert (done.status, finding["severity"]) == (0, "info")


@pytest.mark.gpu_job("check_consistency_nccl")
def test_check_consistency_nccl(ran: Ran) -> None:
    """check-consistency of a healthy model over NCCL finds nothing: one process's gradient, the same bits twice."""
    done = ran("check_consistency_nccl")
    report = report_of(done)
    assert done.status == 0, done.stderr[-3000:]
    assert report["findings"] == []
    kinds = ("param-drift", "grad-drift", "optimizer-drift", "model-differs", "reference-gradient", "not-repeatable")
    assert {outcomes(report)[kind] for kind in kinds} == {"passed"}


@pytest.mark.gpu_job("check_consistency_scaled")
def test_a_loss_times_the_world_size(ran: Ran) -> None:
    """DDP's gradient is twice that of one process."""
    verdict = report_of(ran("check_consistency_scaled"))["verdict"]
    assert verdict["code"] == "DD509"
    assert "2 times (the world size) the mean over ranks, and so is the loss" in verdict["summary"]


@pytest.mark.gpu_job("check_consistency_twice")
def test_batches_that_a_seed_does_not_repeat(ran: Ran) -> None:
    """A second run with the same seed has other batches; the replicas are equal all the same."""
    done = ran("check_consistency_twice")
    report = report_of(done)
    assert done.status == 0, done.stderr[-3000:]
    assert [(found["code"], found["severity"]) for found in report["findings"]] == [("DD510", "info")]
    assert outcomes(report)["param-drift"] == "passed"


def analyzed(done: Done) -> dict[str, Any]:
    """Return what analyze finds in what a job left: what its ranks and torchrun wrote, and torch's dumps."""
    return dict(json.loads(analyze(done.folder, 1))["verdict"])


def analyze(given: Path, status: int) -> str:
    command = [sys.executable, "-m", "ddpdoctor", "analyze", str(given), "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in ("late", "late_soon")]
)
def test_a_rank_that_came_too_late(ran: Ran, name: str) -> None:
    """Rank 1 comes to #6 after the limit, both complete it, and then rank 1 runs into the limit in a later call.

    "late_soon": it has come before torch dumps what was pending, so that no dump shows it behind.
    """
    done = ran(name)
    verdict = analyzed(done)
    assert (verdict["kind"], verdict["ranks"]) == ("stuck", [1]), verdict
    assert "all_reduce #6" in verdict["summary"], verdict
    assert "rank 1 had begun collective #5" not in str(verdict["evidence"]), verdict  # it has completed it


@pytest.mark.gpu_job("late")
def test_of_one_ranks_dump_alone_no_cause_is_told(ran: Ran) -> None:
    """The dump of rank 0, which waited for rank 1, blames nobody: it may have waited for any cause."""
    report = json.loads(analyze(ran("late").folder / "trace_0", 4))
    (said,) = [check for check in report["checks"] if check["code"] == "DD613"]
    assert (report["verdict"], said["outcome"]) == (None, "inconclusive"), report
    assert "rank 1" in said["reason"], said


@pytest.mark.gpu_job("leaves")
def test_a_rank_that_left_the_loop(ran: Ran) -> None:
    """Rank 1 is at a barrier, which NCCL's log calls a reduction of one element. Each side is named once."""
    verdict = analyzed(ran("leaves"))
    assert (verdict["kind"], verdict["ranks"]) == ("mismatch", [0, 1]), verdict
    assert "barrier #" in verdict["summary"], verdict
    assert "in backward" in verdict["summary"], verdict
    assert verdict["summary"].count("rank 0: ") == verdict["summary"].count("rank 1: ") == 1, verdict
