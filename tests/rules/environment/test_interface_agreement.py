import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.links import Rdma, RdmaDevice, RdmaPort
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, fleet, node, process
from tests.rules.environment.network import interface, lookup, names, network

NO_RDMA = Unread(why=Why.ABSENT, reason="there is no RDMA device")


def machine(n, *interfaces, own=None, rdma=NO_RDMA, master=None, ipv6_disabled=False, **variables):
    return node(
        f"node{n}",
        index=n,
        names=names(*(own or (f"10.0.0.{n}",)), hostname=f"node{n}", master=master),
        network=network(*(interfaces or (interface("eth0", f"10.0.0.{n}/24"),)), ipv6_disabled=ipv6_disabled),
        conf_files=(),
        rdma=rdma,
        processes=(process(n, **variables),),
    )


def several(*nodes):
    return fleet(*nodes, launcher=Launcher.TORCHRUN, nnodes=len(nodes))


def active_rdma():
    port = RdmaPort(
        device="mlx5_0", port=1, state="ACTIVE", phys_state="LinkUp", link_layer="InfiniBand", rate_gb_s=400.0, gids=(),
        counters={}, counters_later={},
    )  # fmt: skip
    device = RdmaDevice(name="mlx5_0", bus_id=None, board=None, firmware=None, ports=(port,))
    return Rdma(devices=(device,), peermem=True, dmabuf=None, uverbs=(), uverbs_denied=(), rdma_cm=True)


def eth0(n, **more):
    return interface("eth0", f"10.0.0.{n}/24", **more)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param((machine(1), machine(2)), id="one network"),
        pytest.param(
            (machine(1), machine(2, interface("eth0", "10.7.0.2/24"), own=("10.7.0.2",))), id="routed networks"
        ),
        pytest.param((machine(1), machine(2, eth0(2), interface("docker0", "172.17.0.1/16"))), id="docker beside eth0"),
        pytest.param((machine(1), machine(2, own=("127.0.1.1",))), id="the host name is another check's"),
        pytest.param(
            (machine(1), machine(2, interface("br0", "10.0.0.2/24", virtual=True))), id="a bridge around a real card"
        ),
        pytest.param(
            tuple(machine(n, interface("enp1s0", f"169.254.0.{n}/16"), own=(f"169.254.0.{n}",)) for n in (1, 2)),
            id="a cable between two hosts",
        ),
        pytest.param(
            (machine(1), machine(2, eth0(2), interface("cni0", "10.42.0.1/24", virtual=True), rdma=active_rdma())),
            id="data go over InfiniBand",
        ),
    ],
)
def test_interfaces_agree(nodes):
    check, findings = ask("iface-agree", several(*nodes))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert "node1: Gloo would use" in check.seen


def test_one_node_has_nobody_to_agree_with():
    check, findings = ask("iface-agree", fleet(machine(1, interface("docker0", "172.17.0.1/16"))))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (machine(2, interface("docker0", "172.17.0.2/16")), "NCCL would use docker0 (172.17.0.2), a bridge"),
        (machine(2, interface("cni0", "10.42.0.1/24"), eth0(2)), "NCCL would use cni0 (10.42.0.1), a bridge"),
        (machine(2, interface("br-0123456789ab", "172.18.0.1/16"), eth0(2)), "NCCL would use br-0123456789ab"),
        (machine(2, eth0(2), NCCL_SOCKET_IFNAME="^docker0"), "NCCL would use lo (127.0.0.1), which is loopback"),
        (machine(2, eth0(2), GLOO_SOCKET_IFNAME="lo"), "Gloo would use lo (127.0.0.1), which is loopback"),
    ],
)
def test_an_interface_that_others_cannot_reach(odd, words):
    check, findings = ask("iface-agree", several(machine(1), odd))
    assert check.outcome is Outcome.FAILED
    (finding,) = [finding for finding in findings if words in finding.summary]
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node2",))
    assert finding.fix.startswith(f"export {'NCCL' if 'NCCL' in words else 'GLOO'}_SOCKET_IFNAME=")


def test_variables_alone_tell_of_several_nodes():
    facts = fleet(machine(1, eth0(1), NCCL_SOCKET_IFNAME="^docker0", PET_NNODES="2"))
    _, (finding,) = ask("iface-agree", facts)
    assert finding.fix == "export NCCL_SOCKET_IFNAME=eth0 on all nodes"


