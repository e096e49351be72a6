"""On a GPU: prints are those of the CPU, and a rank's own gradients are looked at without waiting for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpdoctor.recorder.fingerprint import prints
from ddpdoctor.recorder.print_wire import UNTOLD
from tests.scenarios.running import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
JOB = Path(__file__).parent / "jobs" / "gradients_gloo.py"


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        *(torch.randn(250, 250) for _ in range(8)),
        *(torch.randn(200) for _ in range(50)),
        torch.randn(5_000_000).bfloat16(),
        torch.randn(7, 3000, 11).permute(2, 0, 1),
        torch.randint(0, 9, (129 * 509,)),
        torch.randn(100_001).half()[1:],
        torch.randn(64, 130, 9, 9).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.empty(0),
        torch.randn(40, 40) > 0,
    ]


def test_prints_do_not_depend_on_the_device() -> None:
    here = tensors()
    assert prints(here) == prints([tensor.cuda() for tensor in here])


def test_in_the_capture_of_a_graph_nothing_is_told() -> None:
    tensor = torch.randn(9, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = tensor * 2
        told = prints([tensor])
    graph.replay()
    torch.cuda.synchronize()
    assert told == UNTOLD
    assert bool((double == tensor * 2).all())


def test_nan_of_one_rank_is_named(tmp_path: Path) -> None:
    verdict = run(JOB, tmp_path, "--debug-level", "OFF", ranks=2, SEEDED="1").report["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["tensor"]) == ("nonfinite-grad", [1], "2.weight"), verdict


def test_a_job_on_a_gpu_stays_silent(tmp_path: Path) -> None:
    ran = run(JOB, tmp_path, "--debug-level", "OFF", ranks=2, SEEDED="0")
    assert ran.report["verdict"] is None, ran.report["verdict"]
    outcomes = {check["id"]: check["outcome"] for check in ran.report["checks"]}
    assert {outcomes[code] for code in ("DD501", "DD503", "DD504", "DD505")} == {"passed"}, ran.report["checks"]
