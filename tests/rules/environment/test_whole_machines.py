"""Recorded machines, from their files to what is said of them: a healthy one is silent, one fault is one finding."""

from dataclasses import replace
from functools import cache

import pytest

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.system import ReadingPlan, read_node
from ddpdoctor.diagnose.machines import read_expected
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.node import SECTIONS, Fleet, release
from ddpdoctor.model.reading import NOT_ASKED
from ddpdoctor.rules.registry import rules_of
from tests.golden import table
from tests.machines import shared_machine
from tests.nvml import load_nvml
from tests.rules.environment.build import fleet, judge_fleet, process


def test_numbers_of_a_version():
    assert release("2.13.0+cu130") == (2, 13, 0)
    assert release("580.95.05") == (580, 95, 5)
    assert release(None) == release("nightly") == ()


@pytest.mark.parametrize("text", ["torsh==2", "torch", "torch=2", "==2", "torch==2.13.*; rm", ""])
def test_what_is_no_expectation_is_refused(text):
    with pytest.raises(UserError, match="--expect-version is"):
        read_expected(text)


# Recorded machines through all collectors and all rules: a healthy one is silent, one fault is one finding.


WITH_GPUS = frozenset({"nvlink8", "roce8", "workstation2"})


@cache
def read(machine, *states):
    """Return the machine and what the collectors say of it."""
    system = shared_machine(machine, *states)
    return system, read_node(system, ReadingPlan(sections=frozenset(SECTIONS)), (read_process(system),))


def with_gpus(machine, nvml, states=()):
    """Return the machine as the collectors read it, with what NVML says in these states where it has GPUs."""
    system, node = read(machine, *states)
    if machine not in WITH_GPUS:
        return node
    *_, gpus = read_gpu_facts(load_nvml(machine, *nvml), system)
    return replace(node, gpus=gpus)


def findings_of(machine, states=(), nvml=()):
    judged = judge_fleet(Fleet(nodes=(with_gpus(machine, nvml, states),)), rules_of("environment"))
    assert [c.id for c in judged.checks if c.outcome in {Outcome.CRASHED, Outcome.INCONCLUSIVE}] == []
    return sorted(f"{finding.severity.value} {finding.kind}" for finding in judged.findings)


@pytest.mark.parametrize("machine", ["nvlink8", "container-nogpu"])
def test_a_rule_says_the_same_where_only_what_it_needs_was_read(machine):
    node = with_gpus(machine, ("ecc-off", "persistence-off"))
    for rule in rules_of("environment"):
        needed = replace(node, **{name: NOT_ASKED for name in SECTIONS if name not in rule.needs})
        assert judge_fleet(Fleet(nodes=(needed,)), [rule]) == judge_fleet(Fleet(nodes=(node,)), [rule]), rule.kind


# Versions, limits and clocks: a healthy one is reported nothing that its owner would call false.


FILES = ("versions", "torch_versions", "drivers", "limits", "memory", "shm", "processors", "clock")
PLAN = ReadingPlan(sections=frozenset({"software", "torch", "limits", "clock"}))


def reported(name, *states, **variables):
    """Return the kinds and severities of what the rules of versions, limits and clocks find on a recorded machine."""
    machine = shared_machine(name, *states)
    ranks = [process(variables and 0, cpus=machine.calls.cpus(), **variables)]
    node = read_node(machine, PLAN, tuple(ranks))
    rules = [
        rule
        for rule in rules_of("environment")
        if next(iter(rule.checks.values())).__module__.rpartition(".")[2] in FILES
    ]
    judged = judge_fleet(fleet(node), rules)
    assert not [check for check in judged.checks if check.outcome.value in {"crashed", "inconclusive"}]
    return [f"{one.severity.value} {one.kind}" for one in judged.findings]


test_rows = table("whole_machines", "ddpdoctor.rules.environment.versions", globals())
