"""DD206: healthy, each failing form, missing facts, near misses."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import NOT_ASKED
from tests.rules.environment.build import ask, failed, fleet, node, process
from tests.rules.environment.launches import TORCHRUN, changed, lookup, names


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
    own = names("w0", "127.0.1.1", master=lookup("w0", "127.0.1.1"))
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
        (pair("node0", "node0", sections=(names("node0", "127.0.1.1", master=lookup("node0", "127.0.1.1")),
                                          names("node1", "10.0.0.2", master=lookup("node0", "10.0.0.1")))),
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
        names("node1", "10.0.0.2", master=lookup("node1", "10.0.0.2")),
        names("node1", "127.0.1.1", master=lookup("node1", "127.0.1.1")),
    ],
)
def test_each_node_gives_its_own_name(names_of_second):
    first = names("node0", "10.0.0.1", master=lookup("node0", "10.0.0.1"))
    _, (finding,) = ask("master-loopback", pair("node0", "node1", sections=(first, names_of_second)))
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node1",))
    assert "MASTER_ADDR is the host's own name, but rank 0 is on another" in finding.summary


def test_a_name_that_is_loopback_on_another_node():
    sections = (
        names("node0", "10.0.0.1", master=lookup("head", "10.0.0.1")),
        names("node1", "10.0.0.2", master=lookup("head", "127.0.0.1")),
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
    names("node0", "10.0.0.1", master=lookup("node1", "10.0.0.2")),
    names("node1", "127.0.1.1", master=lookup("node1", "127.0.1.1")),
)


def test_any_node_may_host_a_c10d_rendezvous():
    facts = pair("node1:29400", "node1:29400", variable="PET_RDZV_ENDPOINT", sections=SECOND)
    assert ask("master-loopback", facts)[1] == ()


def test_rank_0_hosts_the_store_of_ranks_that_are_numbered():
    facts = changed(changed(pair("node1", "node1", sections=SECOND), 0, RANK="0"), 1, RANK="1")
    _, (finding,) = ask("master-loopback", facts)
    assert "MASTER_ADDR is node1, but rank 0 is on another host" in finding.summary
    assert finding.fix == "export MASTER_ADDR=node0 on all nodes"
