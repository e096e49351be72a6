"""DD233: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import Launcher
from tests.rules.environment.build import ask, fleet, node, process
from tests.rules.environment.launches import torchrun_fleet


def slurm(*hosts, world_size, missing=(), nodelist="node[1-3]", tasks="2(x3)", **more):
    """Return a step; each host is a name and its ranks."""
    variables = {"SLURM_STEP_NODELIST": nodelist, "SLURM_STEP_TASKS_PER_NODE": tasks} | more
    nodes = [
        node(name, index=index, processes=[process(rank, pid=100 + rank, **variables) for rank in ranks])
        for index, (name, ranks) in enumerate(hosts)
    ]
    return fleet(*nodes, launcher=Launcher.SLURM, world_size=world_size, missing=missing)


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (fleet(node(processes=[process(0)])), Outcome.SKIPPED),
        (fleet(node(processes=[process(0)]), launcher=Launcher.SLURM), Outcome.SKIPPED),
        (torchrun_fleet(), Outcome.PASSED),
        (torchrun_fleet(nodes=1), Outcome.PASSED),
        (slurm(("node1", (0, 1)), ("node2", (2, 3)), ("node3", (4, 5)), world_size=6), Outcome.PASSED),
        (slurm(("node1", (0, 2)), ("node2", (1, 3)), world_size=4, SLURM_DISTRIBUTION="cyclic"), Outcome.PASSED),
    ],
)
def test_all_there(facts, outcome):
    check, findings = ask("rank-set", facts)
    assert (check.outcome, findings) == (outcome, ())


def test_a_missing_node_has_its_name_from_slurm():
    facts = slurm(("node1.cluster", (0, 1)), ("node2.cluster", (2, 3)), world_size=6, missing=(4, 5))
    check, (finding,) = ask("rank-set", facts)
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert finding.summary == "ranks 4 and 5 of 6 on node3 did not respond: all others would wait for them"
    assert (finding.ranks, finding.hosts) == ((4, 5), ("node3",))
    assert finding.evidence == (
        "no message from node3",
        "these answered: node1.cluster and node2.cluster",
    )
    assert "ssh node3" in finding.fix


def test_a_missing_task_of_a_node_that_answered():
    facts = slurm(("node1.cluster", (0, 1)), ("node2.cluster", (2,)), world_size=4, missing=(3,), tasks="2(x2)",
                  nodelist="node[1-2]")  # fmt: skip
    _, (finding,) = ask("rank-set", facts)
    assert finding.summary == "rank 3 of 4 on node2.cluster did not respond: all others would wait for it"
    assert finding.evidence == ("these answered: node1.cluster and node2.cluster",)


@pytest.mark.parametrize(
    "more",
    [
        {"nodelist": "node[1-"},
        {"tasks": "2(x2)"},
        {"SLURM_DISTRIBUTION": "cyclic"},
        {"RANK": "0"},
        {"nodelist": "", "tasks": ""},
    ],
)
def test_no_host_is_guessed(more):
    _, (finding,) = ask("rank-set", slurm(("node1", (0, 1)), world_size=6, missing=(4, 5), **more))
    assert finding.summary.startswith("ranks 4 and 5 of 6 did not respond")
    assert finding.hosts == ()


def test_neighbors_tell_the_host():
    facts = fleet(
        node("a", processes=[process(rank) for rank in (0, 2)]), node("b", index=1, processes=[process(3)]),
        launcher=Launcher.TORCHRUN, world_size=4, missing=(1,),
    )  # fmt: skip
    _, (finding,) = ask("rank-set", facts)
    assert finding.summary == "rank 1 of 4 on a did not respond: all others would wait for it"


def test_ranks_that_the_launcher_does_not_miss_are_missed():
    facts = fleet(node("a", processes=[process(0)]), launcher=Launcher.SLURM, world_size=2)
    _, (finding,) = ask("rank-set", facts)
    assert finding.ranks == (1,)


def test_one_rank_twice():
    facts = fleet(
        node("a", processes=[process(0, pid=11)]), node("b", index=1, processes=[process(0, pid=22)]),
        launcher=Launcher.SLURM, world_size=2,
    )  # fmt: skip
    _, (finding,) = ask("rank-set", facts)
    assert finding.summary.startswith("rank 0 is used by more than one process")
    assert finding.evidence == ("rank 0: process 11 on a, process 22 on b", "no process has rank 1")
    assert (finding.ranks, finding.hosts) == ((0,), ("a", "b"))
    assert "RANK=$SLURM_PROCID" in finding.fix


def test_many_claims_are_not_all_listed():
    processes = [process(0, pid=rank) for rank in range(1000)]
    _, (finding,) = ask("rank-set", fleet(node("a", processes=processes), launcher=Launcher.SLURM, world_size=1000))
    assert finding.evidence[0] == "rank 0: process 0 on a, process 1 on a, process 2 on a, process 3 on a and 996 more"
    assert finding.evidence[1] == "no process has ranks 1-999"


def test_a_rank_above_the_world():
    facts = fleet(node("a", processes=[process(0), process(2)]), launcher=Launcher.SLURM, world_size=2)
    _, (finding,) = ask("rank-set", facts)
    assert finding.summary == "rank 2 is out of range: ranks range from 0 to 1"
    assert finding.ranks == (2,)


@pytest.mark.parametrize("missing", [(), (2,)])
def test_by_hand_nodes_are_counted_and_not_ranks(missing):
    nodes = [node(f"n{index}", index=index, processes=[process(8 * index, RANK=str(8 * index))]) for index in (0, 1)]
    facts = fleet(*nodes, launcher=Launcher.NNODES, world_size=2 + len(missing), missing=missing)
    check, findings = ask("rank-set", facts)
    assert check.seen == f"2 of {2 + len(missing)} nodes answered"
    expected = ["node 2 of 3 did not respond: all others would wait for it"] if missing else []
    assert [finding.summary for finding in findings] == expected


NUMBERED = {
    "each its own": ((0, 1), None, ()),
    "no number is given": ((None, None), None, ()),
    "two hosts are one": ((1, 1), "node 1 is used by more than one host", ("n0", "n1")),
    "a number too high": ((0, 2), "node 2 is out of range", ("n1",)),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_of_nodes(name):
    numbers, words, hosts = NUMBERED[name]
    given = [{} if number is None else {"PET_NODE_RANK": str(number)} for number in numbers]
    nodes = [node(f"n{index}", index=index, processes=[process(None, **one)]) for index, one in enumerate(given)]
    _, findings = ask("rank-set", fleet(*nodes, launcher=Launcher.NNODES, world_size=2))
    assert [finding.hosts for finding in findings] == ([hosts] if words else [])
    assert words is None or findings[0].summary.startswith(words)


def test_the_number_that_nobody_has_is_named():
    nodes = [node(f"n{index}", index=index, processes=[process(None, PET_NODE_RANK="0")]) for index in (0, 1)]
    _, (finding,) = ask("rank-set", fleet(*nodes, launcher=Launcher.NNODES, world_size=2))
    assert finding.evidence == ("node 0: n0 and n1", "no host has node 1")
    assert "--node-rank 0 to 1" in finding.fix
