""""""

import socket
import sys

import pytest

from ddpdoctor.collect.kernel import parse_acs, parse_cpu_list, parse_speed, read_pci
from ddpdoctor.collect.network import read_network
from ddpdoctor.collect.rdma import BETWEEN_READS_S, read_rdma
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.reading import NotRead, Unread, Why
from tests.machines import RecordedCalls, load_machine, shared_machine

PLAN = ReadingPlan(sections=frozenset({"network"}))


def read(name, *states, **env):
    return read_network(shared_machine(name, *states, env=env), PLAN)


def test_an_infiniband_node():
    network = read("nvlink8")
    assert [one.name for one in network.interfaces] == ["lo", "eno1", *(f"ib{n}" for n in range(8))]
    lo, eno1, ib0, *_ = network.interfaces
    assert (lo.loopback, lo.virtual, lo.running, lo.addresses) == (True, True, True, ("127.0.0.1/8", "::1/128"))
    assert (eno1.virtual, eno1.speed_mb_s, eno1.mtu, eno1.carrier) == (False, 10000, 1500, True)
    assert (ib0.link_type, ib0.mtu, ib0.addresses[0]) == (32, 4092, "10.10.0.11/24")
    assert (network.default_interface, network.local_ports, network.ipv6_disabled) == ("eno1", (32768, 60999), False)


def test_a_desktop_with_docker():
    network = read("workstation2")
    docker0 = network.interfaces[-1]
    assert (docker0.name, docker0.up, docker0.running, docker0.virtual) == ("docker0", True, False, True)
    assert network.default_interface == "enp10s0"


def test_a_container():
    network = read("container-nogpu")
    assert [(one.name, one.virtual) for one in network.interfaces] == [("lo", True), ("eth0", True)]
    assert network.ipv6_disabled is True
    assert network.firewall == Unread(why=Why.ABSENT, reason="neither nft nor iptables-save is installed")


def test_without_root_the_packet_filter_is_denied():
    firewall = read("nvlink8").firewall
    assert firewall == Unread(why=Why.DENIED, reason="to list the packet filter's rules needs root")


def test_an_alias_and_a_file_among_the_interfaces(tmp_path):
    system = load_machine("workstation2", tmp_path)
    (tmp_path / "sys/class/net/bonding_masters").write_text("bond0\n")
    system.calls.answers["addresses enp10s0:1"] = "192.168.1.21/24"
    *_, alias = read_network(system, PLAN).interfaces
    assert (alias.name, alias.mtu, alias.running, alias.addresses) == ("enp10s0:1", 1500, True, ("192.168.1.21/24",))


def test_a_mac(tmp_path):
    answers = {
        "interface lo0": "up 16384 0",
        "interface en0": "up 1500 1000",
        "interface utun3": "down 1380 0",
        "addresses lo0": "127.0.0.1/8",
        "addresses en0": "192.168.1.7/24",
    }
    network = read_network(System(root=tmp_path, env={}, calls=RecordedCalls(answers=answers)), PLAN)
    assert [(one.name, one.running, one.loopback) for one in network.interfaces] == [
        ("lo0", True, True),
        ("en0", True, False),
        ("utun3", False, False),
    ]
    assert (network.default_interface, network.ipv6_disabled, network.local_ports) == (None, None, None)


def test_nothing_at_all(tmp_path):
    network = read_network(System(root=tmp_path, env={}, calls=RecordedCalls()), PLAN)
    assert network.interfaces == ()


def test_this_machine():
    network = read_network(System(env={}), PLAN)
    assert any(one.loopback and one.running for one in network.interfaces)


def route_v6(prefix, metric, flags, name):
    return f"{prefix:032x} 00 {0:032x} 00 {0:032x} {metric:08x} 00000001 00000000 {flags:08x} {name}"


@pytest.mark.parametrize(
    ("v4", "v6", "name"),
    [
        (["eth1 00000000 0100000A 0003 0 0 200 00000000", "eth0 00000000 0100000A 0003 0 0 100 00000000"], [], "eth0"),
        (["eth0 0000000A 00000000 0001 0 0 0 00FFFFFF"], [], None),
        (["eth0 00000000 00000000 0201 0 0 0 00000000"], [], None),
        ([], [route_v6(0, 1024, 0x3, "eth0"), route_v6(0, 0xFFFFFFFF, 0x200201, "lo")], "eth0"),
        ([], [], None),
    ],
)
def test_where_the_default_route_goes(tmp_path, v4, v6, name):
    system = load_machine("container-nogpu", tmp_path)
    (tmp_path / "proc/net/route").write_text("\n".join(["Iface Destination", *v4]))
    (tmp_path / "proc/net/ipv6_route").write_text("\n".join(v6))
    assert read_network(system, PLAN).default_interface == name


