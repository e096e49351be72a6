"""What CI runs on the stand-in: about ten jobs, one of each kind. ``test_more.py`` has the others, and these again."""

import pytest

from tests.gpu import test_faults
from tests.gpu.judging import Ran
from tests.gpu.test_hangs import test_sleeper_detail, test_sleeper_off
from tests.gpu.test_healthy import test_kernels, test_sleeper_detail_healthy

pytestmark = pytest.mark.standin
FAULTS = (
    (test_faults.test_fault, "crash", "detail"), (test_faults.test_fault, "call", "off"),
    (test_faults.test_fault, "duplicate", "detail"), (test_faults.test_gone, "killed", "remote"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("test", "fault", "how"),
    [
        pytest.param(test, fault, how, marks=pytest.mark.gpu_job(f"{fault}_{how}"), id=f"{fault}-{how}")
        for test, fault, how in FAULTS
    ],
)
def test_first_faults(ran: Ran, test, fault: str, how: str) -> None:
    """An exception; another collective; one GPU for two ranks; a rank that is killed, of which NCCL itself reports."""
    test(ran, fault, how)


@pytest.mark.gpu_job("trains_detail")
def test_first_training(ran: Ran) -> None:
    """A small network trains, with DETAIL."""
    test_faults.test_trains(ran, "detail")
