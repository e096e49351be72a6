"""other-procs, zombie-ctx."""

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.gpus import GpuProcess, GpuTrial
from tests.rules.environment.build import ask, failed, node
from tests.rules.environment.gpu_nodes import all_named, gpu_node, gpus_of, with_gpu

E, W = Severity.ERROR, Severity.WARNING
GIB, MIB = 2**30, 2**20


def holding(size_bytes, *, pid=31337, ours=False, graphics=False, files=()):
    one = GpuProcess(pid=pid, name="python", used_bytes=size_bytes, ours=ours, graphics=graphics)
    used = (size_bytes or 0) + 4 * MIB
    return node(gpus=with_gpu(gpus_of(files=files), 4, processes=(one,), memory_used_bytes=used))


def test_a_leftover():
    _, (finding,) = ask("other-procs", gpu_node("leftover", ranks=8))
    assert finding.severity is W
    assert finding.summary == "GPU 4 has 21.0 GiB of 79.6 GiB used by other processes"
    assert finding.evidence == ("GPU 4 (NVIDIA H100 80GB HBM3, 0000:9d:00.0): pid 31337 (python) 21.0 GiB",)
    assert finding.fix == "ps -fp 31337; end leftover processes"
    assert finding.ranks == (4,)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (holding(500 * MIB), None),
        (holding(501 * MIB), W),
        (holding(39 * GIB), W),
        (holding(41 * GIB), E),
        (holding(41 * GIB, ours=True), None),
        (holding(41 * GIB, graphics=True), None),
        (holding(41 * GIB, pid=100), None),
        (holding(None), None),
        (gpu_node("our-process"), None),
        (gpu_node(), None),
        (gpu_node(machine="workstation2"), None),
    ],
    ids=["a-context", "more", "much", "most", "ours", "screen", "a-rank", "not-reported", "child", "idle", "desktop"],
)
def test_how_much(facts, severity):
    check, findings = ask("other-procs", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert check.outcome is (failed(severity) if severity else Outcome.PASSED)


def unseen(used, name="NVIDIA H100 80GB HBM3", **more):
    gpus = all_named(gpus_of(files=("pod",)), name)
    return node(gpus=with_gpu(gpus, 4, memory_used_bytes=used), **more)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (unseen(GIB), None),
        (unseen(GIB + 1), W),
        (unseen(50 * GIB), E),
        (unseen(3 * GIB, "NVIDIA GeForce RTX 4090"), None),
        (unseen(50 * GIB, "NVIDIA GeForce RTX 4090"), W),
        (unseen(3 * GIB, gpu_trial=GpuTrial(work=(), copies=())), None),
        (unseen(50 * GIB, gpu_trial=GpuTrial(work=(), copies=())), E),
    ],
    ids=["idle", "more", "most", "desktop", "desktop-most", "our-trial", "beside-our-trial"],
)
def test_in_a_container_the_memory_speaks(facts, severity):
    check, findings = ask("other-procs", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all(finding.confidence is Confidence.MEDIUM for finding in findings)
    assert "are not visible" in check.seen


def test_memory_that_the_kernel_uses_says_nothing():
    assert ask("other-procs", unseen(50 * GIB, "NVIDIA GH200 480GB"))[0].outcome is Outcome.SKIPPED


def test_memory_of_nobody():
    _, (finding,) = ask("zombie-ctx", gpu_node("zombie"))
    assert finding.severity is W
    assert finding.summary.startswith("GPU 4 has memory in use but no process")
    assert finding.evidence[0].endswith("30.0 GiB in use, no process listed")


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (gpu_node(), Outcome.PASSED),
        (gpu_node("leftover"), Outcome.PASSED),
        (gpu_node(machine="workstation2"), Outcome.PASSED),
        (gpu_node("zombie", files=("pod",)), Outcome.SKIPPED),
        (gpu_node("zombie", "mig"), Outcome.SKIPPED),
        (node(gpus=all_named(gpus_of("zombie"), "NVIDIA GH200 480GB")), Outcome.SKIPPED),
        (node(gpus=with_gpu(gpus_of(), 4, memory_used_bytes=GIB)), Outcome.PASSED),
    ],
    ids=["idle", "somebody", "desktop", "container", "mig", "coherent", "near-miss"],
)
def test_no_zombie(facts, outcome):
    check, findings = ask("zombie-ctx", facts)
    assert (check.outcome, findings) == (outcome, ())


def test_what_is_not_reported():
    gpus = gpus_of()
    for index in range(8):
        gpus = with_gpu(gpus, index, processes=None, memory_used_bytes=None)
    for kind in ("other-procs", "zombie-ctx"):
        assert ask(kind, node(gpus=gpus))[0].outcome is Outcome.SKIPPED
