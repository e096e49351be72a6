"""Jobs on a GPU with nothing wrong: they end as they would alone, and nothing is found."""

import pytest

from tests.gpu.judging import Ran, assert_recorded, assert_silent, report_of


@pytest.mark.gpu_job("sleeper_healthy")
def test_sleeper_healthy(ran: Ran, *, dry: bool) -> None:
    """Reductions and item() in turn. Where nobody asks for DETAIL, it is off over NCCL, and on over Gloo."""
    done = ran("sleeper_healthy")
    assert_silent(done)
    assert done.result == {"level": "DETAIL" if dry else "OFF"}


@pytest.mark.gpu_job("sleeper_detail_healthy")
def test_sleeper_detail_healthy(ran: Ran) -> None:
    """The same with DETAIL."""
    assert_silent(ran("sleeper_detail_healthy"))


QUIET = ("mixed_backend_healthy", "subgroup_healthy", "nonblocking_healthy", "watched_healthy")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in QUIET])
def test_groups_healthy(ran: Ran, name: str) -> None:
    """Tensors over NCCL and objects over Gloo in one group; split communicators; ones made in the background; a job
    that watches itself.
    """
    assert_silent(ran(name))


@pytest.mark.gpu_job("slow_kernel")
def test_slow_kernel(ran: Ran) -> None:
    """Kernels of 24 s, longer than the hang timeout of 15 s, hold a reduction up: the job is not stopped."""
    done = ran("slow_kernel")
    assert done.status == 0, done.stderr[-3000:]
    report = report_of(done)
    assert report["job"]["status"] == "finished"
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"], report["findings"]
    assert_recorded(report)


@pytest.mark.gpu_job("capture_async_allreduce")
def test_capture_async_allreduce(ran: Ran) -> None:
    """A CUDA graph with a reduction in it is captured under the recorder, and its replays count right."""
    done = ran("capture_async_allreduce")
    assert_silent(done)
    assert done.result == {"value": 10.0, "right": True}


@pytest.mark.gpu_job("ddp_whole_capture")
def test_ddp_whole_capture(ran: Ran) -> None:
    """A whole step of DDP in one CUDA graph trains, under the recorder, and both ranks have the same weights."""
    done = ran("ddp_whole_capture")
    assert_silent(done)
    losses = done.result["losses"]
    assert losses[-1] < losses[0], losses
    assert done.result["same_weights"]


@pytest.mark.gpu_job("kernels")
def test_kernels(ran: Ran) -> None:
    """What the jobs rest on computes the same on the device and on the CPU. This tests the stand-in's kernels."""
    found = ran("kernels").result
    assert (found["differ"], found["normal"]) == ({}, True)
    assert found["tried"] > 35
