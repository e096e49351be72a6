"""app-clocks, persistence, mig, compute-mode."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.gpus import GpuProcess
from ddpdoctor.model.node import Launcher
from tests.rules.environment.build import ask, failed, fleet, node, process
from tests.rules.environment.gpu_nodes import gpu_node, gpus_of, with_gpu

E, W, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def test_clocks_as_they_should_be():
    check, findings = ask("app-clocks", fleet(gpu_node(host="a"), gpu_node(host="b")))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "highest clocks of 16 GPUs: 1980 MHz", ())


def test_a_lowered_application_clock():
    _, (finding,) = ask("app-clocks", fleet(gpu_node(host="a"), gpu_node("app-clocks", host="b", ranks=8)))
    assert (finding.severity, finding.summary) == (W, "GPU 5 has a lowered application clock")
    assert (finding.hosts, finding.ranks, finding.fix) == (("b",), (5,), "sudo nvidia-smi -rac -i 5")


def test_a_raised_application_clock_is_no_fault():
    assert ask("app-clocks", node(gpus=with_gpu(gpus_of(), 0, app_clock_sm_mhz=2000)))[1] == ()


def test_who_has_another_highest_clock():
    other = with_gpu(gpus_of(), 3, max_clock_sm_mhz=1755)
    nodes = [gpu_node(host="a"), gpu_node(host="b"), replace(gpu_node(host="c"), gpus=other)]
    _, (finding,) = ask("app-clocks", fleet(*nodes, launcher=Launcher.SLURM))
    assert finding.summary.startswith("the highest clock of NVIDIA H100 80GB HBM3 is 1755 MHz on c, 1980 MHz on ")
    assert (finding.hosts, finding.confidence) == (("c",), Confidence.HIGH)


def test_models_are_compared_among_themselves():
    nodes = [gpu_node(host="a"), gpu_node(machine="workstation2", host="b")]
    assert ask("app-clocks", fleet(*nodes))[1] == ()


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (gpu_node("persistence-off", files=("pod",)), W),
        (gpu_node(machine="workstation2"), INFO),
        (gpu_node("persistence-off"), None),
        (gpu_node(), None),
    ],
    ids=["server", "workstation", "the-daemon-runs", "on"],
)
def test_persistence(facts, severity):
    check, findings = ask("persistence", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert check.outcome is (failed(severity) if severity else Outcome.PASSED)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (gpu_node("mig", ranks=4), E),
        (gpu_node("mig"), W),
        (gpu_node("mig", ranks=4, variables={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}), W),
        (gpu_node(ranks=4), None),
    ],
    ids=["ranks", "alone", "meant", "off"],
)
def test_mig(facts, severity):
    _, findings = ask("mig", facts)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all("in MIG mode" in finding.summary for finding in findings)


def test_cards_without_mig():
    assert ask("mig", gpu_node(machine="workstation2"))[0].outcome is Outcome.SKIPPED


def test_prohibited():
    _, (finding,) = ask("compute-mode", gpu_node("prohibited", ranks=8))
    assert (finding.severity, finding.ranks) == (E, (1,))
    assert finding.summary == "GPU 1 cannot run work: the compute mode is prohibited"
    assert finding.fix == "sudo nvidia-smi -c 0 -i 1"


@pytest.mark.parametrize(
    ("one", "fails"),
    [
        (GpuProcess(pid=31337, name="python", used_bytes=1, ours=False), True),
        (GpuProcess(pid=31337, name="python", used_bytes=1, ours=True), False),
        (GpuProcess(pid=31337, name="Xorg", used_bytes=1, ours=False, graphics=True), False),
        (GpuProcess(pid=4300, name="python", used_bytes=1, ours=False), False),
    ],
    ids=["a-stranger", "ours", "a-screen", "a-rank"],
)
def test_exclusive_with_somebody_on_it(one, fails):
    facts = replace(gpu_node("exclusive", ranks=8), gpus=with_gpu(gpus_of("exclusive"), 4, processes=(one,)))
    check, findings = ask("compute-mode", facts)
    assert check.outcome is (Outcome.FAILED if fails else Outcome.PASSED)
    assert all("allows only one process" in finding.summary for finding in findings)


def test_exclusive_gpus_are_named_together():
    stranger = GpuProcess(pid=31337, name="python", used_bytes=1, ours=False)
    gpus = with_gpu(with_gpu(gpus_of("exclusive"), 4, processes=(stranger,)), 5, processes=(stranger,))
    _, (finding,) = ask("compute-mode", node(gpus=gpus))
    assert finding.summary == "GPUs 4 and 5 allow only one process, and another job's process uses them"


def test_exclusive_with_several_ranks():
    processes = tuple(process(n, CUDA_VISIBLE_DEVICES="0") for n in range(2))
    _, (finding,) = ask("compute-mode", node(processes=processes, gpus=gpus_of("exclusive")))
    assert finding.summary == "GPU 0 allows only one process, but several ranks use it"
    assert finding.ranks == (0, 1)
