import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, failed, fleet, interface, lookup, names, network, node, process

DEAD = Unread(why=Why.TIMEOUT, reason="names did not answer within 12 s")


def two(*own, env=None, net=None, first=("10.0.0.3",), **more):
    """Two nodes: a healthy one, and one of which the host name resolves to ``own``."""
    good = node("node0", names=names(*first), network=network(interface("eth0", "10.0.0.3/24")))
    other = node(
        "node1",
        index=1,
        names=names(*own, hostname="node1", **more),
        network=network() if net is None else net,
        processes=(process(1, **(env or {})),),
    )
    return fleet(good, other, launcher=Launcher.TORCHRUN, nnodes=2)


def one(*own, launcher=Launcher.NONE, env=None, net=None, **more):
    here = node(
        names=names(*own, **more), network=network() if net is None else net, processes=(process(**(env or {})),)
    )
    return fleet(here, launcher=launcher)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(two("10.0.0.4"), id="own address"),
        pytest.param(two("10.0.0.4", "127.0.1.1"), id="Gloo takes the first"),
        pytest.param(two("127.0.1.1", env={"GLOO_SOCKET_IFNAME": "eth0"}), id="Gloo is reported an interface"),
        pytest.param(one("127.0.1.1"), id="Debian as it comes, one node"),
        pytest.param(one("127.0.1.1", launcher=Launcher.TORCHRUN), id="torchrun on one node"),
        pytest.param(two(), id="unresolvable is another check's"),
        pytest.param(two("203.0.113.9"), id="foreign is another check's"),
    ],
)
def test_no_loopback(facts):
    check, findings = ask("hostname-loopback", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())


@pytest.mark.parametrize(
    ("own", "env"),
    [
        (("127.0.1.1",), {}),
        (("127.0.0.1",), {}),
        (("::1",), {}),
        (("127.0.1.1", "10.0.0.4"), {}),
        (("127.0.1.1",), {"GLOO_SOCKET_IFNAME": "e"}),
    ],
)
def test_loopback(own, env):
    check, (finding,) = ask("hostname-loopback", two(*own, env=env))
    assert (check.outcome, finding.severity, finding.hosts) == (Outcome.FAILED, Severity.ERROR, ("node1",))
    assert f"resolves to {own[0]}" in finding.summary
    assert finding.fix.startswith("export GLOO_SOCKET_IFNAME=eth0 on all nodes")


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({"PET_NNODES": "2"}, Outcome.FAILED),
        ({"PET_NNODES": "1:4"}, Outcome.FAILED),
        ({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, Outcome.FAILED),
        ({"SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}, Outcome.FAILED),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, Outcome.FAILED),
        ({"SLURM_NNODES": "2"}, Outcome.PASSED),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0", "PET_NNODES": "1"}, Outcome.PASSED),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Outcome.FAILED),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, Outcome.PASSED),
        ({"PET_NNODES": "1"}, Outcome.PASSED),
    ],
)
def test_variables_tell_of_several_nodes(variables, outcome):
    check, _ = ask("hostname-loopback", one("127.0.1.1", env=variables))
    assert check.outcome is outcome


def test_equal_loopback_names_of_many_hosts_are_one_finding():
    nodes = [
        node(
            f"node{n}", names=names("127.0.1.1", hostname="same"), network=network(interface("eth0", f"10.0.0.{n}/24"))
        )
        for n in range(1, 4)
    ]
    _, (finding,) = ask("hostname-loopback", fleet(*nodes, launcher=Launcher.SLURM))
    assert finding.hosts == ("node1", "node2", "node3")


@pytest.mark.parametrize("kind", ["hostname-loopback", "hostname-unresolvable", "hostname-not-local"])
def test_names_that_were_not_read_are_inconclusive(kind):
    check, findings = ask(kind, node(names=DEAD, network=network()))
    assert (check.outcome, check.reason, findings) == (Outcome.INCONCLUSIVE, DEAD.reason, ())


def test_resolvable():
    check, findings = ask("hostname-unresolvable", one("127.0.1.1"))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "node0 resolves to 127.0.1.1", ())


