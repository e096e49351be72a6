"""Jobs that are right stay without a verdict, and end with the status that torchrun alone gives them."""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, check_finished, rows_of, run

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]

OUTLAST = {"clean_slow_rank0", "clean_rank0_evaluates", "clean_groups_apart"}
"""Their ranks wait for longer than the hang timeout of a few seconds."""
RUNS = [pytest.param(job, int(ranks), level, id=f"{job}-{level}") for job, ranks, level in rows_of("healthy")]


@pytest.mark.parametrize(("job", "ranks", "level"), RUNS)
def test_a_healthy_job_stays_without_verdict(job: str, ranks: int, level: str, tmp_path: Path) -> None:
    options = () if job in OUTLAST else PATIENT
    ran = run(job, tmp_path, "--debug-level", level, *options, ranks=ranks)
    assert ran.report["verdict"] is None
    check_finished(ran)
    if job == "clean_slow_rank0":
        lanes = ran.report["data"]["timeline"]["lanes"]
        assert ["checkpoint" in {span["kind"] for span in lane["coarse"]} for lane in lanes] == [True, False, False]
