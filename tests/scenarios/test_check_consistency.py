"""`check-consistency` on real ranks: a healthy model, and faults that it names; and the call in the user's own code."""

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from tests.scenarios.running import JOBS, SCHEMA, clean_environment, free_port, grids_of, marked_lines

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = JOBS.parents[2]
LIMIT_S = 250


def launch(ranks: int, *arguments: str, **env: str) -> tuple[int, str, str]:
    """Run a command under torchrun, in the folder of the jobs; return its status and streams."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*torchrun, f"--master-port={free_port()}", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=JOBS, env=clean_environment(PYTHONPATH=str(ROOT), **env), start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stdout, stderr


def check(ranks: int, *options: str, **env: str) -> tuple[int, dict[str, Any], str]:
    """Run the verb; return its status, its report and stderr."""
    status, stdout, stderr = launch(ranks, "-m", "ddpdoctor", "check-consistency", *options, "--format", "json", **env)
    report = json.loads(stdout) if stdout else {}
    if report:
        jsonschema.validate(report, SCHEMA)
    return status, report, stderr


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {check["code"]: check["outcome"] for check in report["checks"]}


def test_a_healthy_model_is_one_model_with_the_gradient_of_one_process_and_the_same_bits_twice():
    status, report, stderr = check(
        2, "--model", "consistency_models:counted_at_the_end", "--batch", "consistency_models:make_batch",
        "--steps", "2", "--reference", "--twice",
    )  # fmt: skip
    assert status == 0, stderr
    # Else their destructors can deadlock with a thread of the group.
    assert set(re.findall(r"DDP models: \d+", stderr)) == {"DDP models: 0"}
    assert report["findings"] == []
    assert {"DD501", "DD503", "DD505", "DD506", "DD509", "DD510"} <= {
        code for code, outcome in outcomes(report).items() if outcome == "passed"
    }
    (one, two) = report["data"]["trial"]["reference"]["steps"]
    assert all(row["whole"] <= 10 * row["rounding"] for step in (one, two) for row in step["tensors"])
    assert report["data"]["trial"]["reference"]["float64"]
    (grid,) = grids_of(report).values()  # no grid of replicas: they are equal
    assert (grid.row_name, grid.columns) == ("parameter", ("step 1", "step 2"))


def test_sparse_gradients_are_those_of_one_process_too():
    status, report, stderr = check(
        2, "--model", "consistency_models:with_sparse_gradients", "--steps", "1", "--reference"
    )  # fmt: skip
    assert (status, outcomes(report)["DD509"]) == (0, "passed"), stderr


def test_models_that_differ_are_named_and_ddp_is_not_tried():
    status, report, _ = check(3, "--model", "consistency_models:wider_on_one_rank", "--timeout", "60s")
    verdict = report["verdict"]
    assert (status, verdict["code"], verdict["ranks"], verdict["tensor"]) == (1, "DD506", [1], "0.weight")
    assert report["data"]["trial"]["consistency"] is None


def test_a_step_that_fails_on_one_rank_ends_all_with_its_line():
    status, report, stderr = check(
        2, "--model", "consistency_models:healthy", "--batch", "consistency_models:make_batch", "--step",
        "consistency_models:fails_on_one_rank",
    )  # fmt: skip
    assert report == {}
    assert status != 0
    assert "rank 1: --step consistency_models:fails_on_one_rank failed in step 1: ValueError: no such label" in stderr
    assert f"consistency_models.py:{marked_lines('consistency_models')[-1]} in fails_on_one_rank" in stderr
    assert stderr.count("ValueError: no such label") == 1


def test_the_call_in_the_users_own_code_names_tensors_and_ranks():
    status, stdout, stderr = launch(3, str(JOBS / "consistency_call.py"))
    assert status == 0, stderr
    assert stdout == (
        "replicas differ on ranks 0-2: optimizer setting lr: ranks 0 and 1: 0.1, rank 2: 0.2; "
        "parameter 0.bias: ranks 0 and 1 against rank 2\n"
    )
