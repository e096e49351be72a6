"""No launch that is as it should be, and no plain shell, trips a rule on launching."""

import pytest

from ddpdoctor.collect.network.interfaces import read_network
from ddpdoctor.collect.network.names import read_names
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.model.findings import Outcome
from ddpdoctor.rules.registry import rules_of
from tests.machines import load_machine
from tests.rules.environment.build import fleet, judge_fleet, node
from tests.rules.environment.launches import BY_HAND, KUBERNETES, SLURM, listed, recorded, torchrun_fleet

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