@pytest.mark.parametrize(
    ("facts", "severity", "words"),
    [
        (one(), Severity.ERROR, "does not resolve"),
        (one(timed_out=True), Severity.ERROR, "did not resolve within 2 s: a name server does not respond"),
        (two(), Severity.ERROR, "the ranks cannot find rank 0"),
        (one(launcher=Launcher.TORCHRUN), Severity.WARNING, "which works on one node"),
        (one(launcher=Launcher.SLURM), Severity.WARNING, "which works on one node"),
    ],
)
def test_unresolvable(facts, severity, words):
    check, (finding,) = ask("hostname-unresolvable", facts)
    assert (check.outcome, finding.severity) == (failed(severity), severity)
    assert words in finding.summary
    address = (
        "10.0.0.4"
        if len(facts.nodes) == 1
        else "$(ip -o address show eth0 | awk '{print $4}' | cut -d/ -f1 | head -n 1)"
    )
    assert finding.fix.startswith(f'echo "{address} $(hostname)" | sudo tee -a /etc/hosts')


def test_unresolvable_without_any_interface_still_has_a_remedy():
    _, (finding,) = ask("hostname-unresolvable", one(net=network(interface("eth0", up=False))))
    assert finding.fix.startswith('echo "127.0.1.1 $(hostname)"')


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (one("10.0.0.4"), Outcome.PASSED),
        (one("127.0.1.1"), Outcome.PASSED),
        (one("203.0.113.9", "10.0.0.4"), Outcome.PASSED),
        (one("fe80::1%eth0", net=network(interface("eth0", "fe80::1/64"))), Outcome.PASSED),
        (one(), Outcome.PASSED),
        (one("203.0.113.9"), Outcome.FAILED),
        (one("203.0.113.9", "203.0.113.10"), Outcome.FAILED),
    ],
)
def test_not_local(facts, outcome):
    check, findings = ask("hostname-not-local", facts)
    assert check.outcome is outcome
    assert [finding.severity for finding in findings] == [Severity.ERROR] * (outcome is Outcome.FAILED)


def test_not_local_where_gloo_is_set_and_the_ranks_have_met_is_a_warning():
    _, (finding,) = ask("hostname-not-local", two("203.0.113.9", env={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node1",))
    assert finding.evidence == ("node1 resolves to 203.0.113.9",)


def test_not_local_without_known_addresses_accuses_nobody():
    check, findings = ask("hostname-not-local", node(names=names("203.0.113.9"), network=DEAD))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


HEAD = "gpu1.cluster.example"


def nodes(*found, use="head", launcher=Launcher.TORCHRUN, **variables):
    """Nodes of which the first holds rank 0; ``found`` is what each is reported of the head, or of the master."""
    made = [
        node(
            f"node{n}",
            index=n,
            names=names(f"10.0.0.{n + 1}", hostname=f"node{n}", **{use: one}),
            network=network(interface("eth0", f"10.0.0.{n + 1}/24", f"fd00::{n + 1}/64")),
            processes=(process(n, **variables),),
        )
        for n, one in enumerate(found)
    ]
    return fleet(*made, launcher=launcher, nnodes=len(made))


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (nodes(lookup(HEAD, "10.0.0.1"), lookup(HEAD, "10.0.0.1")), Outcome.PASSED),
        (nodes(lookup(HEAD, "127.0.1.1"), lookup(HEAD, "10.0.0.1")), Outcome.PASSED),
        (nodes(lookup(HEAD, "10.0.0.1")), Outcome.SKIPPED),
        (nodes(None, None), Outcome.SKIPPED),
    ],
)
def test_full_name_is_known(facts, outcome):
    check, findings = ask("fqdn-forward", facts)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("astray", "words"),
    [
        (lookup(HEAD), "does not resolve"),
        (lookup(HEAD, timed_out=True), "does not resolve within 2 s"),
        (lookup(HEAD, "127.0.0.1"), "resolves to the node itself"),
    ],
)
def test_full_name_leads_astray(astray, words):
    facts = nodes(lookup(HEAD, "10.0.0.1"), astray, lookup(HEAD, "10.0.0.1"), astray, MASTER_ADDR=HEAD)
    check, (finding,) = ask("fqdn-forward", facts)
    assert (check.outcome, finding.severity, finding.hosts) == (Outcome.FAILED, Severity.ERROR, ("node1", "node3"))
    assert words in finding.summary
    assert "publishes it as MASTER_ADDR" in finding.summary
    assert "--local-addr" in finding.fix


def test_full_name_that_nobody_uses_is_a_warning():
    _, (finding,) = ask("fqdn-forward", nodes(lookup(HEAD, "10.0.0.1"), lookup(HEAD), MASTER_ADDR="10.0.0.1"))
    assert finding.severity is Severity.WARNING


