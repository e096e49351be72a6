"""A collective that all ranks are in and that does not end: what is to be checked, and what the machine shows."""

from dataclasses import replace

import pytest

from ddpdoctor.model.facts import (
    Blocked,
    Connection,
    Connections,
    GroupState,
    ProcessCauses,
)
from ddpdoctor.model.node import ConfFile, FirewallChain
from ddpdoctor.rules.network import (
    best_interface,
    choose,
    find_setting,
    is_bridge,
    is_ignored,
    is_tunnel,
    open_ports,
    parse_gloo_names,
    parse_nccl_list,
)
from tests.golden import table
from tests.rules import build
from tests.rules.build import (
    C10D,
    in_call,
    job,
    line,
    phase,
    rank,
    sample,
    stack,
)
from tests.rules.environment.build import interface, names, network, node, process

LOST = Connection(local="10.0.0.4:4000", remote="10.0.0.4:5000", unsent_bytes=76, retries=4)


def connected(rank, end, *stalled):
    address = end.rpartition(":")[0]
    found = Connections(by_address=((address, 2),), ends=(end,), stalled=stalled)
    return replace(rank, causes=ProcessCauses(connections=found))


def over(backend, *ranks, **more):
    """A job in which all ranks are inside one collective of a backend."""
    reported = [
        replace(rank, groups=(GroupState(name="0", ranks=(0, 1), backend=backend, enqueued=7),), host=f"node{number}")
        for number, rank in enumerate(ranks or (in_call(0, world=2), in_call(1, world=2)))
    ]
    return job(*reported, **more)


def on_one_host(backend, *ranks, **more):
    found = over(backend, *ranks, **more)
    return replace(found, ranks=tuple(replace(rank, host="node0") for rank in found.ranks))


def on_machine(seen, **variables):
    """A job on one host of which this is the network, with these variables."""
    machine = node(processes=(process(**variables),), network=seen)
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000"), connected(in_call(1, world=2), "10.0.0.4:5000"))
    return on_one_host("gloo", *ranks, machine=machine)


# Ranks that connect to a store which nobody serves are to blame, at the line that gave its address.


ELSEWHERE = Connections(listening=("[::]:29500", "0.0.0.0:22"))
SLEEPS = Blocked(call="clock_nanosleep")


def connecting(number, store, connections=ELSEWHERE, blocked=SLEEPS, world=2, **more):
    causes = ProcessCauses(store=replace(store, rank=number), connections=connections, blocked=blocked, **more)
    return rank(
        number, world, initialized=False, open_calls=(phase("init_process_group", 6),), causes=causes,
        samples=(sample(stack(line(6), C10D)),),
    )  # fmt: skip


def in_init(number, world=2):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group", 6),))


ETH0 = interface("eth0", "10.0.0.4/24", "fd00::4/64")
ETH1 = interface("eth1", "10.1.0.4/24")
IB0 = interface("ib0", "10.2.0.4/24")
DOCKER0 = interface("docker0", "172.17.0.1/16", virtual=True)
VIRBR0 = interface("virbr0", "192.168.122.1/24", virtual=True)
V6_ONLY = interface("eth0", "fd00::4/64")
DOWN = interface("eth0", "10.0.0.4/24", up=False)


def chosen(*interfaces, own=("10.0.0.4",), **variables):
    net = network(*interfaces)
    facts = node(names=names(*own), network=net, conf_files=(), processes=(process(**variables),))
    return choose(facts, net)


