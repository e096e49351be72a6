"""check-env on a machine with a GPU: it reads the GPUs, gives them work, and finds no error that is none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MUST_RUN = {"gpu-count", "other-procs", "throttle", "compute-mode", "gpu-alloc"}


@pytest.mark.timeout(400)
def test_a_gpu_is_read_and_does_its_work():
    command = [sys.executable, "-m", "ddpdoctor", "check-env", "--deep", "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    report = json.loads(ran.stdout)
    checks = {check["id"]: check for check in report["checks"]}
    for kind in MUST_RUN:
        assert checks[kind]["outcome"] in {"passed", "failed"}, checks[kind]
    assert checks["gpu-alloc"]["outcome"] == "passed", report["findings"]
    assert str(torch.cuda.device_count()) in checks["gpu-alloc"]["seen"]


def test_nothing_is_crashed_or_timed_out():
    command = [sys.executable, "-m", "ddpdoctor", "check-env", "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    outcomes = {check["id"]: check["outcome"] for check in json.loads(ran.stdout)["checks"]}
    assert "crashed" not in outcomes.values(), outcomes
    assert outcomes["gpu-count"] == "passed"


def test_a_hidden_gpu_is_told_and_no_fault(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-m", "ddpdoctor", "check-env", "cvd-valid", "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    (finding,) = json.loads(ran.stdout)["findings"]
    assert (ran.returncode, finding["severity"]) == (0, "info")