PORT = {"MASTER_PORT": "29500"}
TAKEN = "98 Address already in use"


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "none"}, "MASTER_PORT is not a port number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is not a port number"),
        (PORT | {"TORCHELASTIC_RUN_ID": "none"}, "the store of this job listens on it"),
        (PORT | {"RANK": "1"}, "the store would be on another host"),
        (PORT | {"SLURM_PROCID": "3", "MASTER_ADDR": "dgx01"}, "the store would be on another host"),
        (PORT | {"MASTER_ADDR": "10.0.0.12"}, "the store would be on another host"),
    ],
)
def test_a_port_that_is_not_tried(tmp_path, env, reason):
    system = load_machine("nvlink8", tmp_path, env=env)
    system.calls.answers["resolve 10.0.0.12"] = "10.0.0.12"
    assert read_network(system, PLAN).master_port.reason == reason


@pytest.mark.parametrize(
    "env", [{}, {"RANK": "0"}, {"MASTER_ADDR": "dgx01"}, {"MASTER_ADDR": "localhost"}, {"NODE_RANK": "0"}]
)
def test_a_port_that_is_tried(env):
    use = read("nvlink8", **PORT, **env).master_port
    assert (use.port, use.free, use.error, use.time_wait) == (29500, True, None, False)


def test_a_port_and_who_listens_on_it(tmp_path):
    system = load_machine("nvlink8", tmp_path, env=PORT)
    system.calls.errors |= {"bind 29500 plain": TAKEN, "bind 29500 reuse": TAKEN}
    for line, name in (("00000000:733C 00000000:0000 0A 0:0 0:0 0 1000 0 4242 1", "tcp"),):
        (tmp_path / f"proc/net/{name}").write_text(f"  sl local\n  0: {line}\n")
    descriptors = tmp_path / "proc/77/fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("socket:[4242]")
    (tmp_path / "proc/77/cmdline").write_text("/usr/bin/python\0train.py\0--token=abc\0")
    use = read_network(system, PLAN).master_port
    assert (use.free, use.error, use.owner_pid, use.owner) == (
        False,
        "Address already in use",
        77,
        "python train.py --token=***",
    )


def test_a_port_of_another_users_process(tmp_path):
    system = load_machine("nvlink8", tmp_path, env=PORT)
    system.calls.errors |= {"bind 29500 plain": TAKEN, "bind 29500 reuse": TAKEN}
    (tmp_path / "proc/net/tcp6").write_text("  sl\n  0: 00000000:733C 00000000:0000 0A 0:0 0:0 0 1001 0 4242 1\n")
    use = read_network(system, PLAN).master_port
    assert (use.owner_pid, use.owner) == (None, "a process of user 1001")


def test_a_port_in_time_wait(tmp_path):
    system = load_machine("nvlink8", tmp_path, env=PORT)
    system.calls.errors["bind 29500 plain"] = TAKEN
    (tmp_path / "proc/net/tcp").write_text("  sl\n  0: 00000000:733C 00000000:0000 06 0:0 0:0 0 0 0 0 1\n")
    use = read_network(system, PLAN).master_port
    assert (use.free, use.time_wait) == (True, True)


def test_a_port_that_may_not_be_bound(tmp_path):
    system = load_machine("nvlink8", tmp_path, env=PORT)
    system.calls.errors["bind 29500 plain"] = "13 Permission denied"
    use = read_network(system, PLAN).master_port
    assert (use.free, use.error) == (False, "Permission denied")


def test_a_real_port_and_its_real_owner():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = read_network(System(env={"MASTER_PORT": str(port)}), PLAN).master_port
    assert found == Unread(why=Why.NEEDLESS, reason="this command listens on it, to gather what all nodes have seen")


PLAN_RDMA = ReadingPlan(sections=frozenset({"rdma"}))
IPV4 = "0000:0000:0000:0000:0000:ffff:0a10:0001"


def at_once(_seconds):
    """Stand in for the wait between two looks: nothing changes in a recorded machine by itself."""


