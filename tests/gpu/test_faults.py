"""Faults of rank 1 over NCCL, each with DETAIL and without: one truth, whichever the mode is."""

import pytest

from ddpdoctor.model.known_errors import find_known
from tests.gpu.catalog import LEVELS
from tests.gpu.judging import Ran, assert_blamed, assert_recorded, assert_silent, report_of

FAULTS = {
    "crash": ("crash", [1]), "memory": ("crash", [1]), "call": ("mismatch", [1]), "size": ("mismatch", [1]),
    "alone": ("mismatch", [1]), "fork": ("mismatch", [0, 1]), "duplicate": ("crash", [0, 1]),
    "model": ("model-differs", [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "level"),
    [pytest.param(fault, level, marks=pytest.mark.gpu_job(f"{fault}_{level}")) for fault in FAULTS for level in LEVELS],
)
def test_fault(ran: Ran, fault: str, level: str) -> None:
    """An exception; memory that no GPU has; another collective, one too many, one of each rank's own branch; another
    size; one GPU for two ranks; models that differ.
    """
    kind, ranks = FAULTS[fault]
    done = ran(f"{fault}_{level}")
    verdict = assert_blamed(done, kind, ranks, "faults", fault)
    assert_recorded(report_of(done))
    if fault == "duplicate":  # torch 2.15 keeps NCCL's words to itself: then the finding has what they mostly are
        known = find_known(verdict["summary"])
        assert known is not None
        assert "Duplicate GPU" in str(verdict) or known.means in str(verdict), verdict


GONE = {
    "killed": ("killed", [1], "remote"), "stopped": ("stopped", [1]), "exit": ("exit-hang", [1]),
    "missing": ("missing", [2], "at_once"),
}  # fmt: skip
"""Kind and ranks, and a way beside those of ``LEVELS``."""


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        pytest.param(fault, how, marks=pytest.mark.gpu_job(f"{fault}_{how}"))
        for fault, (_, _, *more) in GONE.items()
        for how in (*LEVELS, *more)
    ],
)
def test_gone(ran: Ran, fault: str, how: str) -> None:
    """A rank that is killed or frozen while the other one waits for it on the device, or that a thread keeps from
    exiting: its line is the last that was seen. Or a third rank, on which the script counts, was not started.

    "remote": NCCL itself reports to the other one that its peer is gone. "at_once": NCCL connects in
    init_process_group, and not in the first reduction.
    """
    kind, ranks, *_ = GONE[fault]
    verdict = report_of(ran(f"{fault}_{how}"))["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == (kind, ranks), verdict


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.gpu_job(f"abort_at_exit_{level}")) for level in LEVELS]
)
def test_abort_at_exit(ran: Ran, level: str) -> None:
    """A rank that aborts after its script is no failure of training."""
    report = report_of(ran(f"abort_at_exit_{level}"))
    assert (report["job"]["status"], report["verdict"]) == ("finished", None), report["verdict"]
    assert [(found["kind"], found["ranks"]) for found in report["findings"]] == [("exit-abort", [1])]


@pytest.mark.gpu_job("aborted")
def test_aborted(ran: Ran) -> None:
    """One that aborts at the last line of its script is."""
    verdict = assert_blamed(ran("aborted"), "killed", [1], "faults", "aborted")
    assert "SIGABRT" in str(verdict), verdict


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.gpu_job(f"trains_{level}")) for level in LEVELS]
)
def test_trains(ran: Ran, level: str) -> None:
    """A small network trains under the recorder, and nothing is found."""
    done = ran(f"trains_{level}")
    assert_silent(done)
    losses = done.result["losses"]
    assert losses[-1] < losses[0] / 2, losses