@pytest.mark.parametrize(
    ("interfaces", "variables", "picks"),
    [
        ((ETH0, ETH1, DOCKER0), {}, "eth0 (10.0.0.4) eth1 (10.1.0.4)"),
        ((DOCKER0, ETH1), {}, "eth1 (10.1.0.4)"),
        ((ETH0, IB0), {}, "ib0 (10.2.0.4)"),
        ((VIRBR0, DOCKER0), {}, "docker0 (172.17.0.1)"),
        ((VIRBR0,), {}, "lo (127.0.0.1)"),
        ((DOWN, ETH1), {}, "eth1 (10.1.0.4)"),
        ((V6_ONLY, ETH1), {}, "eth1 (10.1.0.4) eth0 (fd00::4)"),
        ((ETH0, ETH1), {"NCCL_SOCKET_FAMILY": "AF_INET6"}, "eth0 (fd00::4)"),
        ((ETH0, ETH1), {"NCCL_SOCKET_FAMILY": "ipv6"}, "eth0 (10.0.0.4) eth1 (10.1.0.4)"),
        ((ETH0, ETH1), {"NCCL_SOCKET_IFNAME": "eth1"}, "eth1 (10.1.0.4)"),
        ((ETH0, ETH1), {"NCCL_SOCKET_IFNAME": "^docker0"}, "lo (127.0.0.1) eth0 (10.0.0.4) eth1 (10.1.0.4)"),
        ((ETH0, ETH1), {"NCCL_SOCKET_IFNAME": "x"}, "eth0 (10.0.0.4) eth1 (10.1.0.4)"),
        ((ETH0, ETH1), {"NCCL_SOCKET_IFNAME": "eno"}, ""),
        ((ETH0, ETH1), {"NCCL_COMM_ID": "10.1.0.9:29500"}, "eth1 (10.1.0.4)"),
        ((ETH0, ETH1), {"NCCL_COMM_ID": "[fd00::9]:29500"}, "eth0 (fd00::4)"),
        ((ETH0, ETH1), {"NCCL_COMM_ID": "host:29500"}, "eth0 (10.0.0.4) eth1 (10.1.0.4)"),
        ((ETH0, IB0), {"NCCL_COMM_ID": "10.0.0.9:29500"}, "ib0 (10.2.0.4)"),
    ],
)
def test_what_nccl_takes(interfaces, variables, picks):
    assert " ".join(map(str, chosen(*interfaces, **variables).nccl)) == picks


def test_nccl_takes_sixteen_at_most():
    many = [interface(f"eth{n}", f"10.{n}.0.4/24") for n in range(20)]
    assert len(chosen(*many).nccl) == 16


@pytest.mark.parametrize(
    ("own", "variables", "picks"),
    [
        (("10.0.0.4",), {}, "eth0 (10.0.0.4)"),
        (("203.0.113.9", "10.1.0.4"), {}, "eth1 (10.1.0.4)"),
        (("127.0.1.1", "10.0.0.4"), {}, "lo (127.0.1.1)"),
        (("fd00::4",), {}, "eth0 (fd00::4)"),
        (("::1",), {}, "lo (::1)"),
        (("203.0.113.9",), {}, "lo (127.0.0.1)"),
        ((), {}, "lo (127.0.0.1)"),
        (("10.0.0.4",), {"GLOO_SOCKET_IFNAME": "eth1"}, "eth1 (10.1.0.4)"),
        (("10.0.0.4",), {"GLOO_SOCKET_IFNAME": "eth1,eth0"}, "eth1 (10.1.0.4) eth0 (10.0.0.4)"),
        (("10.0.0.4",), {"GLOO_SOCKET_IFNAME": "eth1,eno1"}, ""),
        (("10.0.0.4",), {"GLOO_SOCKET_IFNAME": "e"}, "eth0 (10.0.0.4)"),
    ],
)
def test_what_gloo_takes(own, variables, picks):
    assert " ".join(map(str, chosen(ETH0, ETH1, own=own, **variables).gloo)) == picks


@pytest.mark.parametrize(
    ("net", "best"),
    [
        (network(ETH1, ETH0), "eth0"),
        (network(ETH1, ETH0, default=None), "eth1"),
        (network(DOCKER0, ETH1, default="docker0"), "eth1"),
        (network(interface("bond0", "10.0.0.4/24", virtual=True), default=None), "bond0"),
        (network(interface("tun0", "10.8.0.2/24", virtual=True), ETH1, default=None), "eth1"),
        (network(DOWN), None),
    ],
)
def test_the_best_interface(net, best):
    assert best_interface(net) == best


BRIDGES = ("docker0", "docker_gwbridge", "br-0123456789ab", "cni0", "flannel.1", "cali12ab", "veth1")
NO_BRIDGES = ("eth0", "br0", "br-ex", "vmbr0", "bond0", "ib0", "enp1s0", "vlan10", "wlan0")


