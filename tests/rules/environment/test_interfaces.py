""""""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import ConfFile, Launcher, Rdma, RdmaDevice, RdmaPort
from ddpdoctor.model.reading import NOT_ASKED, Unread, Why
from tests.rules.environment.build import LO, ask, failed, fleet, interface, lookup, names, network, node, process
from tests.rules.environment.launches import TORCHRUN, changed
from tests.rules.environment.launches import lookup as looked_up
from tests.rules.environment.launches import names as names_of

ETH0 = interface("eth0", "10.0.0.4/24")
ETH1 = interface("eth1", "10.1.0.4/24")
DOCKER0 = interface("docker0", "172.17.0.1/16", virtual=True)
NO_SYSFS = Unread(why=Why.ABSENT, reason="there is no /sys/class/net")


def machine(*interfaces, own=("10.0.0.4",), conf=(), default="eth0", **variables):
    return node(
        names=names(*own),
        network=network(*interfaces, default=default),
        conf_files=conf,
        processes=(process(**variables),),
    )


def conf_file(**variables):
    return ConfFile(
        path="/etc/nccl.conf", variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=()
    )  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_SOCKET_IFNAME": "eth0"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "ib,eth"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "^=docker0,lo"},
        {"NCCL_SOCKET_IFNAME": "eth0:1"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0,docker0"},
        {"GLOO_SOCKET_IFNAME": "eth0,"},
        {"TP_SOCKET_IFNAME": "eth0"},
    ],
)
def test_names_that_are_there(variables):
    check, findings = ask("ifname-exists", machine(ETH0, DOCKER0, **variables))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    ((name, value),) = variables.items()
    assert check.seen == f"{name}={value}; there are lo, eth0, docker0"


@pytest.mark.parametrize(
    ("variables", "words", "fix"),
    [
        ({"NCCL_SOCKET_IFNAME": "eno1"}, "no interface has such a name", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "no interface has such a name", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"NCCL_SOCKET_IFNAME": "^e,lo,docker"}, "excludes every interface", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "^docker"}, "^ is NCCL syntax", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "= is NCCL syntax", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "eth is only a prefix of eth0", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0, docker0"}, "reads the space as part", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0,,docker0"}, "an empty name", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eno1"}, "there is no interface eno1", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"TP_SOCKET_IFNAME": "eth0,docker0"}, "one name, not a list", "export TP_SOCKET_IFNAME=eth0"),
        ({"TP_SOCKET_IFNAME": "eno1"}, "there is no interface eno1", "export TP_SOCKET_IFNAME=eth0"),
    ],
)
def test_names_that_are_not_there(variables, words, fix):
    check, (finding,) = ask("ifname-exists", machine(ETH0, DOCKER0, **variables))
    assert (check.outcome, finding.severity, finding.fix) == (Outcome.FAILED, Severity.ERROR, fix)
    assert words in finding.summary
    assert finding.evidence == ("interfaces: lo, eth0, docker0",)


def test_a_mark_in_the_middle_is_a_name_to_nccl():
    _, (finding,) = ask("ifname-exists", machine(ETH0, DOCKER0, NCCL_SOCKET_IFNAME="^docker0,^lo"))
    assert (finding.severity, finding.fix) == (Severity.WARNING, "export NCCL_SOCKET_IFNAME=^docker0,lo")
    assert "it currently matches: lo, eth0" in finding.evidence


@pytest.mark.parametrize(
    "variables", [{}, {"NCCL_SOCKET_IFNAME": "x"}, {"GLOO_SOCKET_IFNAME": ""}, {"GLOO_SOCKET_IFNAME": "^"}]
)
def test_nothing_is_named(variables):
    check, findings = ask("ifname-exists", machine(**variables))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


