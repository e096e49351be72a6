"""nvlink, fabric, p2p."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.gpus import GpuTrial, NvLink, PeerCopy
from ddpdoctor.model.software import PeerAccess
from tests.rules.environment.build import ask, failed, node
from tests.rules.environment.gpu_nodes import all_named, gpu_node, gpus_of, pci_of, torch_of

E, W, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
PCIE = "NVIDIA A100 80GB PCIe"
VM = pci_of(virtual=True)


def links(active, of):
    return tuple(NvLink(index=index, active=index < active, errors=None) for index in range(of))


def linked(*counts, of=18, name="NVIDIA H100 80GB HBM3", **more):
    """A node whose GPUs have so many active links each."""
    gpus = all_named(gpus_of(), name)
    devices = tuple(replace(gpu, nvlinks=links(count, of)) for gpu, count in zip(gpus.devices, counts, strict=False))
    return node(gpus=replace(gpus, devices=devices, pairs=()), **more)


def severities(kind, facts):
    check, findings = ask(kind, facts)
    assert check.outcome is (failed(*(one.severity for one in findings)) if findings else check.outcome)
    return [finding.severity for finding in findings]


def test_all_links_are_up():
    check, findings = ask("nvlink", gpu_node())
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "18 of 18 links active, 0 link errors", ())


def test_one_link_is_down():
    _, (finding,) = ask("nvlink", gpu_node("nvlink-down", ranks=8))
    assert finding.severity is E
    assert finding.summary == "GPU 6 has NVLinks that are down, which slows all ranks on the node"
    assert finding.evidence[0].endswith("17 of 18 links active, down: 7")
    assert finding.ranks == (6,)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (linked(0, 0), [E]),
        (linked(0, 0, pci=VM), [W]),
        (linked(6, 6, of=6, name="Tesla V100-SXM2-16GB"), []),
        (linked(3, 3, of=6, name="Tesla V100-SXM2-16GB", pci=VM), [W]),
        (linked(0), []),
        (linked(0, 0, of=12, name=PCIE), []),
        (linked(12, 12, 0, of=12, name=PCIE), []),
        (linked(12, 8, of=12, name=PCIE), [W]),
        (linked(0, 0, of=4, name="NVIDIA GeForce RTX 3090"), []),
        (linked(12, 12, of=18, name="NVIDIA H100 NVL"), []),
    ],
    ids=["none-on-a-board", "none-in-a-vm", "v100", "half-a-board", "one-of-a-board", "no-bridge", "one-without-bridge",
         "half-a-bridge", "desktop", "nvl"],
)  # fmt: skip
def test_links_that_may_be_down(facts, found):
    assert severities("nvlink", facts) == found


def test_cards_without_nvlink():
    assert ask("nvlink", gpu_node(machine="workstation2"))[0].outcome is Outcome.SKIPPED


def test_the_fabric_is_complete():
    check, findings = ask("fabric", gpu_node(pci=pci_of(switches=4)))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "fabric completed, 4 NVSwitches, nv-fabricmanager runs"


@pytest.mark.parametrize(
    ("state", "summary", "evidence"),
    [
        ("fabric-in-progress", "GPUs 0-7 are not part of the NVSwitch fabric yet", "fabric state in-progress"),
        ("fabric-failed", "GPU 0 is not part of the NVSwitch fabric yet", "status unknown"),
    ],
)
def test_the_fabric_is_not_complete(state, summary, evidence):
    _, (finding,) = ask("fabric", gpu_node(state, pci=pci_of(switches=4)))
    assert finding.severity is E
    assert finding.summary.startswith(summary)
    assert evidence in finding.evidence[0]


def a100(*, manager, switches=6, virtual=False, torch_count=0, state=None):
    """A driver that tells nothing of the fabric, or says ``state``."""
    gpus = all_named(gpus_of(), "NVIDIA A100-SXM4-80GB")
    devices = tuple(replace(gpu, fabric_state=state, fabric_status=state and "success") for gpu in gpus.devices)
    gpus = replace(gpus, devices=devices, fabric_manager=manager)
    return node(gpus=gpus, pci=pci_of(switches=switches, virtual=virtual), torch=torch_of(gpus, count=torch_count))


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (a100(manager=False), [E]),
        (a100(manager=False, torch_count=8), [W]),
        (a100(manager=False, state="completed"), [W]),
        (a100(manager=True), []),
        (a100(manager=None), []),
        (a100(manager=False, virtual=True), []),
        (a100(manager=False, state="in-progress", torch_count=8), [W]),
        (a100(manager=False, state="in-progress"), [E]),
    ],
    ids=["none", "none-and-torch-works", "gone", "runs", "container", "vm", "in-progress-and-works", "in-progress"],
)
def test_the_manager(facts, found):
    assert severities("fabric", facts) == found


@pytest.mark.parametrize(
    "facts",
    [
        a100(manager=False, switches=0),
        gpu_node(machine="workstation2"),
        gpu_node(machine="workstation2", pci=pci_of(switches=1)),
    ],
    ids=["no-switches", "desktop", "another-nvidia-bridge"],
)
def test_no_fabric(facts):
    assert ask("fabric", facts)[0].outcome is Outcome.SKIPPED


def test_all_pairs_have_a_way():
    check, findings = ask("p2p", gpu_node(torch=torch_of(gpus_of())))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "28 of 28 near pairs have peer access", ())


def test_nvlink_without_peer_access():
    _, (finding,) = ask("p2p", gpu_node("p2p-off"))
    assert finding.severity is E
    assert (
        finding.summary == "GPUs 0-7 cannot access each other's memory directly, although they are connected by NVLink"
    )
    assert "disabled by a registry key" in finding.evidence[0]


def test_torchs_word_counts_too():
    gpus = gpus_of()
    torch = torch_of(gpus, peers=[PeerAccess(source=0, target=1, possible=False)])
    _, (finding,) = ask("p2p", node(gpus=gpus, torch=torch))
    assert finding.evidence == ("1 pairs, such as 0 and 1: torch: cannot access peer",)


def test_cards_that_are_sold_so_are_reported_only():
    _, (finding,) = ask("p2p", gpu_node(machine="workstation2"))
    assert finding.severity is INFO
    assert "as usual for this model" in finding.summary


def pcie(ancestor, p2p, **more):
    gpus = all_named(gpus_of(machine="workstation2"), "NVIDIA L40S")
    return node(gpus=replace(gpus, pairs=tuple(replace(p, ancestor=ancestor, p2p=p2p) for p in gpus.pairs)), **more)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (pcie("single", "topology not supported"), [W]),
        (pcie("hostbridge", "topology not supported"), [W]),
        (pcie("hostbridge", "topology not supported", pci=VM), [INFO]),
        (pcie("system", "topology not supported"), []),
        (pcie("single", "ok"), []),
        (pcie("single", None), []),
        (gpu_node(variables={"CUDA_VISIBLE_DEVICES": "0"}), []),
    ],
    ids=["switch", "host-bridge", "vm", "sockets-apart", "ok", "not-reported", "one-gpu"],
)
def test_pairs_on_pcie(facts, found):
    assert severities("p2p", facts) == found


@pytest.mark.parametrize("machine", ["workstation2", "nvlink8"])
def test_copies_that_arrive_wrong(machine):
    good = PeerCopy(source=1, target=0, ok=True, error=None, gb_s=20.0)
    wrong = PeerCopy(source=0, target=1, ok=False, error="24 of 1024 words arrived wrong", gb_s=20.0)
    _, findings = ask("p2p", gpu_node(machine=machine, gpu_trial=GpuTrial(work=(), copies=(good, wrong))))
    assert findings[0].severity is E
    assert findings[0].summary == "Copies between GPUs 0 and 1 arrive wrong or not at all"
    assert findings[0].evidence == ("GPU 0 to 1: 24 of 1024 words arrived wrong",)
    assert "NCCL_P2P_DISABLE=1" in findings[0].fix


def test_a_lost_gpu_does_not_disturb():
    for kind in ("nvlink", "fabric", "p2p"):
        assert ask(kind, gpu_node("lost", pci=pci_of(switches=4)))[0].outcome is Outcome.PASSED