def test_bridges_to_containers_and_other_interfaces():
    assert [name for name in (*BRIDGES, *NO_BRIDGES) if is_bridge(name)] == [*BRIDGES]
    assert not any(map(is_tunnel, NO_BRIDGES))


DEVICES = ("mlx5_0", "mlx5_1", "mlx5_10", "mlx4_0", "rdmap16s27")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", DEVICES),
        ("mlx5", ("mlx5_0", "mlx5_1", "mlx5_10")),
        ("mlx5_1", ("mlx5_1", "mlx5_10")),
        ("=mlx5_1", ("mlx5_1",)),
        ("=mlx5_1,mlx5_0", ("mlx5_0", "mlx5_1")),
        ("=mlx5_0,=mlx5_1", ("mlx5_0",)),
        ("^mlx5_1", ("mlx5_0", "mlx4_0", "rdmap16s27")),
        ("^=mlx5_1", ("mlx5_0", "mlx5_10", "mlx4_0", "rdmap16s27")),
        ("^", ()),
        ("=", DEVICES),
        (",mlx5_0,", ("mlx5_0",)),
        ("mlx5_0:1", ("mlx5_0",)),
        ("mlx5_0:2", ()),
        ("=mlx5_0::0:0", ("mlx5_0",)),
        ("=mlx5_0:1:0:1,mlx5_1:2", ("mlx5_0",)),
        ("mlx5_0:one", ()),
        (" mlx5_0", ()),
        ("MLX5_0", ()),
        ("^=", ()),
    ],
)
def test_ports_that_nccl_takes(text, taken):
    wanted = parse_nccl_list(text)
    assert tuple(device for device in DEVICES if wanted.takes(device, 1)) == taken


def test_a_device_is_named_by_its_whole_name_alone_and_entries_read_as_they_were_written():
    assert [parse_nccl_list(text).names("mlx5_1") for text in ("mlx5_1,mlx4", "mlx5_10", "^mlx5_1")] == [
        True,
        False,
        False,
    ]
    assert [str(token) for token in parse_nccl_list("^=mlx5_0,mlx5_1:2").entries] == ["mlx5_0", "mlx5_1:2"]


@pytest.mark.parametrize(
    ("text", "taken", "left"),
    [
        ("eth0", ["eth0", "eth01"], ["eth1", "lo"]),
        ("eth,ib", ["eth0", "ib3"], ["lo", "docker0"]),
        ("=eth0", ["eth0"], ["eth01", "eth"]),
        ("=eth0,eth1", ["eth0", "eth1"], ["eth11"]),
        ("^docker", ["eth0", "lo"], ["docker0", "docker_gwbridge"]),
        ("^docker,lo,virbr", ["eth0", "cni0", "flannel.1", "veth1", "tailscale0"], ["docker0", "lo", "virbr0"]),
        ("^=docker0", ["docker01", "eth0"], ["docker0"]),
        ("^docker0,^lo", ["lo", "eth0"], ["docker0"]),
        ("eth0:1", ["eth0", "eth0:1"], ["eth1"]),
        ("eth0,", ["eth0"], ["eth1"]),
        ("Eth0", [], ["eth0"]),
        ("^^lo", ["eth0", "lo"], []),
        ("==lo", [], ["lo", "lo0"]),
        ("", ["eth0", "lo"], []),
        (",", ["eth0"], []),
        ("^,", [], ["eth0"]),
    ],
)
def test_interfaces_that_nccl_takes(text, taken, left):
    wanted = parse_nccl_list(text)
    assert [wanted.takes(name) for name in (*taken, *left)] == [True] * len(taken) + [False] * len(left)


STRAY = {"^docker0,^lo": ("^lo",), "=eth0,=eth1": ("=eth1",), "^docker,lo": (), "eth0": (), "^^lo": ("^lo",)}
OF_GLOO = {
    "eth0": ("eth0",), "eth0,eth1": ("eth0", "eth1"), "eth0, eth1": ("eth0", " eth1"), "eth0,": ("eth0",),
    "eth0,,lo": ("eth0", "", "lo"), "^docker": ("^docker",),
}  # fmt: skip


