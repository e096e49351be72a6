"""DD205 and DD217: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.launches import TORCHRUN, network


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"MASTER_ADDR": "node0"}, Outcome.PASSED),
        ({"MASTER_ADDR": "10.0.0.1"}, Outcome.PASSED),
        ({"MASTER_ADDR": "6841231a"}, Outcome.PASSED),
        ({"MASTER_ADDR": "ip-10-0-0-1"}, Outcome.PASSED),
        ({"MASTER_ADDR": "fd00::1"}, Outcome.PASSED),
        ({"PET_RDZV_ENDPOINT": "node0:29400"}, Outcome.PASSED),
    ],
)
def test_a_name(variables, outcome):
    check, findings = ask("master-numeric", node(processes=[process(0, **variables)]))
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "summary", "fix"),
    [
        ({"MASTER_ADDR": "6841231"}, "6841231, which is read as the address 0.104.99.143", "MASTER_ADDR="),
        ({"MASTER_ADDR": "0"}, "the address 0.0.0.0", "NAME_OF_RANK_0_HOST"),
        ({"MASTER_ADDR": "010"}, "the address 0.0.0.8", "export MASTER_ADDR="),
        ({"MASTER_ADDR": "0x7f000001"}, "the address 127.0.0.1", "export MASTER_ADDR="),
        ({"MASTER_ADDR": "99999999999"}, "which is neither a host nor an address", "export MASTER_ADDR="),
        ({"PET_MASTER_ADDR": "12"}, "PET_MASTER_ADDR is 12, which is read as the address 0.0.0.12", "PET_MASTER_ADDR="),
        ({"PET_RDZV_ENDPOINT": "12:29400"}, "PET_RDZV_ENDPOINT is 12", "PET_RDZV_ENDPOINT=NAME_OF_RANK_0_HOST:29400"),
        (
            {"MASTER_ADDR": "12", "SLURM_JOB_NODELIST": "n[1-2]"},
            "0.0.0.12", 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        ),
    ],
)  # fmt: skip
def test_a_number(variables, summary, fix):
    check, (finding,) = ask("master-numeric", node(processes=[process(0, **variables)]))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert summary in finding.summary
    assert fix in finding.fix


def test_a_job_id_is_recognized():
    processes = [process(rank, MASTER_ADDR="6841231", SLURM_JOB_ID="6841231") for rank in range(2)]
    _, (finding,) = ask("master-numeric", node(processes=processes))
    assert finding.evidence == ("it is the Slurm job id, SLURM_JOB_ID",)
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"MASTER_PORT": "29500"}, Outcome.PASSED),
        ({"MASTER_PORT": "1024"}, Outcome.PASSED),
        ({"MASTER_PORT": "32767"}, Outcome.PASSED),
        ({"MASTER_PORT": "61000"}, Outcome.PASSED),
        ({"MASTER_PORT": "none"}, Outcome.SKIPPED),
        (TORCHRUN, Outcome.SKIPPED),
        (TORCHRUN | {"PET_MASTER_PORT": "45000"}, Outcome.SKIPPED),
    ],
)
def test_a_good_port(variables, outcome):
    check, findings = ask("port-range", node(processes=[process(0, **variables)], network=network()))
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "severity", "summary", "fix"),
    [
        (
            {"MASTER_PORT": "45000"},
            Severity.INFO,
            "MASTER_PORT is 45000, an ephemeral port",
            "MASTER_PORT=29500",
        ),
        ({"MASTER_PORT": "32768"}, Severity.INFO, "an ephemeral port", "MASTER_PORT=29500"),
        ({"MASTER_PORT": "60999"}, Severity.INFO, "an ephemeral port", "MASTER_PORT=29500"),
        ({"PET_MASTER_PORT": "45000"}, Severity.INFO, "PET_MASTER_PORT is 45000", "PET_MASTER_PORT=29500"),
        ({"PET_RDZV_ENDPOINT": "node0:45000"}, Severity.INFO, "PET_RDZV_ENDPOINT is 45000", "=HOST:29500"),
        ({"MASTER_PORT": "1023"}, Severity.WARNING, "only root can listen on ports below 1024", "MASTER_PORT=29500"),
    ],
)
def test_a_port_of_others(variables, severity, summary, fix):
    _, (finding,) = ask("port-range", node(processes=[process(0, **variables)], network=network()))
    assert finding.severity is severity
    assert summary in finding.summary
    assert fix in finding.fix


def test_another_range_counts():
    narrow = network(local_ports=(50000, 51000))
    _, findings = ask("port-range", node(processes=[process(0, MASTER_PORT="45000")], network=narrow))
    assert findings == ()


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (network(local_ports=None), Outcome.PASSED),
        (Unread(why=Why.TIMEOUT, reason="no answer"), Outcome.INCONCLUSIVE),
        (Unread(why=Why.ABSENT, reason="no network"), Outcome.SKIPPED),
    ],
)
def test_an_unknown_range(facts, outcome):
    check, findings = ask("port-range", node(processes=[process(0, MASTER_PORT="45000")], network=facts))
    assert (check.outcome, findings) == (outcome, ())