def test_a_name_from_a_file_of_nccl():
    check, (finding,) = ask("ifname-exists", machine(conf=(conf_file(NCCL_SOCKET_IFNAME="eno1"),)))
    assert finding.fix == "put NCCL_SOCKET_IFNAME=eth0 into /etc/nccl.conf"
    assert (finding.code, finding.kind, check.id) == ("DD115", "nccl-conf", "ifname-exists")
    assert check.seen.startswith("NCCL_SOCKET_IFNAME=eno1 in /etc/nccl.conf")


def test_the_environment_wins_over_a_file():
    facts = machine(conf=(conf_file(NCCL_SOCKET_IFNAME="eno1"),), NCCL_SOCKET_IFNAME="eth0")
    assert ask("ifname-exists", facts)[0].outcome is Outcome.PASSED


def test_one_rank_has_another_value():
    good, bad = process(0, NCCL_SOCKET_IFNAME="eth0"), process(1, NCCL_SOCKET_IFNAME="eno1")
    facts = node(names=names("10.0.0.4"), network=network(), conf_files=(), processes=(good, bad))
    _, (finding,) = ask("ifname-exists", facts)
    assert finding.ranks == (1,)


@pytest.mark.parametrize("kind", ["ifname-exists", "iface-up"])
def test_interfaces_that_were_not_read(kind):
    check, findings = ask(kind, node(names=names("10.0.0.4"), network=NO_SYSFS, conf_files=()))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, NO_SYSFS.reason, ())


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        (machine(), "Gloo would use eth0 (10.0.0.4), NCCL eth0 (10.0.0.4)"),
        (machine(ETH0, ETH1, NCCL_SOCKET_IFNAME="eth1"), "Gloo would use eth0 (10.0.0.4), NCCL eth1 (10.1.0.4)"),
        (machine(ETH0, ETH1, GLOO_SOCKET_IFNAME="eth1"), "Gloo would use eth1 (10.1.0.4), NCCL eth0 (10.0.0.4)"),
        (machine(own=("127.0.1.1",)), "Gloo would use lo (127.0.1.1), NCCL eth0 (10.0.0.4)"),
        (machine(own=()), "Gloo would use lo (127.0.0.1), NCCL eth0 (10.0.0.4)"),
        (machine(interface("eth0", up=False)), "Gloo would use lo (127.0.0.1), NCCL lo (127.0.0.1)"),
        (
            machine(ETH0, interface("eth1", up=False), NCCL_SOCKET_IFNAME="eth"),
            "Gloo would use eth0 (10.0.0.4), NCCL eth0 (10.0.0.4)",
        ),
    ],
)
def test_interfaces_in_use_are_up(facts, seen):
    check, findings = ask("iface-up", facts)
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, seen, ())


def test_without_names_the_choice_of_gloo_is_not_known():
    facts = node(names=NO_SYSFS, network=network(), conf_files=())
    assert ask("iface-up", facts)[0].seen == "it is unknown which interface Gloo would use, NCCL eth0 (10.0.0.4)"


DOWN = interface("eth1", "10.1.0.4/24", up=False, carrier=None)
NO_LINK = interface("eth1", "10.1.0.4/24", operstate="down", carrier=False)
BARE = interface("eth1")


@pytest.mark.parametrize(
    ("broken", "state"), [(DOWN, "which is down"), (NO_LINK, "which has no link"), (BARE, "which has no address")]
)
@pytest.mark.parametrize("library", ["NCCL", "GLOO"])
def test_an_interface_that_is_named_cannot_be_used(broken, state, library):
    check, (finding,) = ask("iface-up", machine(ETH0, broken, **{f"{library}_SOCKET_IFNAME": "eth1"}))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert finding.summary.endswith(f"would use eth1, {state}")
    assert finding.fix.endswith(f"or export {library}_SOCKET_IFNAME=eth0")
    assert finding.fix.startswith("ip link set dev eth1 up" if broken is DOWN else "ip address show dev eth1")


def test_one_of_several_that_are_set_for_nccl_is_a_warning():
    _, (finding,) = ask("iface-up", machine(ETH0, DOWN, NCCL_SOCKET_IFNAME="eth0,eth1"))
    assert finding.severity is Severity.WARNING


