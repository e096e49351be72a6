"""Two real runs compared: of a phase that changed, the change is told from the noise."""

from pathlib import Path

import pytest

from ddpdoctor.cli.report import read_run
from ddpdoctor.diagnose.compare import compare_reports
from ddpdoctor.model.codec import decode
from ddpdoctor.model.tuning import SpeedComparison
from tests.scenarios.speed.catalog import run_way

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.alone, pytest.mark.nightly]


def test_input_that_workers_prepare_takes_less_of_the_step(tmp_path: Path) -> None:
    runs = []
    for way in ("no_workers", "hidden"):
        (tmp_path / way).mkdir()
        runs.append((way, read_run(run_way(f"input_bound {way}", tmp_path / way).folder)))
    found = decode(SpeedComparison, compare_reports(*runs).data["comparison"])
    data = next(one.time for one in found.phases if one.phase == "data loading")
    assert data.is_change
    assert data.high_ms < 0
    assert {one.name: (one.first, one.second) for one in found.unequal}["loader workers per rank"][0] == "0"