def rdma_of(machine, *states, pause=at_once):
    return read_rdma(shared_machine(machine, *states), PLAN_RDMA, pause)


def test_an_infiniband_machine():
    rdma = rdma_of("nvlink8")
    assert [device.name for device in rdma.devices] == [f"mlx5_{n}" for n in range(8)]
    device = rdma.devices[3]
    assert (device.bus_id, device.board, device.firmware) == ("0000:5e:00.0", "MT_0000000838", "28.43.2026")
    assert (device.uverbs, device.netdevs, device.virtual_function) == ("uverbs3", ("ib3",), False)
    (port,) = device.ports
    assert (port.port, port.state, port.phys_state, port.link_layer) == (1, "ACTIVE", "LinkUp", "InfiniBand")
    assert (port.rate_gb_s, port.rate_text) == (400.0, "400 Gb/sec (4X NDR)")
    assert port.counters["link_downed"] == 0
    assert [gid.index for gid in port.gids] == [0]
    assert rdma.uverbs == tuple(f"uverbs{n}" for n in range(8))
    assert (rdma.uverbs_denied, rdma.rdma_cm, rdma.peermem, rdma.dmabuf) == ((), True, True, True)


def test_a_roce_machine_has_addresses():
    (port,) = rdma_of("roce8").devices[0].ports
    assert [(gid.index, gid.type, gid.netdev) for gid in port.gids] == [
        (0, "IB/RoCE v1", "rdma0"),
        (1, "RoCE v2", "rdma0"),
        (2, "IB/RoCE v1", "rdma0"),
        (3, "RoCE v2", "rdma0"),
    ]
    assert port.gids[3].gid == IPV4


@pytest.mark.parametrize("machine", ["workstation2", "container-nogpu"])
def test_machines_without_rdma(machine):
    with pytest.raises(NotRead) as caught:
        rdma_of(machine)
    assert (caught.value.unread.why, caught.value.unread.reason) == (Why.ABSENT, "there is no RDMA device")


def test_this_machine_can_be_read():
    try:
        rdma = read_rdma(System(), PLAN_RDMA, at_once)
    except NotRead as missing:
        assert missing.unread.why is Why.ABSENT  # noqa: PT017 - either answer is right
    else:
        assert rdma.devices


