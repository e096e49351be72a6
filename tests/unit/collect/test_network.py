"""Interfaces, routes, ports, RDMA and PCI: what recorded machines do not show whole in test_recorded.py."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.collect.kernel import parse_acs, parse_speed, read_pci
from ddpdoctor.collect.limits import parse_cpu_list
from ddpdoctor.collect.network import BETWEEN_READS_S, read_network, read_rdma
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.reading import NotRead, Unread, Why
from tests.golden import Cases, words
from tests.machines import RecordedCalls, load_machine, shared_machine

CASES = Cases(__name__)
test_kept = CASES.test()
PLAN = ReadingPlan(sections=frozenset({"network"}))


def test_an_alias_and_a_file_among_the_interfaces(tmp_path):
    system = load_machine("workstation2", tmp_path)
    (tmp_path / "sys/class/net/bonding_masters").write_text("bond0\n")
    system.calls.answers["addresses enp10s0:1"] = "192.168.1.21/24"
    *_, alias = read_network(system, PLAN).interfaces
    assert (alias.name, alias.mtu, alias.running, alias.addresses) == ("enp10s0:1", 1500, True, ("192.168.1.21/24",))


def test_a_mac():
    answers = {
        "interface lo0": "up 16384 0", "interface en0": "up 1500 1000", "interface utun3": "down 1380 0",
        "addresses lo0": "127.0.0.1/8", "addresses en0": "192.168.1.7/24",
    }  # fmt: skip
    network = read_network(System(root=Path("/nowhere"), env={}, calls=RecordedCalls(answers=answers)), PLAN)
    assert [(one.name, one.running, one.loopback) for one in network.interfaces] == [
        ("lo0", True, True), ("en0", True, False), ("utun3", False, False),
    ]  # fmt: skip
    assert (network.default_interface, network.ipv6_disabled, network.local_ports) == (None, None, None)


def route_v6(prefix, metric, flags, name):
    return f"{prefix:032x} 00 {0:032x} 00 {0:032x} {metric:08x} 00000001 00000000 {flags:08x} {name}"


ROUTES = [
    (["eth1 00000000 0100000A 0003 0 0 200 00000000", "eth0 00000000 0100000A 0003 0 0 100 00000000"], [], "eth0"),
    (["eth0 0000000A 00000000 0001 0 0 0 00FFFFFF"], [], None),
    (["eth0 00000000 00000000 0201 0 0 0 00000000"], [], None),
    ([], [route_v6(0, 1024, 0x3, "eth0"), route_v6(0, 0xFFFFFFFF, 0x200201, "lo")], "eth0"), ([], [], None),
]  # fmt: skip


def test_where_the_default_route_goes(tmp_path):
    system = load_machine("container-nogpu", tmp_path)
    for v4, v6, name in ROUTES:
        (tmp_path / "proc/net/route").write_text("\n".join(["Iface Destination", *v4]))
        (tmp_path / "proc/net/ipv6_route").write_text("\n".join(v6))
        assert read_network(system, PLAN).default_interface == name


PORT = {"MASTER_PORT": "29500"}
TAKEN = "98 Address already in use"


NOT_TRIED = [
    {}, {"MASTER_PORT": "none"}, {"MASTER_PORT": "70000"}, PORT | {"TORCHELASTIC_RUN_ID": "none"}, PORT | {"RANK": "1"},
    PORT | {"SLURM_PROCID": "3", "MASTER_ADDR": "dgx01"}, PORT | {"MASTER_ADDR": "10.0.0.12"},
]  # fmt: skip
TRIED = [{}, {"RANK": "0"}, {"MASTER_ADDR": "dgx01"}, {"MASTER_ADDR": "localhost"}, {"NODE_RANK": "0"}]
AT_ALL = {"bind 29500 plain": TAKEN, "bind 29500 reuse": TAKEN}
NOT_FREE = {
    "a process of ours has it": (AT_ALL, "tcp", "0A 0:0 0:0 0 1000 0 4242 1"),
    "one of another user has it": (AT_ALL, "tcp6", "0A 0:0 0:0 0 1001 0 5 1"),
    "it is left over": ({"bind 29500 plain": TAKEN}, "tcp", "06 0:0 0:0 0 0 0 0 1"),
    "it is not allowed": ({"bind 29500 plain": "13 Permission denied"}, "tcp", ""),
}  # fmt: skip


@CASES
def ports_that_are_tried_or_not_and_who_listens_on_one(tmp_path):
    told = {}
    for env in (*NOT_TRIED, *(PORT | one for one in TRIED)):
        system = shared_machine("nvlink8", env=env)
        system.calls.answers["resolve 10.0.0.12"] = "10.0.0.12"
        told[" ".join(f"{name}={value}" for name, value in env.items())] = read_network(system, PLAN).master_port
    system = load_machine("nvlink8", tmp_path, env=PORT)
    system.path("/proc/77/fd").mkdir(parents=True)
    system.path("/proc/77/fd/3").symlink_to("socket:[4242]")
    system.path("/proc/77/cmdline").write_text("/usr/bin/python\0train.py\0--token=abc\0")
    tables = {table: system.path(f"/proc/net/{table}") for table in ("tcp", "tcp6")}
    for name, (errors, table, line) in NOT_FREE.items():
        for one, path in tables.items():
            path.write_text("  sl local\n" + f"  0: 00000000:733C 00000000:0000 {line}\n" * (one == table))
        found = replace(system, calls=replace(system.calls, errors=system.calls.errors | errors))
        told[name] = read_network(found, PLAN).master_port
    return told


def test_a_real_port_and_its_real_owner():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = read_network(System(env={"MASTER_PORT": str(port)}), PLAN).master_port
    assert found == Unread(why=Why.NEEDLESS, reason="this command listens on it, to collect the facts of all nodes")


PLAN_RDMA = ReadingPlan(sections=frozenset({"rdma"}))


def at_once(_seconds):
    """Stand in for the wait between two looks: nothing changes in a recorded machine by itself."""


def test_counters_are_read_twice_and_nobody_waits_for_ports_that_are_down(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    waits = []

    def meanwhile(seconds):
        waits.append(seconds)
        system.path("/sys/class/infiniband/mlx5_2/ports/1/counters/link_downed").write_text("1\n")

    port = read_rdma(system, PLAN_RDMA, meanwhile).devices[2].ports[0]
    assert (port.counters["link_downed"], port.counters_later["link_downed"]) == (0, 1)
    down = shared_machine("nvlink8", "ib-no-manager")
    port = read_rdma(down, PLAN_RDMA, waits.append).devices[0].ports[0]
    assert (port.state, port.counters_later, waits) == ("INIT", {}, [BETWEEN_READS_S])


def test_dmabuf_by_kernel():
    system = shared_machine("nvlink8")
    kernels = {
        "5.12.0": True,
        "5.4.0-190-generic": False,
        "4.18.0-553.el8_10.x86_64": None,
        "5.14.0-503.el9": True,
        "x": None,
    }
    for kernel, dmabuf in kernels.items():
        system.calls.answers["kernel"] = kernel
        assert read_rdma(system, PLAN_RDMA, at_once).dmabuf is dmabuf


def test_a_legacy_peer_module_counts_and_rates_are_read(tmp_path):
    system = load_machine("nvlink8", tmp_path, "no-peermem")
    system.path("/sys/kernel/mm/memory_peers/nv_mem").mkdir(parents=True)
    for number, text in enumerate(("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "", "unknown")):
        system.path(f"/sys/class/infiniband/mlx5_{number}/ports/1/rate").write_text(text)
    rdma = read_rdma(system, PLAN_RDMA, at_once)
    assert rdma.peermem
    assert [one.ports[0].rate_gb_s for one in rdma.devices[:4]] == [400.0, 2.5, None, None]


MAY_LOCK = {
    "root": ("000001ffffffffff", "         0          0 4294967295", True),
    "root of a user namespace": ("000001ffffffffff", "         0       1000          1", False),
    "user": ("0000000000000000", "         0          0 4294967295", False),
    "Docker's own set": ("00000000a80425fb", "         0          0 4294967295", False),
}


def test_the_capability_to_lock_memory_a_virtual_function_and_a_device_without_pci(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    system.path("/proc/self").mkdir(parents=True, exist_ok=True)
    for effective, users, may in MAY_LOCK.values():
        system.path("/proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{effective}\n")
        system.path("/proc/self/uid_map").write_text(users)
        assert read_rdma(system, PLAN_RDMA, at_once).ipc_lock is may
    system.path("/proc/self/status").unlink()
    assert read_rdma(system, PLAN_RDMA, at_once).ipc_lock is None
    system.path("/sys/class/infiniband/mlx5_0/device/physfn").symlink_to("..")
    system.path("/sys/class/infiniband/rxe0/ports/1").mkdir(parents=True)
    devices = {device.name: device for device in read_rdma(system, PLAN_RDMA, at_once).devices}
    assert devices["mlx5_0"].virtual_function
    assert (devices["rxe0"].bus_id, devices["rxe0"].ports[0].link_layer) == (None, "Unspecified")


PLAN_PCI = ReadingPlan(sections=frozenset({"pci"}))
ACS = b"\x0d\x00\x01\x00\x5f\x00"


FIRMWARE = [
    ("Standard PC (Q35 + ICH9, 2009)", "QEMU", True), ("Virtual Machine", "Microsoft Corporation", True),
    ("Surface Laptop", "Microsoft Corporation", False), ("g5g.metal", "Amazon EC2", False),
    ("g5g.xlarge", "Amazon EC2", True), ("", "", False),
]  # fmt: skip


def test_where_the_processor_has_no_flags_firmware_is_asked(tmp_path):
    system = load_machine("container-nogpu", tmp_path)
    system.path("/proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    for product, vendor, virtual in FIRMWARE:
        system.path("/sys/class/dmi/id/product_name").write_text(product)
        system.path("/sys/class/dmi/id/sys_vendor").write_text(vendor)
        assert read_pci(system, PLAN_PCI).virtual_machine is virtual


def test_a_system_without_pci_and_an_iommu_of_arm_that_is_not_meant(tmp_path):
    with pytest.raises(NotRead) as caught:
        read_pci(System(root=tmp_path), PLAN_PCI)
    assert caught.value.unread.why is Why.ABSENT
    system = load_machine("container-nogpu", tmp_path)
    system.path("/sys/class/iommu/smmu3.0x0000000011a00000").mkdir()
    assert not read_pci(system, PLAN_PCI).iommu


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs is of Linux")
def test_this_machine_can_be_read():
    system = System(env={})
    assert any(one.loopback and one.running for one in read_network(system, PLAN).interfaces)
    for read, plan in ((read_pci, PLAN_PCI), (read_rdma, PLAN_RDMA)):
        try:
            assert read(system, plan).devices
        except NotRead as missing:
            assert missing.unread.why is Why.ABSENT  # noqa: PT017 - either answer is right


CONFIGS = {
    "not root": (bytes(64), None), "nothing": (b"", None), "no extended space": (bytes(256), False),
    "no capability": (bytes(4096), False), "asleep": (b"\xff" * 4096, False),
    "on": (bytes(0x100) + ACS + b"\x1d\x00" + bytes(100), True),
    "validates": (bytes(0x100) + ACS + b"\x01\x00" + bytes(100), False),
    "a ring": (bytes(0x100) + b"\x01\x00\x02\x10" + bytes(0x100), False),
    "second": (bytes(0x100) + b"\x01\x00\x02\x20" + bytes(0xFC) + ACS + b"\x0c\x00", True),
    "cut": (bytes(0x100) + b"\x01\x00\x02\xff", False),
}  # fmt: skip


def test_access_control_services():
    found = {name: parse_acs(config) for name, (config, _) in CONFIGS.items()}
    assert found == {name: redirects for name, (_, redirects) in CONFIGS.items()}


test_words = words(__name__, parse_speed=parse_speed, parse_cpu_list=parse_cpu_list)
