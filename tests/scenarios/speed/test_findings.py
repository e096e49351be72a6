"""What takes the time of a step is found on real ranks, and healthy jobs that look alike stay silent."""

import re
from pathlib import Path

import pytest

from tests.scenarios.running import JOBS, PATIENT, run

pytestmark = pytest.mark.usefixtures("preloaded_python")

FAULTS = {
    "accumulation every_part": ("accumulation-sync", [0, 1]),
    "accumulation forward_outside": ("accumulation-sync", [0, 1]),
    "buckets one_for_each_tensor": ("bucket-size", [0, 1]),
    "buffers mask": ("buffer-broadcast", [0, 1]),
    "buffers queue": ("buffer-broadcast", [0, 1]),
    "by_hand one_by_one": ("hand-made-reduce", [0, 1]),
    "by_hand over_rank_0": ("hand-made-reduce", [0, 1]),
    "communication head": ("communication-bound", [0, 1]),
    "communication table": ("communication-bound", [0, 1]),
    "data_parallel trains": ("data-parallel", [0, 1]),
    "data_parallel inside": ("data-parallel", [0, 1]),
    "each_step gathers": ("sync-each-step", [0, 1]),
    "each_step many_metrics": ("sync-each-step", [0, 1]),
    "gc_pauses collects": ("gc-pauses", [0, 1]),
    "gc_pauses keeps": ("gc-pauses", [0, 1]),
    "imbalance lengths": ("imbalance", [0, 1]),
    "imbalance crops": ("imbalance", [0, 1]),
    "input_bound no_workers": ("input-bound", [0, 1]),
    "input_bound collates": ("input-bound", [0, 1]),
    "input_bound starved": ("input-bound", [0, 1]),
    "input_bound behind": ("input-bound", [0, 1]),
    "periodic_stall epochs": ("periodic-stall", [0, 1]),
    "rank_zero evaluates": ("rank-zero-work", [0]),
    "rank_zero logs": ("rank-zero-work", [0]),
    "straggler reads": ("straggler", [1]),
    "straggler attends": ("straggler", [1]),
    "straggler logs": ("straggler", [1]),
}
"""By job and its way to be slow: the kind of the verdict, and the ranks that it names."""
HEALTHY = (
    "buffers norms", "buffers kept", "by_hand flat", "by_hand local_sgd", "data_parallel unwraps",
    "each_step averages_the_loss", "each_step every_20", "gc_pauses young", "imbalance sorted_by_length",
    "input_bound cheap", "input_bound hidden", "periodic_stall once", "quiet small", "quiet normalized",
    "quiet warms_up", "quiet short", "rank_zero saves_once", "rank_zero all_evaluate", "straggler pauses",
)  # fmt: skip


def lines_of(job: str, way: str) -> set[int]:
    """Return the lines of a job that are marked as the cause, for all of its ways or for this one."""
    lines = (JOBS / "speed" / f"{job}.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if re.search(rf"# FAULT( {way})?$", line)}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found_with_its_ranks_and_line(fault: str, tmp_path: Path) -> None:
    job, way = fault.split()
    ran = run(f"speed/{job}", tmp_path, "--speed", *PATIENT, ranks=2, args=(way,))
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], verdict["ranks"]) == FAULTS[fault], ran.stderr
    marked = lines_of(job, way)
    assert not marked or marked & {place["line"] for place in verdict["where"]}, verdict
    assert ran.report["job"]["status"] == "finished"


@pytest.mark.parametrize("job", HEALTHY)
def test_a_healthy_job_that_looks_alike_is_left_alone(job: str, tmp_path: Path) -> None:
    name, way = job.split()
    ran = run(f"speed/{name}", tmp_path, "--speed", *PATIENT, ranks=2, args=(way,))
    assert ran.report["verdict"] is None, ran.stderr
    assert ran.report["job"]["status"] == "finished"


def test_the_critical_column_of_a_real_job_adds_up_to_its_step(tmp_path: Path) -> None:
    ran = run("speed/rank_zero", tmp_path, "--speed", *PATIENT, ranks=2, args=("logs",))
    budget = ran.report["data"]["speed"]["budget"]
    total = sum(row["critical_ms"] for row in budget["phases"])
    assert total == pytest.approx(budget["wall_ms"], rel=0.03)
    assert "time of a step" in ran.stderr


def test_without_the_option_the_budget_is_in_the_report_only(tmp_path: Path) -> None:
    ran = run("speed/rank_zero", tmp_path, *PATIENT, ranks=2, args=("logs",))
    assert ran.report["data"]["speed"]["budget"]["steps"] > 10
    assert ran.report["data"]["speed"]["asked"] is False
    assert "time of a step" not in ran.stderr
    assert not any(finding["code"].startswith("DD8") for finding in ran.report["findings"])
