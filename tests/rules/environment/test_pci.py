import pytest

from ddpdoctor.model.findings import Outcome, Severity
from tests.rules.environment.build import ask, node
from tests.rules.environment.link_facts import GEFORCE, NO_RDMA, bridge, hca, nic, pci, pci_device, rdma

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
    [
        in_slot(slot=8, width=8),
        in_slot(width=16, max_width=16, speed_gt_s=2.5),
        (pci_device("0000:00:03.0", width=8),),
    ],
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
