"""A collective that all ranks are in and that does not end: what is to be checked, and what the machine shows."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import (
    Blocked,
    Connection,
    Connections,
    GroupState,
    NcclLine,
    Owner,
    ProcessCauses,
    StoreSought,
)
from ddpdoctor.model.findings import Confidence
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
from tests.rules.build import (
    C10D,
    LONG_AGO,
    NOW,
    S,
    failed_in,
    in_backward,
    in_call,
    in_user,
    job,
    line,
    moving,
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


def finding_of(found):
    findings = judge(found).findings
    assert [finding.kind for finding in findings] == ["transport"]
    assert findings[0].ranks == tuple(rank.rank for rank in found.ranks)
    return findings[0]


CHECKS = {
    "gloo on one host": (on_one_host("gloo"), "1. packet filters, including on loopback"),
    "gloo on two hosts": (over("gloo"), "1. the interface that Gloo uses"),
    "nccl on one host": (on_one_host("nccl"), "1. GPU errors"),
    "nccl on two hosts": (over("nccl"), "1. the interface that NCCL uses"),
    "nccl beside gloo": (over("cpu:gloo,cuda:nccl"), "1. the interface that NCCL uses"),
    "a backend that nobody names": (on_one_host(""), "1. packet filters"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_to_check_comes_in_the_order_of_likelihood(name):
    found, first = CHECKS[name]
    finding = finding_of(found)
    assert finding.fix.startswith(f"check in this order: {first}"), finding.fix
    assert finding.confidence is Confidence.LOW


def test_data_that_nobody_acknowledges_name_the_ranks_and_the_way():
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000", LOST), connected(in_call(1, world=2), "10.0.0.4:5000"))
    finding = finding_of(on_one_host("gloo", *ranks))
    assert finding.evidence[0] == (
        "data from rank 0 to rank 1 is not acknowledged: 10.0.0.4:4000 to 10.0.0.4:5000, 76 bytes are waiting, "
        "resent 4 times"
    )
    assert finding.fix.startswith("packets from 10.0.0.4 to itself are lost")
    assert finding.confidence is Confidence.MEDIUM


def test_only_lost_packets_distinguish_a_collective_of_ddp_from_one_that_is_slow():
    slow = (in_backward(0, world=2), in_backward(1, world=2))
    lost = (connected(slow[0], "10.0.0.4:4000", LOST), connected(slow[1], "10.0.0.4:5000"))
    assert judge(on_one_host("gloo", *slow)).certain is False
    assert judge(on_one_host("gloo", *lost)).certain is True


MACHINES = {
    "the interface in use is down": (
        network(interface("eth0", "10.0.0.4/24", up=False)), {},
        "the ranks' connections use eth0 (10.0.0.4), which is down", "ip link set dev eth0 up"),
    "the address in use is gone": (
        network(interface("eth0", "10.0.0.9/24")), {},
        "the ranks' connections use 10.0.0.4, but no interface has that address anymore", "what removed 10.0.0.4"),
    "a variable names what is not there": (
        network(interface("eth0", "10.0.0.4/24")), {"GLOO_SOCKET_IFNAME": "eth7"}, "(DD211)", "GLOO_SOCKET_IFNAME"),
    "nothing is wrong with it": (
        network(interface("eth0", "10.0.0.4/24")), {},
        "the ranks' TCP connections use eth0 (10.0.0.4)", "check in this order"),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_what_the_machine_shows_is_reported(name):
    seen, variables, said, fix = MACHINES[name]
    first = node(network=seen).processes[0]
    machine = node(processes=(replace(first, variables=variables),), network=seen)
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000"), connected(in_call(1, world=2), "10.0.0.4:5000"))
    finding = finding_of(on_one_host("gloo", *ranks, machine=machine))
    assert any(said in text for text in finding.evidence), finding.evidence
    assert fix in finding.fix, finding.fix


def test_the_machine_of_one_host_says_nothing_about_the_connections_of_another():
    machine = replace(node(network=network(interface("eth0", "10.0.0.4/24"))), host="node0")
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000", LOST), connected(in_call(1, world=2), "10.0.0.5:5000"))
    finding = finding_of(over("gloo", *ranks, machine=machine))
    assert finding.evidence[0].startswith("data from rank 0"), finding.evidence
    assert "on node0: the ranks' TCP connections use eth0 (10.0.0.4)" in finding.evidence
    assert finding.fix.startswith("packets from 10.0.0.4"), finding.fix


def test_nccls_own_warnings_are_evidence():
    lines = (NcclLine(pid=1000, source="transport/net_ib.cc:1", text="Got completion with error 12"),)
    assert "NCCL warns (transport/net_ib.cc:1): Got completion with error 12" in (
        finding_of(over("nccl", nccl_lines=lines)).evidence
    )


WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=16, "
    "NumelOut=16, Timeout(ms)=20000) ran for 20035 milliseconds before timing out."
)
GLOO = "[../gloo/transport/tcp/unbound_buffer.cc:119] Timed out waiting 20000ms for recv operation to complete"
GAVE_UP = {
    WATCHDOG: "the NCCL watchdog gave up on ALLREDUCE, collective 7 of its group after 20 s",
    GLOO: "Gloo gave up",
}


@pytest.mark.parametrize("text", GAVE_UP)
def test_ranks_that_all_waited_for_their_limit_did_not_crash(text):
    late = LONG_AGO + 21 * S
    ranks = (
        failed_in(0, "all_reduce", 7, message=text, at=late, world=2),
        failed_in(1, "all_reduce", 7, message="Connection closed by peer", at=late + S, world=2),
    )
    finding = finding_of(on_one_host("gloo", *ranks, ended=True, now_ns=NOW))
    assert any(GAVE_UP[text] in sentence for sentence in finding.evidence), finding.evidence


def test_a_text_that_names_a_limit_which_has_not_passed_is_a_crash():
    text = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms"
    ranks = (
        failed_in(0, "all_reduce", 7, message=text, world=2),
        failed_in(1, "all_reduce", 7, message="out of luck", at=LONG_AGO, world=2),
    )
    assert [finding.kind for finding in judge(on_one_host("gloo", *ranks, ended=True)).findings] == ["crash"]


def test_lost_packets_do_not_excuse_a_rank_that_does_not_come():
    held = connected(in_user(1, world=2), "10.0.0.4:5000")
    waiting = connected(in_call(0, world=2), "10.0.0.4:4000", LOST)
    assert judge(job(waiting, held)).findings[0].kind == "stuck"


# Ranks that connect to a store which nobody serves are to blame, at the line that gave its address.


ELSEWHERE = Connections(listening=("[::]:29500", "0.0.0.0:22"))
SLEEPS = Blocked(call="clock_nanosleep")
MOVED = StoreSought(
    host="localhost", port=29999, rank=0, method="env://", of_agent=True, given="127.0.0.1:29500",
    set_at=line(5, "setup"),
)  # fmt: skip
BY_URL = replace(MOVED, method="tcp://", set_at=None)
OWN = replace(MOVED, of_agent=False, given=None, set_at=None, port=29500)
REMOTE = replace(BY_URL, host="10.0.0.9")
AS_GIVEN = replace(MOVED, port=29500, set_at=None)


def connecting(number, store, connections=ELSEWHERE, blocked=SLEEPS, world=2, **more):
    causes = ProcessCauses(store=replace(store, rank=number), connections=connections, blocked=blocked, **more)
    return rank(
        number, world, initialized=False, open_calls=(phase("init_process_group", 6),), causes=causes,
        samples=(sample(stack(line(6), C10D)),),
    )  # fmt: skip


def in_init(number, world=2):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group", 6),))


FOUND = {
    "a script sets MASTER_PORT": (
        (connecting(0, MOVED), connecting(1, MOVED)), (0, 1), Confidence.HIGH, True,
        "the launcher set the store address to 127.0.0.1:29500, but train.py:5 sets localhost:29999 (env://)",
        "keep the MASTER_ADDR and MASTER_PORT that torchrun sets (remove train.py:5)",
    ),
    "a script names an address of its own": (
        (connecting(0, BY_URL), connecting(1, BY_URL)), (0, 1), Confidence.HIGH, True,
        "no process listens on port 29999 of node0", "without init_method",
    ),
    "one rank alone": (
        (in_init(0), connecting(1, MOVED)), (1,), Confidence.HIGH, True,
        "rank 0 is a client too", "(remove train.py:5)",
    ),
    "another host, which does not answer": (
        (connecting(0, REMOTE, Connections(unanswered=("10.0.0.9:29999",))), connecting(1, REMOTE)), (0, 1),
        Confidence.MEDIUM, False, "10.0.0.9:29999 does not respond", "without init_method",
    ),
    "somebody else serves that port": (
        tuple(
            connecting(
                n, MOVED, Connections(listening=("0.0.0.0:29999",)), Blocked(call="poll", remote="127.0.0.1:29999"),
                listener=Owner(pid=77, command="nc -l 29999"),
            )
            for n in (0, 1)
        ),
        (0, 1), Confidence.MEDIUM, False, "process 77 (nc -l 29999) accepted the connection on port 29999",
        "remove train.py:5",
    ),
    "the agent's store cannot be reached": (
        (connecting(0, AS_GIVEN, Connections()), connecting(1, AS_GIVEN, Connections())), (0, 1), Confidence.MEDIUM,
        False, "torchrun's agent serves the store", "ddpdoctor check-rendezvous",
    ),
    "rank 0 has its store at another port": (
        (connecting(0, OWN), connecting(1, replace(OWN, port=29501))), (1,), Confidence.MEDIUM, False,
        "rank 0 should serve the store, but it serves one at localhost:29500", "the address of rank 0's host",
    ),
    "each host looks for the store on itself": (
        (connecting(0, OWN), replace(connecting(1, OWN, Connections(listening=("0.0.0.0:22",))), host="node1")),
        (1,), Confidence.HIGH, True, "serves one at localhost:29500 on node0", "the address of rank 0's host",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_who_waits_for_a_store_that_nobody_serves_is_named(name):
    ranks, blamed, confidence, certain, said, fix = FOUND[name]
    judged = judge(job(*ranks))
    (finding,) = judged.findings
    assert (finding.code, finding.ranks, finding.confidence) == ("DD601", blamed, confidence), finding
    assert judged.certain is certain
    assert any(said in text for text in finding.evidence), finding.evidence
    assert fix in finding.fix
    store = ranks[blamed[0]].causes.store
    assert [place.line for place in finding.where if place.rank == blamed[0]] == ([5, 6] if store.set_at else [6])


SILENT = {
    "rank 0 serves, and the others are on their way": (connecting(0, OWN), connecting(1, OWN)),
    "they have only begun": tuple(
        replace(one, open_calls=(phase("init_process_group", 6, started_ns=NOW - S),))
        for one in (connecting(0, MOVED), connecting(1, MOVED))
    ),
    "they make progress": (moving(connecting(0, MOVED)), moving(connecting(1, MOVED))),
    "where they connect to is not known": (in_init(0), in_init(1)),
}


@pytest.mark.parametrize("name", SILENT)
def test_nobody_is_named_where_the_store_may_come(name):
    assert not [finding for finding in judge(job(*SILENT[name])).findings if finding.code == "DD601"]


def test_the_rank_that_is_to_serve_and_does_not_come_is_stuck():
    held = in_user(0, world=2, initialized=False, groups=(), last_progress_ns=LONG_AGO)
    (finding,) = judge(job(held, connecting(1, OWN))).findings
    assert (finding.code, finding.ranks) == ("DD601", (0,))


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
