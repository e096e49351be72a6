"""What makes a job slow is found on real ranks: its kind, the ranks, and the line."""

from pathlib import Path

import pytest

from tests.scenarios.speed.catalog import FAULTS, fault_lines, named_lines, run_way

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize("case", FAULTS)
def test_what_makes_a_job_slow_is_found(case: str, tmp_path: Path) -> None:
    fault = FAULTS[case]
    ran = run_way(case, tmp_path, **dict(fault.env))
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert verdict["kind"] in {fault.kind, *fault.also}, verdict
    assert tuple(verdict["ranks"]) == fault.ranks, verdict
    lines = fault_lines(case)
    if lines and verdict["kind"] == fault.kind:
        assert lines & named_lines(verdict, case), verdict
        assert fault.says in " ".join([verdict["summary"], *verdict["evidence"], verdict["fix"]])
    assert ran.report["job"]["status"] == "finished", ran.stderr
