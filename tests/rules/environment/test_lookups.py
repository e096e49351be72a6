import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import Launcher
from tests.rules.environment.build import ask, fleet, node, process
from tests.rules.environment.network import interface, lookup, names, network

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