MASTER = "master.example"


def reported(*each):
    return nodes(*(lookup(MASTER, *addresses) for addresses in each), use="master")


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(reported(("10.9.0.1",), ("10.9.0.1",)), id="the same"),
        pytest.param(reported(("10.9.0.1", "10.9.0.2"), ("10.9.0.2", "10.9.0.1")), id="another order"),
        pytest.param(reported(("10.0.0.1",), ("fd00::1",)), id="two addresses of the first node"),
        pytest.param(reported(("127.0.1.1",), ("10.0.0.1",), ("10.0.0.1",)), id="Debian's name on the first node"),
        pytest.param(nodes(lookup("10.0.0.1", "10.0.0.1"), lookup("10.0.0.1"), use="master"), id="no name"),
        pytest.param(nodes(lookup("localhost", "127.0.0.1"), use="master"), id="localhost is another check's"),
    ],
)
def test_master_is_one_host(facts):
    check, findings = ask("master-resolve", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_master_is_not_given():
    check, findings = ask("master-resolve", nodes(None, None))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (lookup(MASTER), "does not resolve: torch silently retries"),
        (lookup(MASTER, timed_out=True), "did not resolve within 2 s: a name server does not respond"),
    ],
)
def test_master_does_not_resolve(one, words):
    check, (finding,) = ask("master-resolve", nodes(lookup(MASTER, "10.0.0.1"), one, use="master"))
    assert (check.outcome, finding.severity, finding.hosts) == (Outcome.FAILED, Severity.ERROR, ("node1",))
    assert words in finding.summary
    assert f"getent hosts {MASTER}" in finding.fix


def test_master_does_not_resolve_on_the_only_node():
    check, (finding,) = ask("master-resolve", nodes(lookup(MASTER), use="master", launcher=Launcher.NONE))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)


def test_master_is_another_host_for_some():
    facts = reported(("10.9.0.1",), ("10.9.0.1",), ("10.9.0.7",))
    _, (finding,) = ask("master-resolve", facts)
    assert finding.summary == f"{MASTER} resolves to 10.9.0.7 on node2, 10.9.0.1 on 2 others"
    assert (finding.severity, finding.hosts, finding.confidence) == (Severity.ERROR, ("node2",), Confidence.HIGH)


def test_master_is_another_host_for_each():
    _, (finding,) = ask("master-resolve", reported(("10.9.0.1",), ("10.9.0.7",)))
    assert (finding.hosts, finding.confidence) == (("node0", "node1"), Confidence.LOW)


def test_master_means_some_others_to_one_node():
    _, (finding,) = ask("master-resolve", reported(("10.9.0.1",), ("10.9.0.1",), ("10.9.0.1", "10.9.0.7")))
    assert finding.severity is Severity.WARNING
    assert "may go to different hosts" in finding.summary


def test_another_node_that_finds_the_master_on_itself_is_reported():
    _, (finding,) = ask("master-resolve", reported(("10.0.0.1",), ("10.0.0.1",), ("127.0.1.1",)))
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node2",))


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (names("10.0.0.4"), Outcome.PASSED),
        (names("10.0.0.4", duration_s=0.9, reverse_s=1.0), Outcome.PASSED),
        (names("10.0.0.4", reverse_s=None), Outcome.PASSED),
        (names(timed_out=True, duration_s=2.0), Outcome.PASSED),
        (names("10.0.0.4", duration_s=1.2), Outcome.FAILED),
        (names("10.0.0.4", reverse_s=1.1), Outcome.FAILED),
        (names("10.0.0.4", reverse_s=2.001), Outcome.FAILED),
        (names("10.0.0.4", master=lookup(MASTER, "10.9.0.1", duration_s=1.5)), Outcome.FAILED),
    ],
)
def test_slow_look_ups(facts, outcome):
    check, findings = ask("rdns-slow", node(names=facts))
    assert check.outcome is outcome
    assert [finding.severity for finding in findings] == [Severity.WARNING] * (outcome is Outcome.FAILED)


def test_slow_look_ups_are_named():
    check, (finding,) = ask("rdns-slow", node(names=names("10.0.0.4", duration_s=1.25, reverse_s=2.0)))
    assert finding.evidence == ("host name: 1.2 s", "names of own addresses: no response within 2 s")
    assert check.seen == "host name: 1.2 s, names of own addresses: no response within 2 s"
