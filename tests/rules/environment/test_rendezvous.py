"""DD208: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import FirewallChain, Launcher, PortUse
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import NO_PORT, ask, failed, fleet, node, process
from tests.rules.environment.build import network as network_ports
from tests.rules.environment.launches import TORCHRUN, interface, lookup, names, network, torchrun_fleet

C10D = {"PET_RDZV_BACKEND": "c10d"}


def step(host, sections, *, missing=(), extra=(), **variables):
    """Return a step of one task a node, before torchrun has started; ``sections`` are names and network of each."""
    return fleet(
        *(
            node(
                own.hostname, index=index, names=own, network=cards,
                processes=[process(index, **({"MASTER_ADDR": host} | variables))],
            )
            for index, (own, cards) in enumerate(sections)
        ),
        *extra,
        launcher=Launcher.SLURM, world_size=len(sections), nnodes=len(sections), missing=missing,
    )  # fmt: skip


def hosts(host, *addresses, own=("10.0.0.1", "10.0.0.2"), cards=()):
    """Return two hosts on which an endpoint's host is looked up to addresses."""
    return [
        (names(f"node{index}", address, master=lookup(host, *addresses)), network(*cards[index : index + 1]))
        for index, address in enumerate(own)
    ]


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (fleet(node()), Outcome.SKIPPED),
        (torchrun_fleet(), Outcome.SKIPPED),
        (step("node0", hosts("node0", "10.0.0.1")[:1]), Outcome.SKIPPED),
        (step("node0", hosts("node0"), RANK="0"), Outcome.SKIPPED),
        (step("node0", hosts("node0"), PET_RDZV_CONF="is_host=1"), Outcome.SKIPPED),
        (step("node0", hosts("node0"), PET_RDZV_BACKEND="static"), Outcome.SKIPPED),
        (step("node0", hosts("node0"), PET_NODE_RANK="0"), Outcome.SKIPPED),
        (step("", hosts("node0")), Outcome.SKIPPED),
        (step("node0", hosts("node0", "10.0.0.1")), Outcome.PASSED),
        (step("10.0.0.2", hosts("10.0.0.2", "10.0.0.2")), Outcome.PASSED),
        (step("head", hosts("head", "10.0.0.1")), Outcome.PASSED),
        (step("node0", hosts("node0")), Outcome.PASSED),
        (step("elsewhere", hosts("elsewhere"), missing=(2,)), Outcome.INCONCLUSIVE),
    ],
)
def test_one_host_or_none_to_judge(facts, outcome):
    check, findings = ask("rdzv-host", facts)
    assert (check.outcome, findings) == (outcome, ())


def test_a_second_network_card_is_nobodys():
    cards = (interface("ib0", "10.1.0.1/24"), interface("ib0", "10.1.0.2/24"))
    facts = step("10.1.0.1", hosts("10.1.0.1", "10.1.0.1", cards=cards), SLURM_GPUS_ON_NODE="8")
    _, (finding,) = ask("rdzv-host", facts)
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node0",))
    assert "no host matches 10.1.0.1 in MASTER_ADDR: no host starts the store" in finding.summary
    assert "if it is what torchrun gets as --rdzv-endpoint" in finding.summary
    assert "an interface of node0 has the address" in finding.evidence[0]
    assert "--rdzv-endpoint=node0:29400" in finding.fix
    assert "--rdzv-conf is_host=1 on node0" in finding.fix


