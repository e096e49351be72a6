"""Two real runs compared: the phase that changed is named, and a run compared with its own kind has no such phase."""

from pathlib import Path

import pytest

from ddpdoctor.cli.report import read_run
from ddpdoctor.diagnose.comparison import compare_reports
from ddpdoctor.report.comparison import comparison_content
from tests.scenarios.speed.catalog import run_way

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_the_phase_that_made_the_step_shorter_is_named(tmp_path: Path) -> None:
    runs = []
    for way in ("no_workers", "hidden"):
        (tmp_path / way).mkdir()
        runs.append((way, read_run(run_way(f"input_bound {way}", tmp_path / way).folder)))
    status = comparison_content(compare_reports(*runs)).status
    assert "shorter than one of A: data loading fell from" in status
