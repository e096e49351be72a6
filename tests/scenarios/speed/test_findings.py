"""What takes the time of a step is found on real ranks, and healthy jobs that look alike stay silent."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.report.blocks import Bars, read_content
from ddpdoctor.report.formats import parse_report
from tests.scenarios.running import PATIENT, run
from tests.scenarios.speed.catalog import FAULTS, HEALTHY, NOT_KEPT, NOT_THAT, fault_lines, named_lines, run_way

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]


NEEDS_FREE_CORES = {"buckets one_for_all"}
"""Where a rank waits for a core, it cannot be told whether larger buckets cost time."""


def cases(named: Iterable[str]) -> list[Any]:
    alone, live = pytest.mark.alone, pytest.mark.live
    marks = {case: [alone] * (case in NEEDS_FREE_CORES) + [live] * (case in NOT_KEPT) for case in named}
    return [pytest.param(case, marks=found) for case, found in marks.items()]


@pytest.mark.parametrize("case", cases(FAULTS))
def test_the_fault_is_found_with_its_ranks_and_line(case: str, tmp_path: Path) -> None:
    fault = FAULTS[case]
    ran = run_way(case, tmp_path)
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert verdict["kind"] in {fault.kind, *fault.also}, verdict
    assert tuple(verdict["ranks"]) == fault.ranks, verdict
    if verdict["kind"] == fault.kind:
        lines = fault_lines(case)
        assert not lines or lines & named_lines(verdict, case), verdict
        assert fault.says in " ".join([verdict["summary"], *verdict["evidence"], verdict["fix"]])
    assert ran.report["job"]["status"] == "finished", ran.stderr


@pytest.mark.parametrize("case", cases(HEALTHY))
def test_a_healthy_job_that_looks_alike_is_left_alone(case: str, tmp_path: Path) -> None:
    ran = run_way(case, tmp_path)
    assert ran.report["verdict"] is None, ran.report["verdict"]
    assert ran.report["job"]["status"] == "finished", ran.stderr


@pytest.mark.parametrize("case", NOT_THAT)
def test_a_job_is_not_slow_for_a_reason_that_it_only_looks_like(case: str, tmp_path: Path) -> None:
    ran = run_way(case, tmp_path)
    assert NOT_THAT[case] not in {finding["kind"] for finding in ran.report["findings"]}
    assert ran.report["job"]["status"] == "finished", ran.stderr


def test_the_critical_column_of_a_real_job_adds_up_to_its_step(tmp_path: Path) -> None:
    ran = run("speed/rank_zero", tmp_path, "--speed", *PATIENT, ranks=2, args=("logs",))
    budget = ran.report["data"]["speed"]["budget"]
    total = sum(row["critical_ms"] for row in budget["phases"])
    assert total == pytest.approx(budget["wall_ms"], rel=0.03)
    assert "time of a step" in ran.stderr
    content = read_content(parse_report(json.dumps(ran.report)))
    (bars,) = (block for section in content.sections for block in section if isinstance(block, Bars))
    assert [name for name, _, _ in bars.rows] == ["rank 0", "rank 1"]
    for _, _, times_ms in bars.rows:
        assert sum(times_ms) == pytest.approx(budget["wall_ms"], rel=0.03)


def test_without_the_option_the_budget_is_in_the_report_only(tmp_path: Path) -> None:
    ran = run("speed/rank_zero", tmp_path, *PATIENT, ranks=2, args=("logs",))
    assert ran.report["data"]["speed"]["budget"]["steps"] > 10
    assert ran.report["data"]["speed"]["asked"] is False
    assert "time of a step" not in ran.stderr
    assert not any(finding["code"].startswith("DD8") for finding in ran.report["findings"])
