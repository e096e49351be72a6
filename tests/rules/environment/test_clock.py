"""Clocks over nodes, and whether nodes look alike."""

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import Clock, Launcher
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, failed, fleet, node, process
from tests.rules.environment.machine_facts import software, torch

PASSED, FAILED, SKIPPED = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def clocks(*offsets, loose=(), nnodes=None):
    nodes = [
        node(f"node{n}", index=n, processes=[process(n)], clock=Clock(synchronized=n not in loose, offset_s=offset))
        for n, offset in enumerate(offsets)
    ]
    return fleet(*nodes, launcher=Launcher.TORCHRUN, nnodes=nnodes or len(nodes))


@pytest.mark.parametrize(
    ("facts", "severity", "hosts", "confidence", "says"),
    [
        (clocks(None), None, (), None, ""),
        (clocks(None, loose=[0]), None, (), None, ""),
        (clocks(None, 0.2, -0.3), None, (), None, ""),
        (clocks(None, 1.0), None, (), None, ""),
        (
            clocks(None, 0.1, 2.5),
            WARNING,
            ("node2",),
            Confidence.HIGH,
            "The clock of node2 is 2.4 s ahead of the others",
        ),
        (
            clocks(None, 0.1, -20.0),
            ERROR,
            ("node2",),
            Confidence.HIGH,
            "The clock of node2 is 20.0 s behind the others",
        ),
        (
            clocks(None, 30.0, 30.1),
            ERROR,
            ("node0",),
            Confidence.HIGH,
            "The clock of node0 is 30.0 s behind the others",
        ),
        (
            clocks(None, 14.9),
            WARNING,
            ("node0", "node1"),
            Confidence.LOW,
            "of node1 is 14.9 s ahead of the clock of node0",
        ),
        (clocks(None, 15.0), ERROR, ("node0", "node1"), Confidence.LOW, "treats live nodes as dead"),
        (clocks(None, -40.0, loose=[1]), ERROR, ("node1",), Confidence.MEDIUM, "node1 is 40.0 s behind the others"),
        (clocks(None, -40.0, loose=[0]), ERROR, ("node0",), Confidence.MEDIUM, "node0 is 40.0 s ahead of the others"),
        (
            clocks(None, 0, 20, -20, 0),
            ERROR,
            ("node2", "node3"),
            Confidence.HIGH,
            "clocks of node2 and node3 are up to",
        ),
        (clocks(None, 0.01, loose=[1]), INFO, ("node1",), Confidence.HIGH, "they currently agree within 0.01 s"),
        (clocks(None, None, loose=[0, 1]), WARNING, ("node0", "node1"), Confidence.HIGH, "could not be compared"),
        (clocks(None, loose=[0], nnodes=2), WARNING, ("node0",), Confidence.HIGH, "could not be compared"),
        (clocks(None, None), None, (), None, ""),
    ],
)
def test_clock(facts, severity, hosts, confidence, says):
    check, findings = ask("clock", facts)
    assert check.outcome is (failed(severity) if severity else PASSED), check
    if severity:
        (finding,) = findings
        assert (finding.severity, finding.hosts, finding.confidence) == (severity, hosts, confidence)
        assert says in finding.summary
        assert finding.fix.startswith("sudo ")


def test_some_far_off_and_some_a_little():
    _, findings = ask("clock", clocks(None, 0, 0, 0, 3, 100))
    assert [(finding.severity, finding.hosts) for finding in findings] == [(ERROR, ("node5",)), (WARNING, ("node4",))]


def test_two_containers_of_one_name_are_two_clocks():
    pair = [
        node("box", index=n, clock=Clock(synchronized=None, offset_s=offset)) for n, offset in enumerate((None, 20))
    ]
    check, (finding,) = ask("clock", fleet(*pair, launcher=Launcher.TORCHRUN))
    assert (finding.severity, finding.hosts) == (ERROR, ("box",))
    assert check.seen == "2 clocks within 20.00 s"


def test_of_two_nodes_of_one_name_the_one_without_time_keeping_is_off():
    pair = [
        node("box", index=n, clock=Clock(synchronized=n == 0, offset_s=offset)) for n, offset in enumerate((None, 20))
    ]
    _, (finding,) = ask("clock", fleet(*pair, launcher=Launcher.TORCHRUN))
    assert (finding.confidence, finding.summary.partition(":")[0]) == (
        Confidence.MEDIUM, "The clock of box is 20.0 s ahead of the others",
    )  # fmt: skip


def test_a_clock_that_was_not_read():
    unread = Unread(why=Why.TIMEOUT, reason="clock did not answer within 2 s")
    assert ask("clock", node(clock=unread))[0].outcome is Outcome.INCONCLUSIVE
    check, _ = ask("clock", node(clock=Clock(synchronized=None, offset_s=None)))
    assert check.seen == "only one node; its kernel reports clock synchronization: not known"


def alike(count, **changed):
    sections = {"software": software(hosts_lines=("a1",)), "torch": torch()}
    return [node(f"node{n}", **{**sections, **changed.get(f"node{n}", {})}) for n in range(count)]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"torch": Unread(why=Why.NOT_ASKED, reason="x")}, None),
        ({"software": software(hosts_lines=None)}, None),
        (
            {"software": software(executable="/usr/bin/python3", hosts_lines=("a1",))},
            "Python /usr/bin/python3 on node2, /venv",
        ),
        (
            {"software": software(os_name="Debian 12", hosts_lines=("a1",))},
            "system Debian 12 on node2, Ubuntu 24.04 LTS on 3 o",
        ),
        ({"software": software(hosts_lines=("a1", "b2"))}, "/etc/hosts (digest) "),
        ({"torch": torch(path="/opt/torch/__init__.py")}, "torch /opt/torch/__init__.py on node2, "),
    ],
)
def test_rootfs_same(changed, says):
    check, findings = ask("rootfs-same", fleet(*alike(4, node2=changed)))
    assert check.outcome is (failed(*(one.severity for one in findings)) if says else PASSED)
    if says:
        (finding,) = findings
        assert (finding.severity, finding.hosts) == (INFO, ("node2",))
        assert finding.summary.startswith(says)


def test_host_files_that_name_their_own_node_only_are_alike():
    nodes = [
        node(f"node{n}", software=software(hosts_lines=("a1", f"own{n}"), hosts_own=(f"own{n}",))) for n in range(3)
    ]
    whole = node("node3", software=software(hosts_lines=("a1", "own0", "own1", "own2")))
    assert ask("rootfs-same", fleet(*nodes, whole))[0].outcome is PASSED


def test_rootfs_of_one_node():
    assert ask("rootfs-same", fleet(*alike(1)))[0].outcome is SKIPPED
