"""nvlink, fabric, p2p."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import GpuTrial, NvLink, PeerAccess, PeerCopy
from tests.rules.environment.build import (
    GEFORCE,
    NO_RDMA,
    all_named,
    ask,
    bridge,
    failed,
    gpu_node,
    gpus,
    gpus_of,
    hca,
    nic,
    node,
    pci,
    pci_device,
    pci_of,
    process,
    rdma,
    roce,
    torch_of,
)

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


PORT = "0000:10:00.0"


def ask_pcie(*devices, cards=NO_RDMA, **changes):
    return ask("pcie", node(pci=pci(*devices, **changes), rdma=cards))


def in_slot(slot=16, **changes):
    return (
        bridge(PORT, width=changes.get("width", 16), max_width=slot),
        pci_device("0000:1b:00.0", upstream=(PORT,), **changes),
    )


def test_full_width_passes():
    check, findings = ask_pcie(*in_slot())
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "links of GPUs and RDMA cards: 1 at x16; speed of idle GPUs is not judged"


def test_half_of_the_lanes_is_an_error():
    _, (finding,) = ask_pcie(*in_slot(width=8))
    assert finding.severity is Severity.ERROR
    assert finding.summary == (
        "The PCIe link of GPU 0000:1b:00.0 (NVIDIA H100 80GB HBM3) has only 8 of 16 lanes: "
        "transfers take 2 times as long"
    )
    assert "the port above it: max_link_width 16" in finding.evidence
    assert "lspci -vvs 0000:1b:00.0" in finding.fix


def test_of_a_desktops_card_it_is_a_warning():
    _, (finding,) = ask_pcie(*in_slot(width=8, device_class=0x030000), model=GEFORCE)
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "devices",
    [in_slot(slot=8, width=8), in_slot(width=16, max_width=16, speed_gt_s=2.5), (pci_device("0000:00:03.0", width=8),)],
    ids=["a slot of eight lanes", "asleep", "no bridge is shown"],
)
def test_links_that_are_as_good_as_they_can_be_pass(devices):
    check, findings = ask_pcie(*devices)
    assert (check.outcome, findings) == (Outcome.PASSED, ())


@pytest.mark.parametrize(
    "devices",
    [(), in_slot(width=None), (nic("0000:05:00.0", device_class=0x020000, width=1),)],
    ids=["none", "not known", "a network card without RDMA"],
)
def test_without_a_link_to_judge_it_is_skipped(devices):
    assert ask_pcie(*devices)[0].outcome is Outcome.SKIPPED


def test_a_slot_with_less_than_others_is_reported():
    others = [
        one
        for n in range(3)
        for one in (bridge(f"0000:2{n}:00.0"), pci_device(f"0000:3{n}:00.0", upstream=(f"0000:2{n}:00.0",)))
    ]
    _, (finding,) = ask_pcie(*in_slot(slot=8, width=8), *others)
    assert finding.severity is Severity.INFO
    assert "has a PCIe link with 8 lanes, but others of its model have 16" in finding.summary


def test_a_guest_compares_its_gpus():
    gpus = [pci_device(f"0000:0{n}:00.0", width=width) for n, width in enumerate((16, 16, 8))]
    _, (finding,) = ask_pcie(*gpus, virtual_machine=True)
    assert (finding.severity, "0000:02:00.0" in finding.summary) == (Severity.WARNING, True)
    check, _ = ask_pcie(*[pci_device(f"0000:0{n}:00.0", width=8) for n in range(3)], virtual_machine=True)
    assert check.outcome is Outcome.PASSED


def test_a_gpu_that_is_slower_than_its_model_is_reported():
    gpus = [
        pci_device(f"0000:0{n}:00.0", upstream=(PORT,), speed_gt_s=speed) for n, speed in enumerate((32, 32, 32, 2.5))
    ]
    _, (finding,) = ask_pcie(bridge(PORT), *gpus)
    assert (finding.severity, "0000:03:00.0" in finding.summary) == (Severity.INFO, True)


def test_gpus_that_all_idle_pass():
    gpus = [pci_device(f"0000:0{n}:00.0", upstream=(PORT,), speed_gt_s=2.5) for n in range(4)]
    assert ask_pcie(bridge(PORT), *gpus)[0].outcome is Outcome.PASSED


def card(**changes):
    return (bridge(PORT), nic("0000:18:00.0", upstream=(PORT,), **changes))


CARDS = rdma(hca(0, bus_id="0000:18:00.0"))


def test_a_card_at_an_old_speed_is_a_warning():
    _, (finding,) = ask_pcie(*card(speed_gt_s=8.0), cards=CARDS)
    assert finding.severity is Severity.WARNING
    assert finding.summary == "The PCIe link of network card 0000:18:00.0 runs at 8 of 32 GT/s"


def test_a_card_in_a_slot_of_an_older_generation_passes():
    slot = bridge(PORT, speed_gt_s=16.0, max_speed_gt_s=16.0)
    check, _ = ask_pcie(slot, nic("0000:18:00.0", upstream=(PORT,), speed_gt_s=16.0), cards=CARDS)
    assert check.outcome is Outcome.PASSED


def test_a_card_with_half_of_its_lanes_is_an_error():
    _, (finding,) = ask_pcie(*card(width=8), cards=CARDS)
    assert finding.severity is Severity.ERROR


def switch(**uplink):
    """Return root port, switch with one upstream and one downstream port, and a GPU below."""
    return (
        bridge("0000:15:01.0"),
        bridge("0000:16:00.0", upstream=("0000:15:01.0",), **uplink),
        bridge("0000:17:00.0", upstream=("0000:16:00.0", "0000:15:01.0")),
        pci_device("0000:1b:00.0", upstream=("0000:17:00.0", "0000:16:00.0", "0000:15:01.0")),
    )


def test_the_way_above_a_switch_counts_too():
    _, (finding,) = ask_pcie(*switch(width=4))
    assert finding.summary.startswith("The PCIe link of bridge 0000:16:00.0 above GPU 0000:1b:00.0")
    assert "4 of 16 lanes: transfers take 4 times as long" in finding.summary


def test_and_so_does_its_speed():
    _, (finding,) = ask_pcie(*switch(speed_gt_s=16.0))
    assert (finding.severity, "16 of 32 GT/s" in finding.summary) == (Severity.WARNING, True)


def test_but_not_above_a_gpu_that_sleeps():
    devices = switch(speed_gt_s=2.5)
    asleep = pci_device("0000:1b:00.0", upstream=devices[-1].upstream, speed_gt_s=2.5)
    assert ask_pcie(*devices[:-1], asleep)[0].outcome is Outcome.PASSED


ROOT, UP, LEFT, RIGHT = "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:17:02.0"


def below_switch(*, left=False, right=False, root=False):
    """Return a card at the left port of a switch and a GPU at the right one."""
    return (
        bridge(ROOT, acs_redirect=root),
        bridge(UP, upstream=(ROOT,)),
        bridge(LEFT, upstream=(UP, ROOT), acs_redirect=left),
        bridge(RIGHT, upstream=(UP, ROOT), acs_redirect=right),
        nic("0000:18:00.0", upstream=(LEFT, UP, ROOT)),
        pci_device("0000:1b:00.0", upstream=(RIGHT, UP, ROOT)),
    )


def in_own_slots(*, redirect):
    return tuple(
        one
        for n in range(2)
        for one in (
            bridge(f"0000:00:0{n}.0", acs_redirect=redirect),
            pci_device(f"0000:0{n + 1}:00.0", upstream=(f"0000:00:0{n}.0",)),
        )
    )


def ask_acs(*devices, cards=CARDS, trial=None, **changes):
    sections = {"pci": pci(*devices, **changes), "rdma": cards}
    return ask("acs-iommu", node(**sections, **({"gpu_trial": trial} if trial else {})))


def test_a_way_without_detours_passes():
    check, findings = ask_acs(*below_switch())
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "no IOMMU is active; ACS does not redirect between peers"


@pytest.mark.parametrize(("where", "bridges"), [({"left": True}, LEFT), ({"right": True}, RIGHT)])
def test_acs_in_a_switch_is_a_warning(where, bridges):
    _, (finding,) = ask_acs(*below_switch(**where))
    assert finding.severity is Severity.WARNING
    assert finding.summary.startswith("Access Control Services of 1 PCIe bridge send GPU peer traffic")
    assert f"for b in {bridges}; do setpci -s $b ECAP_ACS+6.w=0000; done" in finding.fix


def test_acs_where_the_way_leads_through_the_root_anyway_passes():
    assert ask_acs(*below_switch(root=True))[0].outcome is Outcome.PASSED
    assert ask_acs(*in_own_slots(redirect=True), cards=NO_RDMA)[0].outcome is Outcome.PASSED


def test_wrong_copies_make_it_an_error():
    copy = PeerCopy(source=0, target=1, ok=False, error="bytes differ", gb_s=None)
    _, (finding,) = ask_acs(*below_switch(right=True), trial=GpuTrial(work=(), copies=(copy,)))
    assert finding.severity is Severity.ERROR
    assert "copies between GPUs failed or came out wrong: 0 to 1" in finding.evidence


def test_an_iommu_that_translates_is_a_warning():
    _, (finding,) = ask_acs(*in_own_slots(redirect=False), cards=NO_RDMA, iommu=True)
    assert (finding.severity, "iommu=pt" in finding.fix) == (Severity.WARNING, True)


def test_an_iommu_that_passes_through_passes():
    check, _ = ask_acs(*below_switch(), iommu=True, iommu_passthrough=True)
    assert (check.outcome, check.seen.startswith("the IOMMU passes addresses through")) == (Outcome.PASSED, True)


@pytest.mark.parametrize(
    ("devices", "changes", "outcome"),
    [
        (below_switch(left=True, right=True), {"virtual_machine": True, "iommu": True}, Outcome.SKIPPED),
        ((), {"iommu": True}, Outcome.SKIPPED),
        (in_own_slots(redirect=True), {"iommu": True, "model": GEFORCE, "cards": NO_RDMA}, Outcome.PASSED),
        (in_own_slots(redirect=True)[:2], {"iommu": True, "cards": NO_RDMA}, Outcome.PASSED),
        (in_own_slots(redirect=True)[:2], {"iommu": True, "cards": rdma(roce(0, rate=25.0))}, Outcome.PASSED),
        (below_switch(left=None, right=None), {}, Outcome.SKIPPED),
    ],
    ids=["a guest", "no GPU", "desktop", "one GPU alone", "an everyday card", "not root"],
)
def test_machines_that_it_does_not_concern(devices, changes, outcome):
    check, findings = ask_acs(*devices, **changes)
    assert (check.outcome, findings) == (outcome, ())


NEAR, FAR = (0, 1, 2, 3), (4, 5, 6, 7)
TWO = (pci_device("0000:00:00.0", local_cpus=NEAR), pci_device("0000:01:00.0", local_cpus=FAR, numa_node=1))


def ask_numa(*ranks, devices=TWO, seen=None, **changes):
    sections = {"pci": pci(*devices, **changes), "gpus": gpus(2) if seen is None else seen}
    return ask("numa", node(processes=ranks, **sections))


def test_ranks_near_their_gpus_pass():
    check, findings = ask_numa(process(0, cpus=NEAR), process(1, cpus=FAR))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == (
        "2 of 2 ranks may run near their GPU; NUMA nodes of GPUs: 0000:00:00.0 on 0, 0000:01:00.0 on 1"
    )


def test_a_rank_far_from_its_gpu_is_a_warning():
    _, (finding,) = ask_numa(process(0, cpus=NEAR), process(1, cpus=NEAR))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (1,))
    assert finding.summary == "Rank 1 can only run on CPUs of another NUMA node than its GPU"
    assert finding.evidence == ("rank 1: CPUs 0-3; GPU 0000:01:00.0 is near CPUs 4-7",)
    assert "numactl --cpunodebind=1 --membind=1 in front of rank 1" in finding.fix


@pytest.mark.parametrize(
    ("ranks", "who", "front"),
    [
        ((process(None, local_rank=1, pid=7, cpus=NEAR),), "Process 7 can only run", "in front of process 7"),
        (
            (process(0, cpus=FAR), process(None, local_rank=1, pid=7, cpus=NEAR)),
            "Rank 0 and process 7 can only run", "in front of rank 0",
        ),
        ((process(0, cpus=FAR), process(1, cpus=NEAR)), "Ranks 0 and 1 can only run", "in front of rank 0"),
    ],
)  # fmt: skip
def test_a_process_without_a_rank_is_named_by_its_number(ranks, who, front):
    _, (finding,) = ask_numa(*ranks)
    assert finding.summary.startswith(who)
    assert finding.fix.endswith(front)
    assert "None" not in str(finding.evidence)


@pytest.mark.parametrize(
    "rank",
    [
        process(1, cpus=(*NEAR, *FAR)),
        process(1, cpus=NEAR, CUDA_VISIBLE_DEVICES="1,0"),
        process(1, cpus=FAR, CUDA_VISIBLE_DEVICES="1"),
        process(1, cpus=NEAR, CUDA_VISIBLE_DEVICES="GPU-0"),
        process(2, cpus=NEAR),
        process(cpus=NEAR),
    ],
    ids=["anywhere", "swapped", "its own alone", "by UUID", "more ranks than GPUs", "no rank"],
)
def test_ranks_whose_gpu_is_another_or_not_known(rank):
    assert ask_numa(rank)[0].outcome is Outcome.PASSED


def test_without_nvml_gpus_count_by_bus_id():
    _, (finding,) = ask_numa(process(1, cpus=NEAR), seen=gpus(0))
    assert finding.ranks == (1,)


def test_gpus_that_are_nowhere_are_a_warning_on_two_sockets():
    lost = [pci_device(f"0000:0{n}:00.0", numa_node=None, local_cpus=(*NEAR, *FAR)) for n in range(2)]
    _, (finding,) = ask_numa(devices=lost)
    assert finding.severity is Severity.WARNING
    assert finding.summary.startswith("The machine does not report on which of its 2 NUMA nodes 2 GPUs are")


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"numa_nodes": 1}, Outcome.SKIPPED),
        ({"virtual_machine": True}, Outcome.PASSED),
        ({"devices": ()}, Outcome.SKIPPED),
    ],
)
def test_machines_of_one_node_and_guests(changes, outcome):
    lost = [pci_device("0000:00:00.0", numa_node=None, local_cpus=())]
    check, _ = ask_numa(**{"devices": lost, **changes})
    assert check.outcome is outcome
