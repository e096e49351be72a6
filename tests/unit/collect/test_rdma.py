import pytest

from ddpdoctor.collect.rdma import BETWEEN_READS_S, read_rdma
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import load_machine, shared_machine

PLAN = ReadingPlan(sections=frozenset({"rdma"}))
IPV4 = "0000:0000:0000:0000:0000:ffff:0a10:0001"


def at_once(_seconds):
    """Stand in for the wait between two looks: nothing changes in a recorded machine by itself."""


def read(machine, *states, pause=at_once):
    return read_rdma(shared_machine(machine, *states), PLAN, pause)


def test_an_infiniband_machine():
    rdma = read("nvlink8")
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
    (port,) = read("roce8").devices[0].ports
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
        read(machine)
    assert (caught.value.unread.why, caught.value.unread.reason) == (Why.ABSENT, "there is no RDMA device")


def test_this_machine_can_be_read():
    try:
        rdma = read_rdma(System(), PLAN, at_once)
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

    port = read_rdma(system, PLAN, meanwhile).devices[2].ports[0]
    assert (port.counters["link_downed"], port.counters_later["link_downed"]) == (0, 1)
    assert waits == [BETWEEN_READS_S]


def test_nobody_waits_for_ports_that_are_down(tmp_path):
    system = load_machine("nvlink8", tmp_path, "ib-no-manager")
    waits = []
    port = read_rdma(system, PLAN, waits.append).devices[0].ports[0]
    assert (port.state, port.counters_later, waits) == ("INIT", {}, [])


def test_device_files_that_may_not_be_opened():
    rdma = read("nvlink8", "uverbs-denied")
    assert (rdma.uverbs, len(rdma.uverbs_denied)) == ((), 8)


def test_device_files_that_are_not_there():
    rdma = read("nvlink8", "uverbs-missing")
    assert (rdma.uverbs, rdma.uverbs_denied, rdma.rdma_cm) == ((), (), False)


def test_the_proprietary_driver_has_no_dmabuf():
    rdma = read("nvlink8", "no-peermem")
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
    assert read_rdma(system, PLAN, at_once).dmabuf is dmabuf


def test_a_legacy_peer_module_counts(tmp_path):
    system = load_machine("nvlink8", tmp_path, "no-peermem")
    system.path("/sys/kernel/mm/memory_peers/nv_mem").mkdir(parents=True)
    assert read_rdma(system, PLAN, at_once).peermem


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
    assert read_rdma(system, PLAN, at_once).ipc_lock is may


def test_a_virtual_function_and_a_device_without_pci(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    system.path("/sys/class/infiniband/mlx5_0/device/physfn").symlink_to("..")
    system.path("/sys/class/infiniband/rxe0/ports/1").mkdir(parents=True)
    devices = {device.name: device for device in read_rdma(system, PLAN, at_once).devices}
    assert devices["mlx5_0"].virtual_function
    assert (devices["rxe0"].bus_id, devices["rxe0"].ports[0].link_layer) == (None, "Unspecified")


@pytest.mark.parametrize(
    ("text", "rate"), [("400 Gb/sec (4X NDR)", 400.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", None), ("unknown", None)]
)
def test_rates(text, rate, tmp_path):
    system = load_machine("nvlink8", tmp_path)
    system.path("/sys/class/infiniband/mlx5_0/ports/1/rate").write_text(text)
    assert read_rdma(system, PLAN, at_once).devices[0].ports[0].rate_gb_s == rate