@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        (C10D | {"PET_RDZV_ENDPOINT": "alias:29500", "MASTER_ADDR": ""}, Severity.ERROR),
        ({"SLURM_GPUS_ON_NODE": "8"}, Severity.WARNING),
        ({"SLURM_GPUS_ON_NODE": "1"}, Severity.INFO),
        ({}, Severity.INFO),
    ],
)
def test_how_sure_the_endpoint_is(variables, severity):
    _, (finding,) = ask("rdzv-host", step("alias", hosts("alias", "10.9.9.9"), **variables))
    assert finding.severity is severity
    assert "compared with the names of node0 and node1" in finding.evidence


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [("shared", ("127.0.1.1", "127.0.1.1")), ("localhost", ("10.0.0.1", "10.0.0.2")), ("127.0.0.1", ("a", "b"))],
)
def test_several_hosts(endpoint, own):
    variables = C10D | {"PET_RDZV_ENDPOINT": f"{endpoint}:29500", "MASTER_ADDR": ""}
    _, (finding,) = ask("rdzv-host", step("", hosts(endpoint, own[0], own=own), **variables))
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node0", "node1"))
    assert "node0 and node1 all match" in finding.summary


def test_a_host_whose_own_name_is_not_known():
    unknown = [(names(f"node{index}", error="Name or service not known"), network()) for index in range(2)]
    check, findings = ask("rdzv-host", step("elsewhere", unknown))
    assert (check.outcome, findings) == (Outcome.INCONCLUSIVE, ())


def test_nodes_with_different_endpoints_have_none_in_common():
    first = node("a", processes=[process(0, MASTER_ADDR="a")], names=names("a", "10.0.0.1"), network=network())
    second = node("b", processes=[process(1, MASTER_ADDR="b")], names=names("b", "10.0.0.2"), network=network())
    check, _ = ask("rdzv-host", fleet(first, second, launcher=Launcher.SLURM, world_size=2))
    assert check.outcome is Outcome.SKIPPED


# DD205 and DD217: healthy, each failing form, missing facts, near misses.


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"MASTER_ADDR": "node0"}, Outcome.PASSED),
        ({"MASTER_ADDR": "10.0.0.1"}, Outcome.PASSED),
        ({"MASTER_ADDR": "6841231a"}, Outcome.PASSED),
        ({"MASTER_ADDR": "ip-10-0-0-1"}, Outcome.PASSED),
        ({"MASTER_ADDR": "fd00::1"}, Outcome.PASSED),
        ({"PET_RDZV_ENDPOINT": "node0:29400"}, Outcome.PASSED),
    ],
)
def test_a_name(variables, outcome):
    check, findings = ask("master-numeric", node(processes=[process(0, **variables)]))
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "summary", "fix"),
    [
        ({"MASTER_ADDR": "6841231"}, "6841231, which is read as the address 0.104.99.143", "MASTER_ADDR="),
        ({"MASTER_ADDR": "0"}, "the address 0.0.0.0", "NAME_OF_RANK_0_HOST"),
        ({"MASTER_ADDR": "010"}, "the address 0.0.0.8", "export MASTER_ADDR="),
        ({"MASTER_ADDR": "0x7f000001"}, "the address 127.0.0.1", "export MASTER_ADDR="),
        ({"MASTER_ADDR": "99999999999"}, "which is neither a host nor an address", "export MASTER_ADDR="),
        ({"PET_MASTER_ADDR": "12"}, "PET_MASTER_ADDR is 12, which is read as the address 0.0.0.12", "PET_MASTER_ADDR="),
        ({"PET_RDZV_ENDPOINT": "12:29400"}, "PET_RDZV_ENDPOINT is 12", "PET_RDZV_ENDPOINT=NAME_OF_RANK_0_HOST:29400"),
        (
            {"MASTER_ADDR": "12", "SLURM_JOB_NODELIST": "n[1-2]"},
            "0.0.0.12", 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        ),
    ],
)  # fmt: skip
def test_a_number(variables, summary, fix):
    check, (finding,) = ask("master-numeric", node(processes=[process(0, **variables)]))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert summary in finding.summary
    assert fix in finding.fix


