"""The checks on launching, in steps that a real Slurm starts on two hosts."""

import json
import sys

import pytest

CHECKS = (
    "env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "srun-cpus", "master-numeric",
    "master-loopback", "rdzv-host", "port-range",
)  # fmt: skip
CHECK_ENV = (sys.executable, "-m", "ddpdoctor", "check-env", *CHECKS, "--format", "json", "--no-torch")
TASK_A_RANK = ("srun", "-N2", "--ntasks-per-node=2")
TASK_A_NODE = ("srun", "-N2", "--ntasks-per-node=1")
STORE = {"MASTER_ADDR": "dd0", "MASTER_PORT": "29500"}


def check_env(slurm, *step, script='exec "$@"', more=(), **variables):
    """Run the command in every task of a step, after a line of shell; return the report."""
    done = slurm.run(*step, "sh", "-c", script, "sh", *CHECK_ENV, *more, check=False, **variables)
    start = done.stdout.find("{")
    assert start >= 0, done.stderr
    report = json.loads(done.stdout[start:])
    return {finding["kind"]: finding for finding in report["findings"]}, report


def outcomes(report):
    return {check["id"]: check["outcome"] for check in report["checks"]}


@pytest.mark.parametrize("step", [TASK_A_RANK, TASK_A_NODE])
def test_steps_as_they_should_be(slurm, step):
    findings, report = check_env(slurm, *step, **STORE)
    assert findings == {}
    assert outcomes(report)["rank-set"] == outcomes(report)["slurm-shape"] == "passed"


def test_ranks_made_from_slurm(slurm):
    made = 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec "$@"'
    findings, report = check_env(slurm, *TASK_A_RANK, script=made, **STORE)
    assert findings == {}
    assert outcomes(report)["env-complete"] == "passed"


def test_more_ranks_than_tasks(slurm):
    findings, _ = check_env(slurm, *TASK_A_RANK, script='RANK=$SLURM_PROCID WORLD_SIZE=8 exec "$@"', **STORE)
    assert findings["slurm-shape"]["severity"] == "error"
    assert findings["slurm-shape"]["ranks"] == [0, 1, 2, 3]
    assert "WORLD_SIZE is 8, but srun started 4 tasks" in findings["slurm-shape"]["summary"]


def test_one_rank_for_all(slurm):
    findings, _ = check_env(slurm, *TASK_A_RANK, **STORE, RANK="0", WORLD_SIZE="4")
    assert findings["rank-set"]["summary"].startswith("rank 0 is used by more than one process")
    assert findings["rank-set"]["evidence"][1] == "no process has ranks 1-3"
    assert "RANK is not SLURM_PROCID" in findings["slurm-shape"]["summary"]


def test_a_task_that_never_comes(slurm):
    never = 'if [ "$SLURM_PROCID" = 3 ]; then exit 0; fi; exec "$@"'
    findings, _ = check_env(slurm, *TASK_A_RANK, script=never, more=("--timeout", "20"), **STORE)
    assert findings["rank-set"]["ranks"] == [3]
    assert findings["rank-set"]["hosts"] == ["dd1"]
    assert "rank 3 of 4 on dd1 did not respond" in findings["rank-set"]["summary"]


def test_a_variable_of_one_node(slurm):
    differs = 'if [ "$SLURM_NODEID" = 1 ]; then export MASTER_PORT=29501; fi; exec "$@"'
    findings, _ = check_env(slurm, *TASK_A_RANK, script=differs, **STORE)
    assert findings["ws-same"]["severity"] == "error"
    assert "MASTER_PORT is 29500 on ranks 0 and 1, 29501 on ranks 2 and 3" in findings["ws-same"]["summary"]


def test_each_node_looks_for_the_store_on_itself(slurm):
    findings, _ = check_env(slurm, *TASK_A_NODE, **(STORE | {"MASTER_ADDR": "localhost"}))
    assert (findings["master-loopback"]["severity"], findings["master-loopback"]["hosts"]) == ("error", ["dd1"])
    assert findings["master-loopback"]["fix"] == "export MASTER_ADDR=dd0 on all nodes"
    assert findings["rdzv-host"]["hosts"] == ["dd0", "dd1"]


def test_a_rendezvous_that_nobody_hosts(slurm):
    slurm.hosts.ip(0, "addr", "add", "10.99.0.1/24", "dev", "lo")
    given = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "10.99.0.1:29400", "PET_NNODES": "2"}
    findings, _ = check_env(slurm, *TASK_A_NODE, **given)
    assert (findings["rdzv-host"]["severity"], findings["rdzv-host"]["hosts"]) == ("error", ["dd0"])
    assert "no host matches 10.99.0.1" in findings["rdzv-host"]["summary"]


def test_two_rendezvous(slurm):
    own = 'PET_RDZV_ID=$SLURM_NODEID PET_NNODES=2 exec "$@"'
    findings, _ = check_env(slurm, *TASK_A_NODE, script=own)
    assert "PET_RDZV_ID is 0 on dd0, 1 on dd1" in findings["rdzv-id-same"]["summary"]


def test_one_cpu_for_a_task(slurm):
    narrow = 'exec taskset -c 0 "$@"'
    findings, _ = check_env(slurm, *TASK_A_NODE, "--cpus-per-task=2", script=narrow, **STORE)
    assert "requested 2 CPUs per task, but srun lets a task use only 1" in findings["srun-cpus"]["summary"]


def test_a_batch_script_is_no_rank(slurm):
    script = slurm.folder / "batch.sh"
    output = slurm.folder / "batch.out"
    command = " ".join(f"'{word}'" for word in CHECK_ENV)
    script.write_text(f"#!/bin/sh\nexport MASTER_ADDR=dd0 MASTER_PORT=29500 WORLD_SIZE=16\nexec {command}\n")
    slurm.run("sbatch", "-W", "-N2", "--ntasks-per-node=2", "-o", str(output), str(script), check=False)
    report = json.loads(output.read_text())
    assert report["findings"] == []
    assert outcomes(report)["slurm-shape"] == "skipped"


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")


def test_torchrun_on_each_node(slurm):
    meet = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=dd0:29400", "--rdzv-id=7")
    findings, report = check_env(slurm, *TASK_A_NODE, *TORCHRUN, *meet)
    assert findings == {}
    ran = {kind for kind, outcome in outcomes(report).items() if outcome == "passed"}
    assert ran >= {"env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "master-loopback"}


def test_a_torchrun_on_each_node_that_trains_by_itself(slurm):
    done = slurm.run(*TASK_A_NODE, "--label", *TORCHRUN, "--standalone", *CHECK_ENV, check=False)
    of_first = "".join(line.removeprefix("0: ") + "\n" for line in done.stdout.splitlines() if line.startswith("0: "))
    (finding,) = json.loads(of_first)["findings"]
    assert (finding["kind"], finding["severity"]) == ("slurm-shape", "warning")
    assert finding["summary"] == "torchrun counts 1 node, but the step has 2: they do not all train together"
