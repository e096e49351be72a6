"""What no real device does when it is asked to: it fails, or it has the host spin, or sleep."""

import pytest

from tests.gpu.judging import Ran, assert_blamed, assert_recorded, report_of

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
