"""DD231 and DD232: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from tests.rules.environment.build import ask, failed, node, process

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
        (
            {"PET_NODE_RANK": "2", "PET_NNODES": "2"},
            "PET_NODE_RANK is not below PET_NNODES, which is 2: node",
        ),
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