def test_counters_are_read_twice(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    waits = []

    def meanwhile(seconds):
        waits.append(seconds)
        system.path("/sys/class/infiniband/mlx5_2/ports/1/counters/link_downed").write_text("1\n")

    port = read_rdma(system, PLAN_RDMA, meanwhile).devices[2].ports[0]
    assert (port.counters["link_downed"], port.counters_later["link_downed"]) == (0, 1)
    assert waits == [BETWEEN_READS_S]


def test_nobody_waits_for_ports_that_are_down(tmp_path):
    system = load_machine("nvlink8", tmp_path, "ib-no-manager")
    waits = []
    port = read_rdma(system, PLAN_RDMA, waits.append).devices[0].ports[0]
    assert (port.state, port.counters_later, waits) == ("INIT", {}, [])


def test_device_files_that_may_not_be_opened():
    rdma = rdma_of("nvlink8", "uverbs-denied")
    assert (rdma.uverbs, len(rdma.uverbs_denied)) == ((), 8)


def test_device_files_that_are_not_there():
    rdma = rdma_of("nvlink8", "uverbs-missing")
    assert (rdma.uverbs, rdma.uverbs_denied, rdma.rdma_cm) == ((), (), False)


def test_the_proprietary_driver_has_no_dmabuf():
    rdma = rdma_of("nvlink8", "no-peermem")
    assert (rdma.peermem, rdma.dmabuf) == (False, False)


@pytest.mark.parametrize(
    ("kernel", "dmabuf"),
    [
        ("5.12.0", True),
        ("5.4.0-190-generic", False),
        ("4.18.0-553.el8_10.x86_64", None),
        ("5.14.0-503.el9", True),
        ("x", None),
    ],
)
def test_dmabuf_by_kernel(tmp_path, kernel, dmabuf):
    system = load_machine("nvlink8", tmp_path)
    system.calls.answers["kernel"] = kernel
    assert read_rdma(system, PLAN_RDMA, at_once).dmabuf is dmabuf


def test_a_legacy_peer_module_counts(tmp_path):
    system = load_machine("nvlink8", tmp_path, "no-peermem")
    system.path("/sys/kernel/mm/memory_peers/nv_mem").mkdir(parents=True)
    assert read_rdma(system, PLAN_RDMA, at_once).peermem


@pytest.mark.parametrize(
    ("effective", "users", "may"),
    [
        ("000001ffffffffff", "         0          0 4294967295", True),
        ("000001ffffffffff", "         0       1000          1", False),
        ("0000000000000000", "         0          0 4294967295", False),
        ("00000000a80425fb", "         0          0 4294967295", False),
        (None, "", None),
    ],
    ids=["root", "root of a user namespace", "user", "Docker's own set", "not known"],
)
def test_the_capability_to_lock_memory(tmp_path, effective, users, may):
    system = load_machine("nvlink8", tmp_path)
    if effective is not None:
        system.path("/proc/self").mkdir(parents=True, exist_ok=True)
        system.path("/proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{effective}\n")
        system.path("/proc/self/uid_map").write_text(users)
    else:
        system.path("/proc/self/status").unlink(missing_ok=True)
    assert read_rdma(system, PLAN_RDMA, at_once).ipc_lock is may


def test_a_virtual_function_and_a_device_without_pci(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    system.path("/sys/class/infiniband/mlx5_0/device/physfn").symlink_to("..")
    system.path("/sys/class/infiniband/rxe0/ports/1").mkdir(parents=True)
    devices = {device.name: device for device in read_rdma(system, PLAN_RDMA, at_once).devices}
    assert devices["mlx5_0"].virtual_function
    assert (devices["rxe0"].bus_id, devices["rxe0"].ports[0].link_layer) == (None, "Unspecified")


@pytest.mark.parametrize(
    ("text", "rate"), [("400 Gb/sec (4X NDR)", 400.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", None), ("unknown", None)]
)
def test_rates(text, rate, tmp_path):
    system = load_machine("nvlink8", tmp_path)
    system.path("/sys/class/infiniband/mlx5_0/ports/1/rate").write_text(text)
    assert read_rdma(system, PLAN_RDMA, at_once).devices[0].ports[0].rate_gb_s == rate


PLAN_PCI = ReadingPlan(sections=frozenset({"pci"}))
ACS = b"\x0d\x00\x01\x00\x5f\x00"


def pci_of(machine, *states):
    return read_pci(shared_machine(machine, *states), PLAN_PCI)


def device(pci, bus_id):
    return next(one for one in pci.devices if one.bus_id == bus_id)


def test_an_nvlink_machine():
    pci = pci_of("nvlink8")
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
    pci = pci_of("workstation2")
    gpu, port = device(pci, "0000:01:00.0"), device(pci, "0000:00:01.1")
    assert (gpu.width, gpu.max_width, port.max_width, gpu.numa_node) == (8, 16, 8, None)
    assert (gpu.speed_gt_s, gpu.max_speed_gt_s) == (2.5, 16.0)
    assert (pci.iommu, pci.iommu_passthrough, pci.numa_nodes) == (True, False, 1)
    assert "0000:01:00.1" not in [one.bus_id for one in pci.devices]


def test_a_container_of_a_cloud_machine():
    pci = pci_of("container-nogpu")
    assert [one.bus_id for one in pci.devices] == ["0000:00:05.0"]
    assert (pci.virtual_machine, pci.iommu, pci.models) == (True, False, {})


@pytest.mark.parametrize(("state", "redirects"), [("acs", True), ("not-root", None)])
def test_acs_is_read_where_it_may_be(state, redirects):
    assert device(pci_of("nvlink8", state), "0000:17:02.0").acs_redirect is redirects


def test_an_iommu_that_translates():
    pci = pci_of("nvlink8", "iommu")
    assert (pci.iommu, pci.iommu_passthrough) == (True, False)


def test_an_iommu_of_arm_is_not_meant(tmp_path):
    system = load_machine("container-nogpu", tmp_path)
    system.path("/sys/class/iommu/smmu3.0x0000000011a00000").mkdir()
    assert not read_pci(system, PLAN_PCI).iommu


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
    assert read_pci(system, PLAN_PCI).virtual_machine is virtual


def test_a_system_without_pci(tmp_path):
    with pytest.raises(NotRead) as caught:
        read_pci(System(root=tmp_path), PLAN_PCI)
    assert caught.value.unread.why is Why.ABSENT


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs is of Linux")
def test_devices_of_this_machine_can_be_read():
    system = System()
    try:
        pci = read_pci(system, PLAN_PCI)
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
