"""xid."""

import pytest

from ddpdoctor.collect.gpu.kernel_log import read_kernel_log
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.gpus import KernelView, Xid
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.environment.xid import CODES
from tests.machines import load_machine
from tests.rules.environment.build import ask, node
from tests.rules.environment.gpu_nodes import gpu_node, gpus_of

E, W, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def logged(code, bus_id="0000:43:00.0", age_s=90.0):
    return KernelView(xids=(Xid(bus_id=bus_id, code=code, text="pid=1, words", age_s=age_s),))


@pytest.mark.parametrize(
    ("codes", "severity"),
    [((48, 64, 74, 79, 95, 119, 120, 140), E), ((63, 92, 94), W), ((13, 31, 43, 45, 8, 154), INFO)],
)
def test_how_bad_each_is(codes, severity):
    for code in codes:
        _, (finding,) = ask("xid", gpu_node(ranks=8, kernel_log=logged(code)))
        assert finding.severity is severity
        assert finding.summary.startswith(f"GPU 1 had Xid {code}: ")
        assert finding.evidence == ("0000:43:00.0 90 s ago: pid=1, words",)
        assert finding.ranks == (() if severity is INFO else (1,))
        assert "{" not in finding.fix
    assert severity is INFO or {code for code in CODES if CODES[code][0] is severity} == set(codes)


def test_a_recorded_log(tmp_path):
    view = read_kernel_log(load_machine("nvlink8", tmp_path, "xid"), ReadingPlan(sections=frozenset()))
    check, findings = ask("xid", gpu_node(kernel_log=view))
    assert (check.outcome, check.seen) == (Outcome.FAILED, "4 Xid errors since boot")
    assert [(finding.severity, finding.summary.split(":")[0]) for finding in findings] == [
        (E, "GPU 1 had Xid 79"),
        (W, "GPU 2 had Xid 63"),
        (INFO, "GPU 3 had Xid 31"),
    ]
    assert "2 times" in findings[2].evidence[0]


def test_a_gpu_of_somebody_else_is_left_out():
    check, findings = ask("xid", gpu_node(kernel_log=logged(79, "0000:aa:00.0")))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_a_gpu_that_no_longer_reports_its_place_is_not_left_out():
    _, (finding,) = ask("xid", gpu_node("lost", kernel_log=logged(79, "0000:61:00.0")))
    assert finding.summary == "The GPU at 0000:61:00.0 had Xid 79: it fell off the bus"


def test_without_nvml_all_are_reported():
    unread = Unread(why=Why.TIMEOUT, reason="NVML did not answer")
    _, (finding,) = ask("xid", node(gpus=unread, kernel_log=logged(79)))
    assert finding.summary.startswith("The GPU at 0000:43:00.0")


def test_a_log_of_a_machine_whose_gpus_are_not_here():
    absent = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
    check, findings = ask("xid", node(gpus=absent, kernel_log=logged(79)))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, absent.reason, ())


def test_a_log_that_may_not_be_read():
    denied = Unread(why=Why.DENIED, reason="the kernel's log may not be read")
    check, _ = ask("xid", node(gpus=gpus_of(), kernel_log=denied))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, denied.reason)
