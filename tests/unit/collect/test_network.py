import socket

import pytest

from ddpdoctor.collect.network import read_network
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.reading import Unread, Why
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
        (
            PORT | {"TORCHELASTIC_RUN_ID": "none"},
            "the store of this job listens on it",
        ),
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