def test_the_host_name_leads_gloo_to_an_interface_that_is_down():
    _, (finding,) = ask("iface-up", machine(ETH0, NO_LINK, own=("10.1.0.4",)))
    assert finding.summary == "Gloo would use eth1, which has no link"
    assert finding.evidence == ("eth1: up, state down, no carrier, 10.1.0.4/24", "the host name's address is on it")


def test_loopback_alone_is_no_fault_of_this_check():
    facts = node(names=names("127.0.0.1"), network=network(LO, default=None), conf_files=())
    assert ask("iface-up", facts)[0].outcome is Outcome.PASSED


NO_RDMA = Unread(why=Why.ABSENT, reason="there is no RDMA device")


def connected(n, *interfaces, own=None, rdma=NO_RDMA, master=None, ipv6_disabled=False, **variables):
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
        pytest.param((connected(1), connected(2)), id="one network"),
        pytest.param(
            (connected(1), connected(2, interface("eth0", "10.7.0.2/24"), own=("10.7.0.2",))), id="routed networks"
        ),
        pytest.param(
            (connected(1), connected(2, eth0(2), interface("docker0", "172.17.0.1/16"))), id="docker beside eth0"
        ),
        pytest.param((connected(1), connected(2, own=("127.0.1.1",))), id="the host name is another check's"),
        pytest.param(
            (connected(1), connected(2, interface("br0", "10.0.0.2/24", virtual=True))),
            id="a bridge around a real card",
        ),
        pytest.param(
            tuple(connected(n, interface("enp1s0", f"169.254.0.{n}/16"), own=(f"169.254.0.{n}",)) for n in (1, 2)),
            id="a cable between two hosts",
        ),
        pytest.param(
            (connected(1), connected(2, eth0(2), interface("cni0", "10.42.0.1/24", virtual=True), rdma=active_rdma())),
            id="data go over InfiniBand",
        ),
    ],
)
def test_interfaces_agree(nodes):
    check, findings = ask("iface-agree", several(*nodes))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert "node1: Gloo would use" in check.seen


def test_one_node_has_nobody_to_agree_with():
    check, findings = ask("iface-agree", fleet(connected(1, interface("docker0", "172.17.0.1/16"))))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (connected(2, interface("docker0", "172.17.0.2/16")), "NCCL would use docker0 (172.17.0.2), a bridge"),
        (connected(2, interface("cni0", "10.42.0.1/24"), eth0(2)), "NCCL would use cni0 (10.42.0.1), a bridge"),
        (connected(2, interface("br-0123456789ab", "172.18.0.1/16"), eth0(2)), "NCCL would use br-0123456789ab"),
        (connected(2, eth0(2), NCCL_SOCKET_IFNAME="^docker0"), "NCCL would use lo (127.0.0.1), which is loopback"),
        (connected(2, eth0(2), GLOO_SOCKET_IFNAME="lo"), "Gloo would use lo (127.0.0.1), which is loopback"),
    ],
)
def test_an_interface_that_others_cannot_reach(odd, words):
    check, findings = ask("iface-agree", several(connected(1), odd))
    assert check.outcome is Outcome.FAILED
    (finding,) = [finding for finding in findings if words in finding.summary]
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node2",))
    assert finding.fix.startswith(f"export {'NCCL' if 'NCCL' in words else 'GLOO'}_SOCKET_IFNAME=")


def test_variables_alone_tell_of_several_nodes():
    facts = fleet(connected(1, eth0(1), NCCL_SOCKET_IFNAME="^docker0", PET_NNODES="2"))
    _, (finding,) = ask("iface-agree", facts)
    assert finding.fix == "export NCCL_SOCKET_IFNAME=eth0 on all nodes"