def test_a_tunnel_and_a_spare_bridge_are_warnings():
    facts = several(
        machine(1, interface("tailscale0", "100.64.0.1/32"), own=("10.0.0.1",)),
        machine(2, eth0(2), interface("flannel.1", "10.42.0.0/32")),
    )
    _, findings = ask("iface-agree", facts)
    assert [(finding.severity, finding.hosts) for finding in findings] == [
        (Severity.WARNING, ("node1",)),
        (Severity.WARNING, ("node2",)),
    ]
    assert "flannel.1 (10.42.0.0) for TCP data" in findings[1].summary


def test_one_address_on_two_hosts():
    same = interface("eth0", "192.168.122.10/24")
    facts = several(machine(1, same, own=("192.168.122.10",)), machine(2, same, own=("192.168.122.10",)), machine(3))
    _, findings = ask("iface-agree", facts)
    assert [finding.hosts for finding in findings] == [("node1", "node2")] * 2
    assert "192.168.122.10 on node1 and node2" in findings[0].summary


def test_a_link_local_address_among_real_ones():
    odd = machine(2, interface("eth0", "169.254.7.7/16"), own=("169.254.7.7",))
    _, findings = ask("iface-agree", several(machine(1), odd, machine(3)))
    assert {finding.hosts for finding in findings} == {("node2",)}
    assert "link-local address on node2, but not on 2 others" in findings[0].summary


V6 = interface("eth0", "fd00::2/64")


@pytest.mark.parametrize(
    "nodes",
    [
        (machine(1), machine(2)),
        (machine(1, interface("eth0", "fd00::1/64"), own=("fd00::1",)), machine(2, V6, own=("fd00::2",))),
        (machine(1, interface("eth0", "10.0.0.1/24", "fd00::1/64")), machine(2)),
        (
            machine(1, master=lookup("m", "10.0.0.1", "fd00::1")),
            machine(2, master=lookup("m", "10.0.0.1")),
        ),
        (machine(1, ipv6_disabled=True), machine(2)),
    ],
)
def test_families_agree(nodes):
    check, findings = ask("v4v6", several(*nodes))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_families_differ():
    _, findings = ask("v4v6", several(machine(1), machine(2, V6, own=("fd00::2",)), machine(3)))
    assert [finding.summary for finding in findings] == [
        "NCCL would use IPv6 on node2, IPv4 on 2 others: they cannot connect to each other",
        "Gloo would use IPv6 on node2, IPv4 on 2 others: they cannot connect to each other",
    ]
    assert {(finding.severity, finding.hosts) for finding in findings} == {(Severity.WARNING, ("node2",))}


def test_the_family_that_is_set_for_nccl_has_no_address():
    _, (finding,) = ask("v4v6", fleet(machine(1, NCCL_SOCKET_FAMILY="AF_INET6")))
    assert finding.summary == "NCCL_SOCKET_FAMILY=AF_INET6: no interface of the node has an IPv6 address"
    assert finding.fix == "unset NCCL_SOCKET_FAMILY"


def test_the_master_has_another_family_for_some():
    facts = several(
        machine(1, master=lookup("m", "10.0.0.1")),
        machine(2, master=lookup("m", "fd00::1")),
        machine(3, master=lookup("m", "10.0.0.1")),
    )
    _, (finding,) = ask("v4v6", facts)
    assert finding.summary == "the master's name has IPv6 on node2, IPv4 on 2 others"


def test_the_master_has_a_family_that_is_switched_off():
    _, (finding,) = ask("v4v6", fleet(machine(1, master=lookup("m", "fd00::1"), ipv6_disabled=True)))
    assert "IPv6 is disabled" in finding.summary


@pytest.mark.parametrize(
    ("nodes", "outcome"),
    [
        ((machine(1), machine(2)), Outcome.PASSED),
        ((machine(1), machine(2, own=("127.0.1.1",))), Outcome.PASSED),
        ((machine(1),), Outcome.SKIPPED),
    ],
)
def test_mtu_agrees(nodes, outcome):
    check, findings = ask("mtu", several(*nodes))
    assert (check.outcome, findings) == (outcome, ())


def test_mtu_differs():
    facts = several(machine(1, eth0(1, mtu=9000)), machine(2, eth0(2)), machine(3, eth0(3, mtu=9000)))
    check, (finding,) = ask("mtu", facts)
    assert finding.summary == "MTU 1500 on node2, 9000 on 2 others: packets that are too large for a node are dropped"
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node2",))
    assert finding.fix == "ip link set dev eth0 mtu 9000 where it differs"
    assert check.seen == "eth0 9000, eth0 1500"


def test_mtu_without_majority_names_both():
    _, (finding,) = ask("mtu", several(machine(1, eth0(1, mtu=9000)), machine(2)))
    assert (finding.confidence, finding.hosts) == (Confidence.LOW, ("node1", "node2"))
    assert finding.fix == "ip link set dev eth0 mtu 1500 where it differs"
