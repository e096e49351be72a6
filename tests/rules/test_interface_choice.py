import pytest

from ddpdoctor.rules.interface_choice import best_interface, choose, is_bridge, is_tunnel
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
