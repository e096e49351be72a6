"""Jobs that look like a slow one, and lose no time, stay without verdict."""

from pathlib import Path

import pytest

from tests.scenarios.speed.catalog import HEALTHY, NOT_THAT, run_way

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize("case", HEALTHY)
def test_a_job_that_loses_no_time_stays_without_verdict(case: str, tmp_path: Path) -> None:
    ran = run_way(case, tmp_path)
    assert ran.report["verdict"] is None, ran.report["verdict"]
    assert ran.report["job"]["status"] == "finished", ran.stderr


@pytest.mark.parametrize("case", NOT_THAT)
def test_a_job_is_not_slow_for_a_reason_that_it_only_looks_like(case: str, tmp_path: Path) -> None:
    ran = run_way(case, tmp_path)
    assert NOT_THAT[case] not in {finding["kind"] for finding in ran.report["findings"]}
    assert ran.report["job"]["status"] == "finished", ran.stderr
