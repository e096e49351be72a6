"""``wrap --speed`` on a GPU: the phases are what CUDA events measured, and a host that is too slow is found."""

import pytest

from tests.gpu.judging import Ran, assert_recorded, report_of


@pytest.mark.gpu_job("speed_busy")
def test_the_budget_is_what_the_gpu_takes(ran: Ran, *, dry: bool) -> None:
    """Large matrices: the step is measured on the GPU, its phases add up, and the host is not to blame."""
    report = report_of(ran("speed_busy"))
    assert_recorded(report)
    budget = report["data"]["speed"]["budget"]
    assert budget["is_device"] is not dry
    assert sum(row["critical_ms"] for row in budget["phases"]) == pytest.approx(budget["wall_ms"], rel=0.03)
    assert "DD815" not in {finding["code"] for finding in report["findings"]}


@pytest.mark.gpu_job("speed_small_kernels")
def test_a_host_that_is_too_slow(ran: Ran, *, dry: bool) -> None:
    """Hundreds of tiny layers: the GPU waits for the host. On the CPU of a dry run there is no such finding."""
    report = report_of(ran("speed_small_kernels"))
    assert_recorded(report)
    assert ("DD815" in {finding["code"] for finding in report["findings"]}) is not dry
