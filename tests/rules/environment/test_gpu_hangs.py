"""gpu-alloc, dstate."""

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.gpus import GpuTrial, GpuWork, StuckProcess
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, node


def work(index, error=None, *, timed_out=False):
    return GpuWork(index=index, ok=error is None, error=error, timed_out=timed_out, seconds=4.0)


def tried(*results):
    return node(gpu_trial=GpuTrial(work=results, copies=()))


def test_all_worked():
    check, findings = ask("gpu-alloc", tried(work(0), work(1)))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "2 GPUs tested, the slowest took 4.0 s")
    assert findings == ()


def test_one_hangs_and_others_compute_wrongly():
    wrong = "a matrix product in bfloat16 is wrong in 3 of 67108864 places"
    late = work(2, "no result within 60 s", timed_out=True)
    _, (hang, error) = ask("gpu-alloc", tried(work(0), work(1, wrong), late, work(3, "CUDA error: unknown error")))
    assert hang.summary == "GPU 2 does not finish a few matrix products"
    assert error.summary == "GPUs 1 and 3 fail under load, or compute wrong results"
    assert error.evidence[0] == f"GPU 1 as torch counts: {wrong}"
    assert {hang.severity, error.severity} == {Severity.ERROR}


def test_not_asked_for():
    unread = Unread(why=Why.NOT_ASKED, reason="GPUs are tested only with --deep")
    check, _ = ask("gpu-alloc", node(gpu_trial=unread))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, unread.reason)


def stuck(seconds, wchan="os_acquire_mutex"):
    return StuckProcess(pid=777, name="nvidia-smi", wchan=wchan, seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "severity", "confidence"),
    [
        (245.0, Severity.ERROR, Confidence.HIGH),
        (60.0, Severity.ERROR, Confidence.HIGH),
        (59.0, Severity.WARNING, Confidence.MEDIUM),
        (1.0, Severity.WARNING, Confidence.MEDIUM),
        (None, Severity.WARNING, Confidence.MEDIUM),
    ],
)
def test_how_long(seconds, severity, confidence):
    _, (finding,) = ask("dstate", node(stuck_processes=(stuck(seconds),)))
    assert (finding.severity, finding.confidence) == (severity, confidence)
    assert finding.summary.startswith("nvidia-smi hangs inside the NVIDIA driver")
    assert "pid 777 (nvidia-smi) in os_acquire_mutex" in finding.evidence[0]


def test_nobody_hangs():
    check, findings = ask("dstate", node(stuck_processes=()))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_a_place_that_is_hidden():
    _, (finding,) = ask("dstate", node(stuck_processes=(stuck(100.0, wchan=""),)))
    assert "in an unknown function" in finding.evidence[0]


def test_without_a_driver():
    check, _ = ask("dstate", node(stuck_processes=Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")))
    assert check.outcome is Outcome.SKIPPED
