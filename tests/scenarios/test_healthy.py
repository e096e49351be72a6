"""Jobs that are right stay without a verdict, and end with the status that torchrun alone gives them."""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, check_finished, run

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]

HEALTHY = (
    ("clean_plain", 2, "OFF"),
    ("clean_one_process", 1, "DETAIL"),
    ("clean_slow_rank0", 3, "DETAIL"),
    ("clean_rank0_evaluates", 3, "OFF"),
    ("clean_groups", 3, "DETAIL"),
    ("clean_groups_apart", 4, "OFF"),
    ("clean_point_to_point", 3, "OFF"),
    ("clean_call_sites", 4, "DETAIL"),
    ("clean_accumulate", 2, "OFF"),
    ("clean_join", 3, "DETAIL"),
    ("clean_spawn_address", 1, "OFF"),
    ("clean_two_models", 3, "DETAIL"),
    ("clean_caught_errors", 3, "OFF"),
    ("clean_compile", 2, "DETAIL"),
    ("clean_nested", 2, "OFF"),
    ("clean_accelerate", 2, "OFF"),
    ("clean_lightning", 2, "DETAIL"),
    ("clean_transformers", 2, "OFF"),
)
OUTLAST = {"clean_slow_rank0", "clean_rank0_evaluates", "clean_groups_apart"}
"""Their ranks wait for longer than the hang timeout of a few seconds."""
RUNS = [pytest.param(job, ranks, level, id=f"{job}-{level}") for job, ranks, level in HEALTHY]


@pytest.mark.parametrize(("job", "ranks", "level"), RUNS)
def test_a_healthy_job_stays_without_verdict(job: str, ranks: int, level: str, tmp_path: Path) -> None:
    options = () if job in OUTLAST else PATIENT
    ran = run(job, tmp_path, "--debug-level", level, *options, ranks=ranks)
    assert ran.report["verdict"] is None
    check_finished(ran)
    if job == "clean_slow_rank0":
        lanes = ran.report["data"]["timeline"]["lanes"]
        assert ["checkpoint" in {span["kind"] for span in lane["coarse"]} for lane in lanes] == [True, False, False]