def test_a_job_id_is_recognized():
    processes = [process(rank, MASTER_ADDR="6841231", SLURM_JOB_ID="6841231") for rank in range(2)]
    _, (finding,) = ask("master-numeric", node(processes=processes))
    assert finding.evidence == ("it is the Slurm job id, SLURM_JOB_ID",)
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"MASTER_PORT": "29500"}, Outcome.PASSED),
        ({"MASTER_PORT": "1024"}, Outcome.PASSED),
        ({"MASTER_PORT": "32767"}, Outcome.PASSED),
        ({"MASTER_PORT": "61000"}, Outcome.PASSED),
        ({"MASTER_PORT": "none"}, Outcome.SKIPPED),
        (TORCHRUN, Outcome.SKIPPED),
        (TORCHRUN | {"PET_MASTER_PORT": "45000"}, Outcome.SKIPPED),
    ],
)
def test_a_good_port(variables, outcome):
    check, findings = ask("port-range", node(processes=[process(0, **variables)], network=network()))
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "severity", "summary", "fix"),
    [
        ({"MASTER_PORT": "45000"}, Severity.INFO, "MASTER_PORT is 45000, an ephemeral port", "MASTER_PORT=29500"),
        ({"MASTER_PORT": "32768"}, Severity.INFO, "an ephemeral port", "MASTER_PORT=29500"),
        ({"MASTER_PORT": "60999"}, Severity.INFO, "an ephemeral port", "MASTER_PORT=29500"),
        ({"PET_MASTER_PORT": "45000"}, Severity.INFO, "PET_MASTER_PORT is 45000", "PET_MASTER_PORT=29500"),
        ({"PET_RDZV_ENDPOINT": "node0:45000"}, Severity.INFO, "PET_RDZV_ENDPOINT is 45000", "=HOST:29500"),
        ({"MASTER_PORT": "1023"}, Severity.WARNING, "only root can listen on ports below 1024", "MASTER_PORT=29500"),
    ],
)
def test_a_port_of_others(variables, severity, summary, fix):
    _, (finding,) = ask("port-range", node(processes=[process(0, **variables)], network=network()))
    assert finding.severity is severity
    assert summary in finding.summary
    assert fix in finding.fix


def test_another_range_counts():
    narrow = network(local_ports=(50000, 51000))
    _, findings = ask("port-range", node(processes=[process(0, MASTER_PORT="45000")], network=narrow))
    assert findings == ()


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (network(local_ports=None), Outcome.PASSED),
        (Unread(why=Why.TIMEOUT, reason="no answer"), Outcome.INCONCLUSIVE),
        (Unread(why=Why.ABSENT, reason="no network"), Outcome.SKIPPED),
    ],
)
def test_an_unknown_range(facts, outcome):
    check, findings = ask("port-range", node(processes=[process(0, MASTER_PORT="45000")], network=facts))
    assert (check.outcome, findings) == (outcome, ())


def use(**more):
    return PortUse(
        port=29500, **{"free": False, "error": None, "time_wait": False, "owner_pid": None, "owner": None} | more
    )


IN_USE = "Address already in use"


def test_a_free_port():
    check, findings = ask("port-free", node(network=network_ports(port=use(free=True))))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "port 29500 can be listened on", ())


@pytest.mark.parametrize(
    ("port", "severity", "summary", "fix"),
    [
        (
            use(error=IN_USE, owner_pid=4711, owner="python train.py"),
            Severity.ERROR,
            "another process uses MASTER_PORT 29500: rank 0 fails with EADDRINUSE",
            "kill 4711, if it is a leftover process; or export MASTER_PORT=29501 on all nodes",
        ),
        (
            use(error=IN_USE),
            Severity.ERROR,
            "another process uses MASTER_PORT 29500: rank 0 fails with EADDRINUSE",
            (
                "sudo ss -ltnp sport = :29500; end that process, if it is a leftover process; or export "
                "MASTER_PORT=29501 on "
                "all nodes"
            ),
        ),
        (
            use(error="Permission denied"),
            Severity.ERROR,
            "MASTER_PORT 29500 cannot be listened on: Permission denied",
            "export MASTER_PORT=29500 on all nodes",
        ),
        (
            use(free=True, time_wait=True),
            Severity.INFO,
            (
                "connections of an earlier job to MASTER_PORT 29500 are still in TIME_WAIT: this affects "
                "programs without SO_REUSEADDR, but not torch's store"
            ),
            "nothing, or wait a minute",
        ),
    ],
)
def test_a_port_that_is_not(port, severity, summary, fix):
    check, (finding,) = ask("port-free", node(network=network_ports(port=port)))
    assert (check.outcome, finding.severity, finding.summary, finding.fix) == (failed(severity), severity, summary, fix)


