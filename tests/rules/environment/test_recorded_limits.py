"""Recorded machines as the collectors read them: a healthy one is reported nothing that its owner would call false."""

import pytest

from ddpdoctor.collect.node import ReadingPlan, read_node
from ddpdoctor.rules.registry import rules_of
from tests.machines import load_machine
from tests.rules.environment.build import fleet, judge_fleet, process

FILES = ("versions", "torch_versions", "drivers", "limits", "memory", "shm", "processors", "clock")
PLAN = ReadingPlan(sections=frozenset({"software", "torch", "limits", "clock"}))


def reported(machine, **variables):
    """Return the kinds and severities of what the rules of versions, limits and clocks find on a recorded machine."""
    ranks = [process(variables and 0, cpus=machine.calls.cpus(), **variables)]
    node = read_node(machine, PLAN, tuple(ranks))
    rules = [
        rule
        for rule in rules_of("environment")
        if next(iter(rule.checks.values())).__module__.rpartition(".")[2] in FILES
    ]
    judged = judge_fleet(fleet(node), rules)
    assert not [check for check in judged.checks if check.outcome.value in {"crashed", "inconclusive"}]
    return {finding.kind: finding.severity.value for finding in judged.findings}


@pytest.mark.parametrize(
    ("name", "states", "findings"),
    [
        ("nvlink8", (), {}),
        ("roce8", (), {}),
        ("workstation2", (), {"nofile": "warning"}),
        ("container-nogpu", (), {"shm": "warning"}),
        ("container-nogpu", ("limited",), dict.fromkeys(["shm", "cpu-quota", "mem-limit", "nproc-pids"], "warning")),
        ("container-nogpu", ("small",), {**dict.fromkeys(["nofile", "nproc-pids", "disk"], "warning"), "shm": "error"}),
        ("nvlink8", ("driver-mismatch",), {"driver-lib-mismatch": "error"}),
    ],
)  # fmt: skip
def test_what_is_said_of_a_machine(name, states, findings, tmp_path):
    assert reported(load_machine(name, tmp_path, *states)) == findings


def test_a_large_job_on_a_small_container(tmp_path):
    job = {"RANK": "0", "WORLD_SIZE": "1024", "LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}
    findings = reported(load_machine("container-nogpu", tmp_path, "small"), **job)
    assert (findings["nofile"], findings["somaxconn"]) == ("error", "warning")