def test_marks_count_once_gloo_takes_names_as_they_stand_and_both_ignore_a_letter():
    assert {text: parse_nccl_list(text).marked for text in STRAY} == STRAY
    assert {text: parse_gloo_names(text) for text in OF_GLOO} == OF_GLOO
    assert [text for text in ("", "e", "^", "lo") if is_ignored(text)] == ["", "e", "^"]


# Lines that open a packet filter: they are to be pasted, so they fit the addresses and the filter of the host.


V4, V6 = "10.0.0.11", "fd00:77::b"


def machine(*chains):
    refusing = tuple(FirewallChain(name=name, refusal="policy drop", accepts=()) for name in chains)
    return node("node0", network=network(interface("eth0", "10.0.0.10/24", "fd00:77::a/64"), firewall=refusing))


@pytest.mark.parametrize(
    ("chains", "source", "line"),
    [
        ((), V4, "iptables -I INPUT -p tcp -s 10.0.0.0/24 --dport 29500 -j ACCEPT"),
        ((), V6, "ip6tables -I INPUT -p tcp -s fd00:77::/64 --dport 29500 -j ACCEPT"),
        (("nft inet filter input",), V4, "nft insert rule inet filter input ip saddr 10.0.0.0/24 accept"),
        (("nft inet filter input",), V6, "nft insert rule inet filter input ip6 saddr fd00:77::/64 accept"),
        (("nft ip6 filter INPUT",), V4, "iptables -I INPUT -p tcp -s 10.0.0.0/24 --dport 29500 -j ACCEPT"),
        (
            ("iptables filter INPUT", "nft ip6 filter INPUT"),
            V6,
            "nft insert rule ip6 filter INPUT ip6 saddr fd00:77::/64 accept",
        ),
    ],
)
def test_the_line_fits_the_addresses(chains, source, line):
    assert open_ports(machine(*chains), (29500, 29500), (source,)) == line


NAME = "NCCL_IB_HCA"


def conf(value, *, path="/etc/nccl.conf", by_env=(), by_file=()):
    return ConfFile(path=path, variables={NAME: value}, hidden_by_env=by_env, hidden_by_file=by_file, bad_lines=())


def find(*files, **variables):
    one = process(**variables)
    return find_setting(node(processes=(one,), conf_files=files), one, NAME)


OF_ENV, IN_FILE = "unset NCCL_IB_HCA", "remove NCCL_IB_HCA from /etc/nccl.conf"
SECOND = conf("mlx5_2", path="/root/.nccl.conf")


@pytest.mark.parametrize(
    ("files", "variables", "found"),
    [
        ([conf("mlx5_1")], {NAME: "mlx5_0"}, ("NCCL_IB_HCA=mlx5_0", OF_ENV)),
        ([conf("mlx5_1")], {}, ("NCCL_IB_HCA=mlx5_1 in /etc/nccl.conf", IN_FILE)),
        ([conf("mlx5_1", by_file=(NAME,)), SECOND], {},
         ("NCCL_IB_HCA=mlx5_2 in /root/.nccl.conf", "remove NCCL_IB_HCA from /root/.nccl.conf")),
        ([], {}, None),
        ([conf("mlx5_1", by_env=(NAME,))], {NAME: ""}, None),
    ],
    ids=["the environment wins", "of a file", "another file hides it", "unset", "empty is unset"],
)  # fmt: skip
def test_where_a_setting_comes_from(files, variables, found):
    setting = find(*files, **variables)
    assert (setting and (str(setting), setting.removal)) == found


def test_numbers_read_as_c_reads_them():
    numbers = {"0x3": 3, "010": 8, "16 # x": 16, "1abc": 1, "-1": -1, "0": 0, "three": None}
    assert {text: find(NCCL_IB_HCA=text).number for text in numbers} == numbers


test_rows = table(
    "transport", "ddpdoctor.diagnose.job ddpdoctor.model.facts", vars(build), globals(), head=build.sureness
)
