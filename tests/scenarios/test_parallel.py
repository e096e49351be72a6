"""Jobs that spread a model over ranks by FSDP, tensor and pipeline parallelism, DTensor, ZeRO, or checkpoints of those.

Healthy, they stay without a verdict. With a fault on the last rank, that rank is blamed, and waits are reported by the
dimension of the mesh.
"""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, check_finished, marked_lines, rows_of, run

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]
TRAINED = ("fsdp2", "hybrid", "fsdp_tensor", "fsdp1", "tensor", "zero")
"""Those with an optimizer, which makes four steps."""
KINDS = (*TRAINED, "dtensor", "functions", "compiled", "pipeline", "saved")
FAULTS = [(kind, fault, int(ranks), level, seen) for kind, fault, ranks, level, seen in rows_of("parallel")]


@pytest.mark.parametrize(("kind", "fault", "ranks", "level", "seen"), FAULTS)
def test_the_fault_is_found(kind: str, fault: str, ranks: int, level: str, seen: str, tmp_path: Path) -> None:
    options = ("--debug-level", level, *(() if fault == "stuck" else PATIENT))
    ran = run("parallel", tmp_path / "run", *options, ranks=ranks, args=(kind, fault, str(tmp_path)))
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], verdict["ranks"]) == (fault, [ranks - 1]), verdict
    assert verdict["where"][0]["line"] in marked_lines("parallel"), verdict
    assert any(seen in sentence for sentence in verdict["evidence"]), verdict


def test_a_step_that_one_rank_leaves_out_is_a_mismatch(tmp_path: Path) -> None:
    ran = run("parallel", tmp_path / "run", "--debug-level", "OFF", ranks=2, args=("dtensor", "skip"))
    verdict = ran.report["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == ("mismatch", [1]), verdict
    assert "DTensor (all_gather_into_tensor)" in verdict["summary"], verdict


@pytest.mark.parametrize(("kind", "ranks", "dims"), [("hybrid", [1, 3], "replicate"), ("tensor", [0, 1, 2, 3], "tp")])
def test_what_a_mesh_holds_alike_is_compared(kind: str, ranks: list[int], dims: str, tmp_path: Path) -> None:
    args = (kind, "param-drift")
    ran = run("parallel", tmp_path / "run", "--debug-level", "OFF", *PATIENT, ranks=4, args=args)
    verdict = ran.report["verdict"]
    assert (verdict["kind"], verdict["tensor"]) == ("param-drift", "0.norm.bias"), verdict
    assert set(verdict["ranks"]) <= set(ranks), verdict
    assert 3 in verdict["ranks"], verdict
    assert any(
        f"should have equal values along the {dims} dimension of the mesh" in one for one in verdict["evidence"]
    ), verdict


@pytest.mark.parametrize("level", ["DETAIL", "OFF"])
def test_healthy_jobs_stay_without_verdict(level: str, tmp_path: Path) -> None:
    args = (",".join(KINDS), "none", str(tmp_path / "saved"))
    ran = run("parallel", tmp_path / "run", "--debug-level", level, *PATIENT, ranks=4, args=args)
    assert ran.report["verdict"] is None, ran.report["verdict"]
    check_finished(ran)
    compared = [stream["group"] for stream in ran.report["data"]["consistency"]["streams"] if stream["compared"]]
    assert {"mesh replicate", "mesh tp"} <= set(compared), compared
    steps = 4 * len(TRAINED)
    assert {rank["step"] for rank in ran.report["ranks"]} == {steps}, ran.report["ranks"]
    assert "DD901" not in {finding["code"] for finding in ran.report["findings"]}