def test_a_tunnel_and_a_spare_bridge_are_warnings():
    facts = several(
        connected(1, interface("tailscale0", "100.64.0.1/32"), own=("10.0.0.1",)),
        connected(2, eth0(2), interface("flannel.1", "10.42.0.0/32")),
    )
    _, findings = ask("iface-agree", facts)
    assert [(finding.severity, finding.hosts) for finding in findings] == [
        (Severity.WARNING, ("node1",)),
        (Severity.WARNING, ("node2",)),
    ]
    assert "flannel.1 (10.42.0.0) for TCP data" in findings[1].summary


def test_one_address_on_two_hosts():
    same = interface("eth0", "192.168.122.10/24")
    facts = several(
        connected(1, same, own=("192.168.122.10",)), connected(2, same, own=("192.168.122.10",)), connected(3)
    )
    _, findings = ask("iface-agree", facts)
    assert [finding.hosts for finding in findings] == [("node1", "node2")] * 2
    assert "192.168.122.10 on node1 and node2" in findings[0].summary


def test_of_many_nodes_with_such_an_address_four_are_shown():
    shared = [connected(n, interface("eth0", "192.168.122.10/24"), own=("192.168.122.10",)) for n in range(1, 6)]
    local = [connected(n, interface("eth0", f"169.254.7.{n}/16"), own=(f"169.254.7.{n}",)) for n in range(1, 6)]
    for facts in (several(*shared), several(*local, connected(6))):
        assert {len(finding.evidence) for finding in ask("iface-agree", facts)[1]} == {4}


def test_a_link_local_address_among_real_ones():
    odd = connected(2, interface("eth0", "169.254.7.7/16"), own=("169.254.7.7",))
    _, findings = ask("iface-agree", several(connected(1), odd, connected(3)))
    assert {finding.hosts for finding in findings} == {("node2",)}
    assert "link-local address on node2, but not on 2 others" in findings[0].summary


V6 = interface("eth0", "fd00::2/64")


@pytest.mark.parametrize(
    "nodes",
    [
        (connected(1), connected(2)),
        (connected(1, interface("eth0", "fd00::1/64"), own=("fd00::1",)), connected(2, V6, own=("fd00::2",))),
        (connected(1, interface("eth0", "10.0.0.1/24", "fd00::1/64")), connected(2)),
        (connected(1, master=lookup("m", "10.0.0.1", "fd00::1")), connected(2, master=lookup("m", "10.0.0.1"))),
        (connected(1, ipv6_disabled=True), connected(2)),
    ],
)
def test_families_agree(nodes):
    check, findings = ask("v4v6", several(*nodes))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_families_differ():
    _, findings = ask("v4v6", several(connected(1), connected(2, V6, own=("fd00::2",)), connected(3)))
    assert [finding.summary for finding in findings] == [
        "NCCL would use IPv6 on node2, IPv4 on 2 others: they cannot connect to each other",
        "Gloo would use IPv6 on node2, IPv4 on 2 others: they cannot connect to each other",
    ]
    assert {(finding.severity, finding.hosts) for finding in findings} == {(Severity.WARNING, ("node2",))}


def test_the_family_that_is_set_for_nccl_has_no_address():
    _, (finding,) = ask("v4v6", fleet(connected(1, NCCL_SOCKET_FAMILY="AF_INET6")))
    assert finding.summary == "NCCL_SOCKET_FAMILY=AF_INET6: no interface of the node has an IPv6 address"
    assert finding.fix == "unset NCCL_SOCKET_FAMILY"


def test_the_master_has_another_family_for_some():
    facts = several(
        connected(1, master=lookup("m", "10.0.0.1")),
        connected(2, master=lookup("m", "fd00::1")),
        connected(3, master=lookup("m", "10.0.0.1")),
    )
    _, (finding,) = ask("v4v6", facts)
    assert finding.summary == "the master's name has IPv6 on node2, IPv4 on 2 others"


def test_the_master_has_a_family_that_is_switched_off():
    _, (finding,) = ask("v4v6", fleet(connected(1, master=lookup("m", "fd00::1"), ipv6_disabled=True)))
    assert "IPv6 is disabled" in finding.summary


