"""DD231 and DD232: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.collect.network import read_names, read_network
from ddpdoctor.collect.system import ReadingPlan
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import Launcher, TorchBuild
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.registry import rules_of
from tests.machines import load_machine
from tests.rules.environment.build import ask, failed, fleet, judge_fleet, node, process
from tests.rules.environment.launches import BY_HAND, KUBERNETES, SLURM, TORCHRUN, listed, recorded, torchrun_fleet

ALL = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def without(*names, **more):
    return {name: value for name, value in ALL.items() if name not in names} | more


def ask_one(kind, variables):
    return ask(kind, node(processes=[process(None, **variables)]))


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        (ALL, Outcome.PASSED),
        (without("RANK", "WORLD_SIZE"), Outcome.PASSED),
        (without("RANK", "WORLD_SIZE", "MASTER_PORT"), Outcome.PASSED),
        (without("RANK", SLURM_JOB_ID="7"), Outcome.PASSED),
        (without("RANK", OMPI_COMM_WORLD_RANK="1"), Outcome.PASSED),
        (ALL | {"RANK": " 1 "}, Outcome.PASSED),
    ],
)
def test_complete(variables, outcome):
    check, findings = ask_one("env-complete", variables)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "severity", "summary", "fix"),
    [
        (without("MASTER_PORT"), Severity.ERROR, "MASTER_PORT is not set: init_process", "MASTER_PORT=29500"),
        (without("MASTER_ADDR"), Severity.ERROR, "MASTER_ADDR is not set", "MASTER_ADDR=127.0.0.1"),
        (without("WORLD_SIZE"), Severity.ERROR, '"environment variable WORLD_SIZE expected', "WORLD_SIZE=1"),
        (without("MASTER_ADDR", "MASTER_PORT"), Severity.ERROR, "MASTER_ADDR and MASTER_PORT are not set", "torchrun"),
        (without("RANK"), Severity.WARNING, "RANK is not set", "RANK=0"),
        (without("MASTER_ADDR", SLURM_PROCID="0"), Severity.WARNING, "MASTER_ADDR is not set", "MASTER_ADDR="),
        (
            without("MASTER_ADDR", SLURM_PROCID="0", SLURM_JOB_NODELIST="n[1-2]"),
            Severity.WARNING, "MASTER_ADDR is not set", '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        ),
        (without("WORLD_SIZE", SLURM_NTASKS="4", SLURM_PROCID="0"), Severity.WARNING, "WORLD_SIZE", "=$SLURM_NTASKS"),
        (ALL | {"RANK": ""}, Severity.WARNING, "RANK is not set", "RANK=0"),
        (ALL | {"RANK": "node0"}, Severity.ERROR, "RANK is 'node0', which is not an integer", "export RANK"),
        (ALL | {"MASTER_PORT": "tcp"}, Severity.ERROR, "MASTER_PORT is 'tcp'", "export MASTER_PORT"),
        (ALL | {"WORLD_SIZE": "2.0"}, Severity.ERROR, "WORLD_SIZE is '2.0'", "export WORLD_SIZE"),
    ],
)  # fmt: skip
def test_incomplete(variables, severity, summary, fix):
    check, (finding,) = ask_one("env-complete", variables)
    assert (check.outcome, finding.severity) == (failed(severity), severity)
    assert summary in finding.summary
    assert fix in finding.fix


def test_empty_is_said_to_be_not_set():
    _, (finding,) = ask_one("env-complete", ALL | {"MASTER_ADDR": ""})
    assert finding.severity is Severity.ERROR
    assert "MASTER_ADDR is empty, which counts as unset" in finding.evidence


def test_ranks_with_the_same_gap_are_one_finding():
    processes = [process(rank, **without("MASTER_PORT", RANK=str(rank))) for rank in range(3)]
    _, (finding,) = ask("env-complete", node(processes=processes))
    assert finding.ranks == (0, 1, 2)


RANGE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"MASTER_ADDR": "node0"}, Outcome.SKIPPED),
        (RANGE, Outcome.PASSED),
        ({"RANK": "5"}, Outcome.PASSED),
        ({"RANK": "x", "WORLD_SIZE": "2"}, Outcome.PASSED),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}, Outcome.PASSED),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, Outcome.PASSED),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "1:4"}, Outcome.PASSED),
        ({"PET_NODE_RANK": "2", "PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d"}, Outcome.PASSED),
        ({"MASTER_PORT": "65535"}, Outcome.PASSED),
        ({"MASTER_PORT": "1"}, Outcome.PASSED),
    ],
)
def test_in_range(variables, outcome):
    check, findings = ask_one("env-range", variables)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("change", "summary"),
    [
        ({"RANK": "2"}, "RANK is not below WORLD_SIZE, which is 2: ranks range from 0 to 1"),
        ({"RANK": "-1"}, "RANK is negative"),
        ({"RANK": "-1", "WORLD_SIZE": ""}, "RANK is negative"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is not below LOCAL_WORLD_SIZE, which is 2: local"),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "1"}, "GROUP_RANK is not below GROUP_WORLD_SIZE, which is 1"),
        ({"PET_NODE_RANK": "2", "PET_NNODES": "2"}, "PET_NODE_RANK is not below PET_NNODES, which is 2: node"),
        ({"WORLD_SIZE": "0", "RANK": "", "LOCAL_WORLD_SIZE": ""}, "WORLD_SIZE is 0: it must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "4"}, "a node cannot have more ranks than the job"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536: ports range from 1 to 65535"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is -1: ports range from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0, which means any free port"),
        ({"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT is 70000"),
    ],
)
def test_out_of_range(change, summary):
    check, (finding,) = ask_one("env-range", RANGE | change)
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert summary in finding.summary
    assert finding.fix


def test_a_wrong_size_of_all_ranks_is_one_finding():
    processes = [process(rank, WORLD_SIZE="0", RANK=str(rank)) for rank in range(2)]
    _, (finding,) = ask("env-range", node(processes=processes))
    assert finding.ranks == (0, 1)


def test_all_ranks_above_the_world_are_one_finding():
    processes = [process(rank, WORLD_SIZE="2", RANK=str(rank)) for rank in range(8)]
    _, (finding,) = ask("env-range", node(processes=processes))
    assert (finding.ranks, finding.evidence) == ((2, 3, 4, 5, 6, 7), ("RANK is 2",))


# No launch that is as it should be, and no plain shell, trips a rule on launching.


KINDS = (
    "env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "srun-cpus", "gpus-per-task",
    "k8s", "master-numeric", "master-loopback", "rdzv-host", "port-range",
)  # fmt: skip
NOTED = {"Lightning's own processes": {"port-range"}, "the first pod of an old PyTorchJob": set()}
"""Notes that such a launch may have."""


def judge(facts):
    judged = judge_fleet(facts, [rule for rule in rules_of("environment") if rule.kind in KINDS])
    assert not [check for check in judged.checks if check.outcome is Outcome.CRASHED]
    assert len(judged.checks) == len(KINDS)
    return judged


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    found = judge(fleet(node(processes=[listed(BY_HAND[name])]))).findings
    assert {finding.kind for finding in found} <= NOTED.get(name, set())


def test_a_shell_without_a_launcher_passes_nothing():
    outcomes = {check.id: check.outcome for check in judge(fleet(node(processes=[listed({})]))).checks}
    assert set(outcomes.values()) == {Outcome.SKIPPED}


@pytest.mark.parametrize("state", [None, *SLURM])
def test_slurm(tmp_path, state):
    judged = judge(recorded_fleet("slurm-step", tmp_path, *([state] if state else [])))
    assert judged.findings == ()


@pytest.mark.parametrize("state", ["task-a-node", "batch"])
def test_torchrun_to_come(tmp_path, state):
    exported = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "GPUS_PER_NODE": "8"}
    assert judge(recorded_fleet("slurm-step", tmp_path, state, env=exported)).findings == ()


def test_ranks_of_a_step(tmp_path):
    ranks = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    assert judge(recorded_fleet("slurm-step", tmp_path, "task-a-rank", env=ranks)).findings == ()


@pytest.mark.parametrize("states", KUBERNETES)
def test_kubernetes(tmp_path, states):
    assert judge(recorded_fleet("k8s-pod", tmp_path, *states)).findings == ()


def test_torchrun_over_two_nodes():
    assert judge(torchrun_fleet()).findings == ()


def recorded_fleet(name, folder, *states, env=None):
    system = load_machine(name, folder, *states, env=env)
    plan = ReadingPlan(sections=frozenset())
    return fleet(
        node(
            system.calls.hostname(),
            processes=[recorded(name, folder, *states, env=env)],
            names=read_names(system, plan),
            network=read_network(system, plan),
        )
    )


# DD233: healthy, each failing form, missing facts, near misses.


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
    assert finding.evidence == ("no message from node3", "these answered: node1.cluster and node2.cluster")
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


# DD236, DD237 and DD238: healthy, each failing form, missing facts, near misses.


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
RANKS = JOB | {
    "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1",
}  # fmt: skip
"""A task of two on each of two nodes."""
NODES = RANKS | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
"""A task for each node."""
BATCH = JOB | {"SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0",
               "SLURM_NODEID": "0"}  # fmt: skip
TWO = TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}
ONE = TWO | {"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"}


def ask_slurm(kind, variables, **more):
    sections = {name: more.pop(name) for name in ("torch",) if name in more}
    return ask(kind, node(processes=[process(1, **more, **variables)], **sections))


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"SLURM_JOB_ID": "7"}, Outcome.SKIPPED),
        (BATCH, Outcome.SKIPPED),
        (BATCH | {"WORLD_SIZE": "16", "MASTER_ADDR": "n1"}, Outcome.SKIPPED),
        (BATCH | {"SLURM_STEP_ID": "4294967291", "WORLD_SIZE": "16"}, Outcome.SKIPPED),
        (RANKS, Outcome.PASSED),
        (RANKS | {"WORLD_SIZE": "4", "RANK": "1"}, Outcome.PASSED),
        (RANKS | {"WORLD_SIZE": "4"}, Outcome.PASSED),
        (RANKS | {"SLURM_GPUS_ON_NODE": "2"}, Outcome.PASSED),
        (NODES | {"WORLD_SIZE": "16", "MASTER_ADDR": "n1"}, Outcome.PASSED),
        (NODES | TWO, Outcome.PASSED),
        (NODES | TWO | {"SLURM_GPUS_ON_NODE": "2"}, Outcome.PASSED),
        (RANKS | {"SLURM_STEP_TASKS_PER_NODE": "broken"}, Outcome.PASSED),
        (JOB | ONE | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
         Outcome.PASSED),
    ],
)  # fmt: skip
def test_shapes_that_fit(variables, outcome):
    check, findings = ask_slurm("slurm-shape", variables)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "severity", "summary"),
    [
        (RANKS | {"WORLD_SIZE": "8", "RANK": "1"}, Severity.ERROR,
         "WORLD_SIZE is 8, but srun started 4 tasks: they wait for 4 ranks that never start"),
        (RANKS | {"WORLD_SIZE": "2", "RANK": "1"}, Severity.ERROR, "there are more tasks than ranks"),
        (RANKS | {"WORLD_SIZE": "8"}, Severity.WARNING, "WORLD_SIZE is 8, but srun started 4 tasks"),
        (NODES | {"WORLD_SIZE": "16", "RANK": "1"}, Severity.ERROR, "WORLD_SIZE is 16, but srun started 2 tasks"),
        (RANKS | {"WORLD_SIZE": "4", "RANK": "0"}, Severity.WARNING, "RANK is not SLURM_PROCID"),
        (RANKS | TWO, Severity.WARNING, "srun starts torchrun 2 times per node"),
        (NODES | ONE, Severity.WARNING, "torchrun counts 1 node, but the step has 2"),
        (BATCH | ONE, Severity.WARNING,
         "the job has 2 nodes, but torchrun uses one: it was started without srun"),
        (NODES | ONE | {"SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, Severity.WARNING,
         "the job has 2 nodes, but torchrun uses one: the step has one task"),
        (RANKS | {"SLURM_GPUS_ON_NODE": "1"}, Severity.WARNING, "2 ranks run on this node, but Slurm gave it 1 GPU"),
        (NODES | TWO | {"LOCAL_WORLD_SIZE": "8", "SLURM_GPUS_ON_NODE": "4"}, Severity.WARNING,
         "8 ranks run on this node, but Slurm gave it 4 GPUs"),
        (RANKS | {"SLURM_JOB_NUM_NODES": "4"}, Severity.INFO, "the step runs on 2 of the 4 nodes of the job"),
        ({name: value for name, value in RANKS.items() if name != "SLURM_JOB_NUM_NODES"}
         | {"SLURM_JOB_NODELIST": "n[1-3]"}, Severity.INFO, "the step runs on 2 of the 3 nodes of the job"),
    ],
)  # fmt: skip
def test_shapes_that_do_not(variables, severity, summary):
    check, (finding,) = ask_slurm("slurm-shape", variables)
    assert (check.outcome, finding.severity) == (failed(severity), severity)
    assert summary in finding.summary
    assert finding.ranks == (1,)
    assert "srun" in finding.fix or "--gpus-per-node" in finding.fix or "SLURM_PROCID" in finding.fix


def test_tasks_that_share_a_rank_are_one_finding():
    processes = [process(0, **RANKS, RANK="0", WORLD_SIZE="4", pid=pid) for pid in (1, 2)]
    assert len(ask("slurm-shape", node(processes=processes))[1]) == 1


CPUS = RANKS | {"SLURM_CPUS_PER_TASK": "8"}


@pytest.mark.parametrize(
    ("variables", "cpus", "outcome"),
    [
        ({}, (0,), Outcome.SKIPPED),
        (BATCH | {"SLURM_CPUS_PER_TASK": "8"}, (0,), Outcome.SKIPPED),
        (RANKS, (0,), Outcome.SKIPPED),
        (CPUS, tuple(range(8)), Outcome.PASSED),
        (CPUS, tuple(range(64)), Outcome.PASSED),
    ],
)
def test_enough_cpus(variables, cpus, outcome):
    check, findings = ask_slurm("srun-cpus", variables, cpus=cpus)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("more", "evidence"),
    [({}, "SRUN_CPUS_PER_TASK is not set"), ({"SRUN_CPUS_PER_TASK": "1"}, "SRUN_CPUS_PER_TASK is 1")],
)
def test_one_cpu_for_a_task(more, evidence):
    check, (finding,) = ask_slurm("srun-cpus", CPUS | more, cpus=(3,))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.WARNING)
    assert "requested 8 CPUs per task, but srun lets a task use only 1" in finding.summary
    assert finding.evidence == (evidence,)
    assert finding.fix == "export SRUN_CPUS_PER_TASK=8 in the batch script, or srun --cpus-per-task=8"


def test_ranks_of_torchrun_share_the_cpus_of_their_task():
    halves = [process(rank, cpus=range(4 * rank, 4 * rank + 4), **(NODES | TWO | CPUS)) for rank in range(2)]
    assert ask("srun-cpus", node(processes=halves))[0].outcome is Outcome.PASSED
    quarters = [process(rank, cpus=(rank,), **(NODES | TWO | CPUS)) for rank in range(2)]
    assert "use only 2" in ask("srun-cpus", node(processes=quarters))[1][0].summary


def torch(count):
    return TorchBuild(
        version="2.9.0", import_error=None, cuda="12.8", hip=None, cuda_available=True, cuda_error=None,
        device_count=count, devices=(), arch_list=(), nccl=None, nccl_libraries=(), gloo=True, peers=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "more", "outcome"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "1"}, {}, Outcome.SKIPPED),
        (NODES | TWO | {"CUDA_VISIBLE_DEVICES": "0"}, {}, Outcome.SKIPPED),
        (RANKS, {}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": ""}, {}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "-1"}, {}, Outcome.SKIPPED),
        (RANKS, {"torch": torch(0)}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "0,1"}, {}, Outcome.PASSED),
        (RANKS, {"torch": torch(2)}, Outcome.PASSED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_LOCALID": "0"}, {}, Outcome.PASSED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}, {}, Outcome.PASSED),
    ],
)
def test_enough_gpus(variables, more, outcome):
    check, findings = ask_slurm("gpus-per-task", variables, **more)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "more", "fix"),
    [
        (RANKS | {"CUDA_VISIBLE_DEVICES": "1"}, {}, "--gpus-per-node=N"),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "GPU-1", "SLURM_GPUS_ON_NODE": "8"}, {}, "srun --gpus-per-node=8"),
        (RANKS, {"torch": torch(1)}, "--gpus-per-node=N"),
    ],
)
def test_one_gpu_for_a_task(variables, more, fix):
    check, (finding,) = ask_slurm("gpus-per-task", variables, **more)
    assert (check.outcome, finding.severity, finding.confidence) == (
        Outcome.FAILED, Severity.WARNING, Confidence.MEDIUM,
    )  # fmt: skip
    assert "each task sees only 1 GPU, so cuda:LOCAL_RANK does not exist" in finding.summary
    assert fix in finding.fix


def test_what_slurm_really_sets_for_gpus_per_task(tmp_path):
    facts = node(processes=[recorded("slurm-step", tmp_path, "gpus-per-task")])
    _, (finding,) = ask("gpus-per-task", facts)
    assert finding.evidence == ("SLURM_LOCALID=1, CUDA_VISIBLE_DEVICES=1",)


def test_what_slurm_really_sets_for_cpus_per_task(tmp_path):
    narrow = recorded("slurm-step", tmp_path, "batch-step")
    check, _ = ask("srun-cpus", node(processes=[narrow]))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "2 CPUs requested per task, 4 usable")


# DD239: healthy, each failing form, missing facts, near misses.


def pod(folder, *states, env=None):
    system = load_machine("k8s-pod", folder, *states, env=env)
    plan = ReadingPlan(sections=frozenset())
    processes = [recorded("k8s-pod", folder, *states, env=env)]
    return node(processes=processes, names=read_names(system, plan), network=read_network(system, plan))


def test_no_pod():
    check, findings = ask("k8s", node(processes=[process(None, PET_NNODES="2", GROUP_WORLD_SIZE="1")]))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


@pytest.mark.parametrize("states", [(), ("torchrun",), ("pytorchjob",), ("elastic",)])
def test_pods_as_they_should_be(tmp_path, states):
    check, findings = ask("k8s", pod(tmp_path, *states))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_a_pod_of_which_nothing_else_is_known():
    dead = Unread(why=Why.TIMEOUT, reason="no answer")
    facts = node(processes=[process(None, KUBERNETES_SERVICE_HOST="10.96.0.1")], names=dead, network=dead)
    check, findings = ask("k8s", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "a pod without an operator's variables"


@pytest.mark.parametrize(
    ("states", "summary", "fix"),
    [
        (("unpublished",), "the master's name llama-node-0-0.llama does not resolve in this pod",
         """kubectl patch service llama -p '{"spec":{"publishNotReadyAddresses":true}}'"""),
        (("istio",), "Istio's proxy intercepts all connections of this pod", 'sidecar.istio.io/inject: "false"'),
        (("host-network",), "the pod uses the host's network and /etc/hosts", "GLOO_SOCKET_IFNAME=eth0"),
    ],
)  # fmt: skip
def test_broken_pods(tmp_path, states, summary, fix):
    check, (finding,) = ask("k8s", pod(tmp_path, *states))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.WARNING)
    assert summary in finding.summary
    assert fix in finding.fix


def test_a_command_line_that_overrules_the_operator(tmp_path):
    _, findings = ask("k8s", pod(tmp_path, "torchrun", "standalone"))
    assert [finding.summary for finding in findings] == [
        "the operator set PET_NNODES=2, but torchrun counts 1: each pod trains alone",
        "the operator set PET_NPROC_PER_NODE=8, but torchrun started 4 on this pod",
    ]
    assert findings[0].fix.startswith("remove --nnodes and --standalone")


@pytest.mark.parametrize(("nnodes", "found"), [("1:4", 0), ("2", 0), ("3:4", 1), ("auto", 0)])
def test_an_elastic_range(tmp_path, nnodes, found):
    _, findings = ask("k8s", pod(tmp_path, "torchrun", env={"PET_NNODES": nnodes}))
    assert len(findings) == found
