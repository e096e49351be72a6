import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.gpus import GpuTrial, PeerCopy
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.link_facts import GEFORCE, NO_RDMA, bridge, hca, nic, pci, pci_device, rdma, roce
from tests.rules.environment.machine_facts import gpus

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


CARDS = rdma(hca(0, bus_id="0000:18:00.0"))


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