@pytest.mark.parametrize(
    ("nodes", "outcome"),
    [
        ((connected(1), connected(2)), Outcome.PASSED),
        ((connected(1), connected(2, own=("127.0.1.1",))), Outcome.PASSED),
        ((connected(1),), Outcome.SKIPPED),
    ],
)
def test_mtu_agrees(nodes, outcome):
    check, findings = ask("mtu", several(*nodes))
    assert (check.outcome, findings) == (outcome, ())


def test_mtu_differs():
    facts = several(connected(1, eth0(1, mtu=9000)), connected(2, eth0(2)), connected(3, eth0(3, mtu=9000)))
    check, (finding,) = ask("mtu", facts)
    assert finding.summary == "MTU 1500 on node2, 9000 on 2 others: packets that are too large for a node are dropped"
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node2",))
    assert finding.fix == "ip link set dev eth0 mtu 9000 where it differs"
    assert check.seen == "eth0 9000, eth0 1500"


def test_mtu_without_majority_names_both():
    _, (finding,) = ask("mtu", several(connected(1, eth0(1, mtu=9000)), connected(2)))
    assert (finding.confidence, finding.hosts) == (Confidence.LOW, ("node1", "node2"))
    assert finding.fix == "ip link set dev eth0 mtu 1500 where it differs"


# DD206: healthy, each failing form, missing facts, near misses.


def pair(*addresses, variable="MASTER_ADDR", sections=(NOT_ASKED, NOT_ASKED)):
    """Return two nodes by hand, each with its own address of the master."""
    return fleet(
        *(
            node(
                f"node{rank}", index=rank, processes=[process(rank, **{variable: address})], names=sections[rank],
            )
            for rank, address in enumerate(addresses)
        ),
        launcher=Launcher.NNODES, world_size=2, nnodes=2,
    )  # fmt: skip