def test_the_owner_is_named():
    _, (finding,) = ask(
        "port-free", node(network=network_ports(port=use(error=IN_USE, owner_pid=4711, owner="python x.py")))
    )
    assert finding.evidence == ("python x.py (process 4711) listens on it",)


@pytest.mark.parametrize("why", [NO_PORT, Unread(why=Why.NEEDLESS, reason="the store of this job listens on it")])
def test_no_port_to_try(why):
    check, findings = ask("port-free", node(network=network_ports(port=why)))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, why.reason, ())


def drops(*accepts, name="nft inet filter input", manager=""):
    return FirewallChain(name=name, refusal="policy drop", accepts=accepts, manager=manager)


def guarded(*chains, nnodes=2):
    return fleet(node(network=network_ports(firewall=chains)), launcher=Launcher.NNODES, nnodes=nnodes)


@pytest.mark.parametrize(
    "chains",
    [
        (),
        (drops("ip saddr 10.0.0.0/8 accept"),),
        (drops("tcp dport 22 accept", 'iifname "eth1" accept'),),
        (drops("tcp dport 1024-65535 accept"),),
        (drops("tcp dport { 22, 32768-60999 } accept"),),
        (drops("-s 10.0.0.0/8 -j ACCEPT", name="iptables filter INPUT"),),
        (drops("-p tcp -m tcp --dport 1024:65535 -j ACCEPT", name="iptables filter INPUT"),),
        (drops("meta l4proto { tcp, udp } accept"),),
    ],
)
def test_a_packet_filter_that_lets_peers_in(chains):
    check, findings = ask("firewall-local", guarded(*chains))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


@pytest.mark.parametrize(
    ("chain", "fix"),
    [
        (drops(), "nft insert rule inet filter input ip saddr NETWORK_OF_THE_NODES accept"),
        (drops("tcp dport 22 accept"), "nft insert rule inet filter input ip saddr NETWORK_OF_THE_NODES accept"),
        (drops("tcp dport { 22, 29500 } accept"), "nft insert rule inet filter input"),
        (drops("tcp dport 30000-40000 accept"), "nft insert rule inet filter input"),
        (drops("udp dport 1024-65535 accept"), "nft insert rule inet filter input"),
        (drops("ip protocol igmp accept"), "nft insert rule inet filter input"),
        (
            drops("-p tcp -m tcp --dport 22 -j ACCEPT", name="iptables filter INPUT"),
            "iptables -I INPUT -s NETWORK_OF_THE_NODES -j ACCEPT",
        ),
        (drops(name="iptables filter INPUT", manager="ufw"), "ufw allow from NETWORK_OF_THE_NODES"),
        (
            drops(name="nft inet firewalld filter_INPUT", manager="firewalld"),
            "firewall-cmd --zone=trusted --add-source=NETWORK_OF_THE_NODES",
        ),
    ],
)
def test_a_packet_filter_that_keeps_peers_out(chain, fix):
    check, (finding,) = ask("firewall-local", guarded(chain))
    assert (check.outcome, finding.severity, finding.confidence) == (
        Outcome.FAILED,
        Severity.WARNING,
        Confidence.MEDIUM,
    )
    assert "on ports 32768-60999" in finding.summary
    assert finding.fix.startswith(fix)


def test_on_one_node_the_packet_filter_does_no_harm():
    check, findings = ask("firewall-local", guarded(drops(), nnodes=1))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert "policy drop" in check.seen


def test_without_root_the_packet_filter_is_not_known():
    denied = Unread(why=Why.DENIED, reason="to list the packet filter's rules needs root")
    check, findings = ask("firewall-local", node(network=network_ports(firewall=denied)))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, denied.reason, ())
