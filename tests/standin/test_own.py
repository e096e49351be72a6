"""What a GPU that is lent cannot show: devices that fail when they are asked to, two GPUs, NVML with faults."""

import pytest

from tests.gpu.judging import Ran, assert_blamed, assert_recorded, assert_silent, outcomes, report_of
from tests.nvml_driver import compile_driver

pytestmark = pytest.mark.standin
LOST = {"214": "uncorrectable ECC error", "719": "unspecified launch failure"}


@pytest.mark.parametrize("code", [pytest.param(code, marks=pytest.mark.gpu_job(f"lost_{code}")) for code in LOST])
def test_lost(ran: Ran, code: str) -> None:
    """The device of rank 1 fails in a kernel; rank 0 waits for it on its own device."""
    report = report_of(ran(f"lost_{code}"))
    assert (report["verdict"]["kind"], report["verdict"]["ranks"]) == ("crash", [1]), report["verdict"]
    assert LOST[code] in report["verdict"]["summary"]
    assert any("GPU" in said for said in report["verdict"]["evidence"]), report["verdict"]
    assert_recorded(report)


@pytest.mark.full
@pytest.mark.gpu_job("spins")
def test_a_host_that_spins(ran: Ran) -> None:
    """Rank 0 waits for its device on a core of its own, as CUDA has it do: it is no rank that computes."""
    assert_blamed(ran("spins"), "stuck", [1], "sleeper")


@pytest.mark.full
@pytest.mark.gpu_job("limit_cleanup")
def test_an_abort_that_leaves_the_rank_alive(ran: Ran) -> None:
    """At the group's limit torch aborts the communicator of rank 0 and lets it go on, into an error."""
    assert_blamed(ran("limit_cleanup"), "stuck", [1], "watchdog")


@pytest.mark.full
@pytest.mark.gpu_job("two_gpus_sleeper")
def test_a_gpu_for_each_rank(ran: Ran) -> None:
    """As most jobs have it."""
    assert_blamed(ran("two_gpus_sleeper"), "stuck", [1], "sleeper")


@pytest.mark.full
@pytest.mark.gpu_job("two_gpus_trains")
def test_a_gpu_for_each_rank_healthy(ran: Ran) -> None:
    """Replicas on two devices are equal."""
    report = assert_silent(ran("two_gpus_trains"))
    assert outcomes(report)["param-drift"] == "passed"


@pytest.mark.full
@pytest.mark.gpu_job("check_env_nvml")
def test_nvml(ran: Ran, tmp_path, monkeypatch) -> None:
    """check-env asks both torch's CUDA build and the driver, which agree on two GPUs; GPU 1 has faults."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compile_driver(tmp_path)))
    report = report_of(ran("check_env_nvml"))
    found = outcomes(report)
    assert "crashed" not in found.values()
    assert (found["gpu-count"], found["ecc-unc"]) == ("passed", "failed"), found