def alone(**variables):
    own = names_of("w0", "127.0.1.1", master=looked_up("w0", "127.0.1.1"))
    return fleet(node(processes=[process(None, **variables)], names=own))


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (alone(), Outcome.SKIPPED),
        (alone(MASTER_ADDR="localhost"), Outcome.PASSED),
        (alone(MASTER_ADDR="127.0.0.1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="8", RANK="3"), Outcome.PASSED),
        (alone(**{**TORCHRUN, "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}), Outcome.PASSED),
        (alone(MASTER_ADDR="localhost", SLURM_NNODES="2", SLURM_JOB_ID="7"), Outcome.PASSED),
        (alone(MASTER_ADDR="node0", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", RANK="8"), Outcome.PASSED),
        (alone(PET_RDZV_ENDPOINT="w0:23456", PET_NNODES="1:4"), Outcome.PASSED),
        (alone(PET_MASTER_ADDR="w0", PET_NNODES="2", PET_NODE_RANK="0"), Outcome.PASSED),
        (pair("node0", "node0"), Outcome.PASSED),
        (pair("localhost", "node0"), Outcome.PASSED),
        (pair("node0", "node0", sections=(names_of("node0", "127.0.1.1", master=looked_up("node0", "127.0.1.1")),
                                          names_of("node1", "10.0.0.2", master=looked_up("node0", "10.0.0.1")))),
         Outcome.PASSED),
    ],
)  # fmt: skip
def test_no_loopback(facts, outcome):
    check, findings = ask("master-loopback", facts)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.3.2.1", "::1", "0.0.0.0", "::"])
def test_every_spelling(host):
    _, (finding,) = ask("master-loopback", pair(host, host))
    assert finding.severity is Severity.ERROR
    assert finding.summary.startswith(f"MASTER_ADDR is {host}, a different host on each node: every node except")
    assert (finding.hosts, finding.ranks) == (("node1",), (1,))
    assert finding.fix == "export MASTER_ADDR=node0 on all nodes"


@pytest.mark.parametrize(
    "names_of_second",
    [
        names_of("node1", "10.0.0.2", master=looked_up("node1", "10.0.0.2")),
        names_of("node1", "127.0.1.1", master=looked_up("node1", "127.0.1.1")),
    ],
)
def test_each_node_gives_its_own_name(names_of_second):
    first = names_of("node0", "10.0.0.1", master=looked_up("node0", "10.0.0.1"))
    _, (finding,) = ask("master-loopback", pair("node0", "node1", sections=(first, names_of_second)))
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node1",))
    assert "MASTER_ADDR is the host's own name, but rank 0 is on another" in finding.summary


def test_a_name_that_is_loopback_on_another_node():
    sections = (
        names_of("node0", "10.0.0.1", master=looked_up("head", "10.0.0.1")),
        names_of("node1", "10.0.0.2", master=looked_up("head", "127.0.0.1")),
    )
    _, (finding,) = ask("master-loopback", pair("head", "head", sections=sections))
    assert "MASTER_ADDR is head, which resolves to 127.0.0.1 there: every node except the first" in finding.summary
    assert finding.hosts == ("node1",)


@pytest.mark.parametrize(
    ("variables", "severity", "evidence"),
    [
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "8"}, Severity.ERROR, "LOCAL_WORLD_SIZE is 8"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "0"}, Severity.WARNING, "LOCAL_WORLD_SIZE is 8"),
        ({"SLURM_NNODES": "2", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"}, Severity.ERROR, "SLURM_NNODES is 2"),
        ({"PET_NNODES": "1:4"}, Severity.ERROR, "PET_NNODES is 1:4"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "w0"}, Severity.ERROR, "PET_NNODES is 2"),
    ],
)
def test_one_node_of_many_is_judged_alone(variables, severity, evidence):
    check, (finding,) = ask("master-loopback", alone(**({"MASTER_ADDR": "localhost"} | variables)))
    assert (check.outcome, finding.severity) == (failed(severity), severity)
    assert evidence in finding.evidence[0]


@pytest.mark.parametrize(
    ("variable", "missing", "severity"),
    [
        ("PET_MASTER_ADDR", (1,), Severity.ERROR),
        ("PET_RDZV_ENDPOINT", (1,), Severity.ERROR),
        ("PET_MASTER_ADDR", (), Severity.WARNING),
        ("MASTER_ADDR", (1,), Severity.WARNING),
    ],
)
def test_a_first_node_that_waits_for_the_others(variable, missing, severity):
    variables = {variable: "localhost", "PET_NNODES": "2", "PET_NODE_RANK": "0"}
    _, (finding,) = ask("master-loopback", replace(alone(**variables), missing=missing))
    assert finding.severity is severity


def test_the_endpoint_of_the_rendezvous():
    _, (finding,) = ask("master-loopback", pair("localhost:29400", "localhost:29400", variable="PET_RDZV_ENDPOINT"))
    assert finding.fix == "export PET_RDZV_ENDPOINT=node0:29400 on all nodes"


def test_the_first_host_of_slurm():
    facts = alone(MASTER_ADDR="localhost", SLURM_NNODES="2", SLURM_STEP_ID="0", SLURM_JOB_NODELIST="n[1-2]")
    _, (finding,) = ask("master-loopback", facts)
    assert 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) on all nodes' in finding.fix


SECOND = (
    names_of("node0", "10.0.0.1", master=looked_up("node1", "10.0.0.2")),
    names_of("node1", "127.0.1.1", master=looked_up("node1", "127.0.1.1")),
)


def test_any_node_may_host_a_c10d_rendezvous():
    facts = pair("node1:29400", "node1:29400", variable="PET_RDZV_ENDPOINT", sections=SECOND)
    assert ask("master-loopback", facts)[1] == ()


def test_rank_0_hosts_the_store_of_ranks_that_are_numbered():
    facts = changed(changed(pair("node1", "node1", sections=SECOND), 0, RANK="0"), 1, RANK="1")
    _, (finding,) = ask("master-loopback", facts)
    assert "MASTER_ADDR is node1, but rank 0 is on another host" in finding.summary
    assert finding.fix == "export MASTER_ADDR=node0 on all nodes"
