"""The checks on launching, on real processes: shells with variables of every kind, and torchrun."""

import json
import subprocess
import sys

import pytest

from tests.scenarios.running import clean_environment, free_port

pytestmark = pytest.mark.usefixtures("preloaded_python")

CHECKS = (
    "env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "srun-cpus", "gpus-per-task",
    "k8s", "master-numeric", "master-loopback", "rdzv-host", "port-range",
)  # fmt: skip
CHECK_ENV = (sys.executable, "-m", "ddpdoctor", "check-env", *CHECKS, "--format", "json", "--no-torch")
RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def check_env(*command, **variables):
    """Run the command and return its report."""
    environment = {
        name: value for name, value in clean_environment().items()
        if not name.startswith(("SLURM_", "SRUN_", "KUBERNETES_", "TORCHELASTIC_", "NCCL_", "GROUP_", "LOCAL_"))
    }  # fmt: skip
    done = subprocess.run(
        command or CHECK_ENV, check=False, capture_output=True, text=True, timeout=200, env=environment | variables
    )
    assert done.stdout.startswith("{"), done.stderr
    return json.loads(done.stdout)


def found(report):
    return {finding["kind"]: finding for finding in report["findings"]}


def test_a_plain_shell_has_nothing_to_check():
    report = check_env()
    assert {check["id"]: check["outcome"] for check in report["checks"]} == dict.fromkeys(CHECKS, "skipped")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (RANK, {}),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {}),
        (RANK | {"MASTER_ADDR": "6841231"}, {"master-numeric": "error"}),
        (RANK | {"MASTER_PORT": ""}, {"env-complete": "error"}),
        (RANK | {"RANK": "2"}, {"env-range": "error"}),
        (RANK | {"MASTER_PORT": "80"}, {"port-range": "warning"}),
        (
            RANK | {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "1", "RANK": "1"},
            {"master-loopback": "error"},
        ),
        (
            RANK | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
                    "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "100000"},
            {"srun-cpus": "warning"},
        ),
    ],
)  # fmt: skip
def test_variables_of_a_shell(variables, expected):
    report = check_env(**variables)
    assert {kind: finding["severity"] for kind, finding in found(report).items()} == expected


def test_torchrun_on_one_host_is_healthy():
    report = check_env(*torchrun(), *CHECK_ENV)
    assert report["findings"] == []
    outcomes = {check["id"]: check["outcome"] for check in report["checks"]}
    assert [outcomes[kind] for kind in ("env-complete", "env-range", "rank-set", "ws-same")] == ["passed"] * 4


def test_ranks_that_disagree_under_torchrun():
    change = 'if [ "$RANK" = 2 ]; then export NCCL_ALGO=Ring; fi; exec "$@"'
    report = check_env(*torchrun(), "sh", "-c", change, "sh", *CHECK_ENV)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["severity"], finding["ranks"]) == ("ws-same", "error", [2])
    assert finding["summary"].startswith("NCCL_ALGO is Ring on rank 2, unset on 2 others")


def torchrun():
    """Return the beginning of a command line."""
    module = (sys.executable, "-m", "torch.distributed.run")
    return (*module, "--nproc-per-node=3", f"--master-port={free_port()}", "--no-python")
