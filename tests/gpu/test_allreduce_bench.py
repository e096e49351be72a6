"""allreduce-bench over NCCL: alone on one GPU, and over all GPUs of the machine with right data and true clocks."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest
import torch

from tests.scenarios.running import SCHEMA, clean_environment

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.skipif(COUNT == 0, reason="needs a GPU"), pytest.mark.timeout(300)]


def bench(ranks, *options, **env):
    command = [
        sys.executable, "-m", "ddpdoctor", "allreduce-bench", f"--nproc-per-node={ranks}", "--budget=20s",
        "--format=json", *options,
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=280, env=clean_environment(**env)
    )
    assert done.returncode in {0, 1}, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    return report


def test_one_gpu_by_itself_has_no_bus_bandwidth():
    report = bench(1, "--max-size=64MiB")
    results = report["data"]["results"]
    assert report["data"]["settings"]["backend"] == "nccl"
    assert results
    assert all(row["busbw_gb_s"] is None and row["wrong"] == 0 for row in results)
    assert report["data"]["members"][0]["device_name"] == torch.cuda.get_device_name(0)


def test_two_ranks_on_one_gpu_move_right_data():
    """NCCL takes them for two hosts, over sockets: good for verdicts, and no measure of a link."""
    report = bench(2, "--backend=nccl", "--max-size=4MiB", "--collective=all", NCCL_MULTI_RANK_GPU_ENABLE="1")
    rows = report["data"]["results"]
    assert {row["collective"] for row in rows} >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert all(row["wrong"] == 0 for row in rows)


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
def test_all_gpus_give_more_than_memory_between_hosts_could():
    report = bench(COUNT, "--max-size=256MiB", "--dtype=float32,bfloat16")
    rows = report["data"]["results"]
    assert all(row["wrong"] == 0 for row in rows)
    assert report["data"]["curves"]
    assert not [note for note in report["data"]["notes"] if "clock" in note], report["data"]["notes"]
    transports = [log["transports"] for log in report["data"]["nccl_logs"]]
    assert all(transports), report["data"]["nccl_logs"]
