import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import FirewallChain, Launcher, PortUse
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, failed, fleet, node
from tests.rules.environment.network import NO_PORT, network


def use(**more):
    return PortUse(
        port=29500, **{"free": False, "error": None, "time_wait": False, "owner_pid": None, "owner": None} | more
    )


IN_USE = "Address already in use"


def test_a_free_port():
    check, findings = ask("port-free", node(network=network(port=use(free=True))))
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
    check, (finding,) = ask("port-free", node(network=network(port=port)))
    assert (check.outcome, finding.severity, finding.summary, finding.fix) == (failed(severity), severity, summary, fix)


def test_the_owner_is_named():
    _, (finding,) = ask("port-free", node(network=network(port=use(error=IN_USE, owner_pid=4711, owner="python x.py"))))
    assert finding.evidence == ("python x.py (process 4711) listens on it",)


@pytest.mark.parametrize(
    "why",
    [NO_PORT, Unread(why=Why.NEEDLESS, reason="the store of this job listens on it")],
)
def test_no_port_to_try(why):
    check, findings = ask("port-free", node(network=network(port=why)))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, why.reason, ())


def drops(*accepts, name="nft inet filter input", manager=""):
    return FirewallChain(name=name, refusal="policy drop", accepts=accepts, manager=manager)


def guarded(*chains, nnodes=2):
    return fleet(node(network=network(firewall=chains)), launcher=Launcher.NNODES, nnodes=nnodes)


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
    check, findings = ask("firewall-local", node(network=network(firewall=denied)))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, denied.reason, ())
