import sys

import pytest

from ddpdoctor.collect.kernel import parse_acs, parse_cpu_list, parse_speed, read_pci
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import load_machine, shared_machine

PLAN = ReadingPlan(sections=frozenset({"pci"}))
ACS = b"\x0d\x00\x01\x00\x5f\x00"


def read(machine, *states):
    return read_pci(shared_machine(machine, *states), PLAN)


def device(pci, bus_id):
    return next(one for one in pci.devices if one.bus_id == bus_id)


def test_an_nvlink_machine():
    pci = read("nvlink8")
    gpus = [one for one in pci.devices if one.device_class == 0x030200]
    assert [gpu.bus_id[5:7] for gpu in gpus] == ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
    assert gpus[4].upstream == ("0000:99:02.0", "0000:98:00.0", "0000:97:01.0")
    assert (gpus[4].numa_node, gpus[4].local_cpus[0], len(gpus[4].local_cpus)) == (1, 56, 112)
    assert (gpus[4].width, gpus[4].max_width, gpus[4].speed_gt_s, gpus[4].max_speed_gt_s) == (16, 16, 32.0, 32.0)
    assert sum(one.device_class == 0x068000 for one in pci.devices) == 4
    assert (pci.iommu, pci.iommu_passthrough, pci.virtual_machine, pci.numa_nodes) == (True, True, False, 2)
    assert pci.models["0000:1b:00.0"] == "NVIDIA H100 80GB HBM3"
    bridge = device(pci, "0000:17:02.0")
    assert (bridge.acs_redirect, bridge.local_cpus, gpus[0].acs_redirect) == (False, (), None)


def test_a_desktop_with_its_gpus_asleep():
    pci = read("workstation2")
    gpu, port = device(pci, "0000:01:00.0"), device(pci, "0000:00:01.1")
    assert (gpu.width, gpu.max_width, port.max_width, gpu.numa_node) == (8, 16, 8, None)
    assert (gpu.speed_gt_s, gpu.max_speed_gt_s) == (2.5, 16.0)
    assert (pci.iommu, pci.iommu_passthrough, pci.numa_nodes) == (True, False, 1)
    assert "0000:01:00.1" not in [one.bus_id for one in pci.devices]


def test_a_container_of_a_cloud_machine():
    pci = read("container-nogpu")
    assert [one.bus_id for one in pci.devices] == ["0000:00:05.0"]
    assert (pci.virtual_machine, pci.iommu, pci.models) == (True, False, {})


@pytest.mark.parametrize(("state", "redirects"), [("acs", True), ("not-root", None)])
def test_acs_is_read_where_it_may_be(state, redirects):
    assert device(read("nvlink8", state), "0000:17:02.0").acs_redirect is redirects


def test_an_iommu_that_translates():
    pci = read("nvlink8", "iommu")
    assert (pci.iommu, pci.iommu_passthrough) == (True, False)


def test_an_iommu_of_arm_is_not_meant(tmp_path):
    system = load_machine("container-nogpu", tmp_path)
    system.path("/sys/class/iommu/smmu3.0x0000000011a00000").mkdir()
    assert not read_pci(system, PLAN).iommu


@pytest.mark.parametrize(
    ("product", "vendor", "virtual"),
    [
        ("Standard PC (Q35 + ICH9, 2009)", "QEMU", True),
        ("Virtual Machine", "Microsoft Corporation", True),
        ("Surface Laptop", "Microsoft Corporation", False),
        ("g5g.metal", "Amazon EC2", False),
        ("g5g.xlarge", "Amazon EC2", True),
        ("", "", False),
    ],
)
def test_where_the_processor_has_no_flags_firmware_is_asked(tmp_path, product, vendor, virtual):
    system = load_machine("container-nogpu", tmp_path)
    system.path("/proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    system.path("/sys/class/dmi/id/product_name").write_text(product)
    system.path("/sys/class/dmi/id/sys_vendor").write_text(vendor)
    assert read_pci(system, PLAN).virtual_machine is virtual


def test_a_system_without_pci(tmp_path):
    with pytest.raises(NotRead) as caught:
        read_pci(System(root=tmp_path), PLAN)
    assert caught.value.unread.why is Why.ABSENT


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs is of Linux")
def test_this_machine_can_be_read():
    system = System()
    try:
        pci = read_pci(system, PLAN)
    except NotRead as missing:
        assert system.names("/sys/bus/pci/devices") == (), missing.unread.reason  # noqa: PT017 - either answer is right
        return
    assert {one.bus_id for one in pci.devices} <= set(system.names("/sys/bus/pci/devices"))
    assert pci.numa_nodes >= 1


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("32.0 GT/s PCIe", 32.0),
        ("2.5 GT/s", 2.5),
        ("8 GT/s", 8.0),
        ("Unknown", None),
        ("Unknown speed", None),
        ("", None),
    ],
)
def test_speeds(text, speed):
    assert parse_speed(text) == speed


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,8,10-11", (0, 1, 2, 8, 10, 11)), ("7", (7,)), ("", ()), ("a-b", ()), ("1-", (1,))]
)
def test_cpu_lists(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("config", "redirects"),
    [
        (bytes(64), None),
        (b"", None),
        (bytes(256), False),
        (bytes(4096), False),
        (b"\xff" * 4096, False),
        (bytes(0x100) + ACS + b"\x1d\x00" + bytes(100), True),
        (bytes(0x100) + ACS + b"\x01\x00" + bytes(100), False),
        (bytes(0x100) + b"\x01\x00\x02\x10" + bytes(0x100), False),
        (bytes(0x100) + b"\x01\x00\x02\x20" + bytes(0xFC) + ACS + b"\x0c\x00", True),
        (bytes(0x100) + b"\x01\x00\x02\xff", False),
    ],
    ids=[
        "not root",
        "nothing",
        "no extended space",
        "no capability",
        "asleep",
        "on",
        "validates",
        "a ring",
        "second",
        "cut",
    ],
)
def test_access_control_services(config, redirects):
    assert parse_acs(config) is redirects
