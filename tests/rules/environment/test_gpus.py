"""GPUs of a recorded machine that are changed one by one: what no row of tests/data/environment can say in short."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import GpuOnBus, Launcher, NvLink
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import (
    all_named,
    ask,
    failed,
    fleet,
    gpu_node,
    gpus_of,
    node,
    pci_of,
    process,
    torch_of,
    torchrun,
)

NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
CVD = "CUDA_VISIBLE_DEVICES"


def one_of(facts, kind="gpu-count"):
    check, findings = ask(kind, facts)
    assert check.outcome is failed(*(one.severity for one in findings)), (check.outcome, check.seen, check.reason)
    (finding,) = findings
    return finding


@pytest.mark.parametrize("error", [None, "EPERM", "EACCES", "ENOENT"])
def test_a_gpu_that_was_not_given_to_this_process_is_no_fault(error):
    gpus = gpus_of("one-fewer")
    on_bus = (*gpus.on_bus[:-1], replace(gpus.on_bus[-1], open_error=error))
    assert ask("gpu-count", node(gpus=replace(gpus, on_bus=on_bus)))[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("driver", "device", "outcome"),
    [
        (None, 0x2330, Outcome.FAILED),
        (None, 0x1430, Outcome.PASSED),
        ("vfio-pci", 0x2330, Outcome.PASSED),
        ("nouveau", 0x2330, Outcome.PASSED),
    ],
    ids=["driver-refused-it", "another-model", "given-to-a-vm", "nouveau"],
)
def test_a_gpu_that_the_driver_has_not_taken(driver, device, outcome):
    gpus = gpus_of()
    extra = GpuOnBus(bus_id="0000:f0:00.0", device=device, driver=driver)
    check, findings = ask("gpu-count", node(gpus=replace(gpus, on_bus=(*gpus.on_bus, extra))))
    assert check.outcome is outcome
    assert all(finding.confidence is Confidence.MEDIUM for finding in findings)


def test_slurm_tasks_may_have_gpus_of_their_own():
    one = replace(gpus_of(), devices=gpus_of().devices[:1])
    tasks = tuple(process(rank, SLURM_PROCID=str(rank), CUDA_VISIBLE_DEVICES="0") for rank in range(8))
    assert ask("gpu-count", node(processes=tasks, gpus=one))[0].outcome is Outcome.PASSED


def test_values_that_cannot_be_judged():
    assert ask("cvd-valid", gpu_node())[0].outcome is Outcome.SKIPPED
    check, _ = ask("cvd-valid", gpu_node("mismatch", variables={CVD: "0"}))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "NVML does not start: LIB_RM_VERSION_MISMATCH")
    tasks = tuple(process(n, SLURM_PROCID=str(n), CUDA_VISIBLE_DEVICES=f"GPU-a{n}") for n in range(2))
    alone = replace(gpus_of(), devices=gpus_of().devices[:1])
    assert ask("cvd-valid", node(processes=tasks, gpus=alone))[0].outcome is Outcome.PASSED


def job(*nodes):
    return fleet(*nodes, launcher=Launcher.TORCHRUN, world_size=sum(len(one.processes) for one in nodes))


def ranks_with(values, first=0, **more):
    return tuple(
        process(first + n, local_rank=n, **({} if value is None else {CVD: value}), **more)
        for n, value in enumerate(values)
    )


@pytest.mark.parametrize(
    "facts",
    [
        fleet(gpu_node()),
        job(node(processes=ranks_with(["0"] * 8, SLURM_PROCID="1"), gpus=gpus_of())),
        job(node(processes=torchrun(2), gpus=replace(gpus_of(), devices=gpus_of().devices[:1]))),
        job(node(processes=torchrun(2), gpus=NO_DRIVER)),
    ],
    ids=["alone", "slurm-confines", "one-gpu-is-gpu-count", "no-driver"],
)
def test_who_is_on_which_cannot_be_determined(facts):
    assert ask("dup-gpu", facts)[0].outcome is Outcome.SKIPPED


def test_many_are_drawn_into_one_finding():
    nodes = [
        node(f"n{n}", index=n, processes=ranks_with(["0"] * 4, first=4 * n),
             gpus=replace(gpus_of(), devices=tuple(replace(g, uuid=f"{g.uuid}-{n}") for g in gpus_of().devices)))
        for n in range(6)
    ]  # fmt: skip
    finding = one_of(job(*nodes), "dup-gpu")
    assert "ranks 0-3 on GPU 0 of n0" in finding.summary
    assert finding.summary.endswith("and 2 more GPUs")


# nvlink, fabric


E, W = Severity.ERROR, Severity.WARNING
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


def pcie(ancestor, p2p, **more):
    gpus = all_named(gpus_of(machine="workstation2"), "NVIDIA L40S")
    return node(gpus=replace(gpus, pairs=tuple(replace(p, ancestor=ancestor, p2p=p2p) for p in gpus.pairs)), **more)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (pcie("single", "topology not supported"), [W]),
        (pcie("hostbridge", "topology not supported"), [W]),
        (pcie("hostbridge", "topology not supported", pci=VM), [Severity.INFO]),
        (pcie("system", "topology not supported"), []),
        (pcie("single", "ok"), []),
        (pcie("single", None), []),
        (gpu_node(variables={"CUDA_VISIBLE_DEVICES": "0"}), []),
    ],
    ids=["switch", "host-bridge", "vm", "sockets-apart", "ok", "not-reported", "one-gpu"],
)
def test_pairs_on_pcie(facts, found):
    assert severities("p2p", facts) == found


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
