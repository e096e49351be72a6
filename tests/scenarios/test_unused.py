"""A backward that leaves gradients out on one rank: the parameters are named, and no drift that follows from it."""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, run, words_of

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize(("level", "how", "code"), [("OFF", "silent", "DD604"), ("DETAIL", "logged", "DD602")])
def test_gradients_that_one_rank_leaves_out(tmp_path: Path, level: str, how: str, code: str) -> None:
    report = run("unused", tmp_path, "--debug-level", level, *PATIENT, ranks=2, args=(how,)).report
    (found,) = report["findings"]
    assert (found["code"], found["ranks"], found["confidence"]) == (code, [1], "high"), found
    assert "extra.weight, extra.bias (2 of 6 parameters)" in found["summary"]
    assert "find_unused_parameters=True" in found["fix"]
    job = Path(words_of("unused")[0]).read_text().splitlines()
    assert "model(" in job[found["where"][0]["line"] - 1] or "backward()" in job[found["where"][0]["line"] - 1]


def test_a_part_that_is_left_out_as_ddp_was_set_is_no_finding(tmp_path: Path) -> None:
    assert run("unused", tmp_path, *PATIENT, ranks=2, args=("set",)).report["findings"] == []
