import pytest

from ddpdoctor.model.node import ConfFile, FirewallChain
from ddpdoctor.rules.firewall_opening import open_ports
from ddpdoctor.rules.interface_choice import best_interface, choose, is_bridge, is_ignored, is_tunnel, parse_gloo_names
from ddpdoctor.rules.nccl_list import parse_nccl_list
from ddpdoctor.rules.settings import find_setting
from tests.rules.environment.build import node, process
from tests.rules.environment.network import interface, names, network

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


@pytest.mark.parametrize(
    "name", ["docker0", "docker_gwbridge", "br-0123456789ab", "cni0", "flannel.1", "cali12ab", "veth1"]
)
def test_bridges_to_containers(name):
    assert is_bridge(name)


@pytest.mark.parametrize("name", ["eth0", "br0", "br-ex", "vmbr0", "bond0", "ib0", "enp1s0", "vlan10", "wlan0"])
def test_other_interfaces(name):
    assert not is_bridge(name)
    assert not is_tunnel(name)


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


def test_a_device_is_named_by_its_whole_name_alone():
    assert parse_nccl_list("mlx5_1,mlx4").names("mlx5_1")
    assert not parse_nccl_list("mlx5_1").names("mlx5_10")
    assert not parse_nccl_list("^mlx5_1").names("mlx5_1")


def test_entries_read_as_they_were_written():
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


@pytest.mark.parametrize(
    ("text", "stray"),
    [("^docker0,^lo", ("^lo",)), ("=eth0,=eth1", ("=eth1",)), ("^docker,lo", ()), ("eth0", ()), ("^^lo", ("^lo",))],
)
def test_marks_count_once(text, stray):
    assert parse_nccl_list(text).marked == stray


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("eth0", ("eth0",)),
        ("eth0,eth1", ("eth0", "eth1")),
        ("eth0, eth1", ("eth0", " eth1")),
        ("eth0,", ("eth0",)),
        ("eth0,,lo", ("eth0", "", "lo")),
        ("^docker", ("^docker",)),
    ],
)
def test_what_gloo_takes_of_a_list(text, names):
    assert parse_gloo_names(text) == names


@pytest.mark.parametrize(("text", "ignored"), [("", True), ("e", True), ("^", True), ("lo", False)])
def test_what_both_ignore(text, ignored):
    assert is_ignored(text) is ignored


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


def test_the_environment_wins_over_files():
    found = find(conf("mlx5_1"), NCCL_IB_HCA="mlx5_0")
    assert (str(found), found.removal) == ("NCCL_IB_HCA=mlx5_0", "unset NCCL_IB_HCA")


def test_a_file_counts_where_the_environment_says_nothing():
    found = find(conf("mlx5_1"))
    assert str(found) == "NCCL_IB_HCA=mlx5_1 in /etc/nccl.conf"
    assert found.removal == "remove NCCL_IB_HCA from /etc/nccl.conf"


def test_a_file_that_another_hides_does_not_count():
    assert find(conf("mlx5_1", by_file=(NAME,)), conf("mlx5_2", path="/root/.nccl.conf")).value == "mlx5_2"


def test_unset_and_empty_are_the_same():
    assert find() is None
    assert find(conf("mlx5_1", by_env=(NAME,)), NCCL_IB_HCA="") is None


def test_numbers_read_as_c_reads_them():
    assert find(NCCL_IB_HCA="0x3").number == 3
    assert [find(NCCL_IB_HCA=value).number for value in ("010", "16 # x", "1abc", "-1", "0")] == [8, 16, 1, -1, 0]
    assert find(NCCL_IB_HCA="three").number is None
