"""check-env and check-consistency on a machine with a GPU."""

import pytest
import torch

from tests.gpu.judging import Ran, outcomes, report_of

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
    """check-consistency of a healthy model over NCCL finds nothing, and the gradient of one process."""
    done = ran("check_consistency_nccl")
    report = report_of(done)
    assert done.status == 0, done.stderr[-3000:]
    assert report["findings"] == []
    kinds = ("param-drift", "grad-drift", "optimizer-drift", "model-differs", "reference-gradient")
    assert {outcomes(report)[kind] for kind in kinds} == {"passed"}
