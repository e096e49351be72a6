"""Each silent fault of replicas is found on real ranks, with its cause; beside it, the same done right stays silent.

Models are trained one after another in one job, so that a few starts of torch do for all of them. The first layer of a
model has the name of its fault: the tensor that is named tells which was found.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.running import JOBS, PATIENT, cell_of, grids_of, run

pytestmark = pytest.mark.usefixtures("preloaded_python")

NO_SYNC = "all forwards since the previous step ran under no_sync()"
SYNCHRONIZATION = (
    ("bypassed", "DD503", [0, 1, 2], 1, "the training step bypassed DDP"),
    ("accumulated", "DD503", [0, 1, 2], 1, NO_SYNC),
    ("unfrozen", "DD503", [0, 1, 2], 1, "added, replaced or unfrozen after wrapping"),
    ("clipped", "DD503", [1], 16, "rank 1 changed them after DDP had reduced them"),
)
PARAMETERS = (
    ("loaded", "DD501", [0], 8, "loaded only there or an in-place edit"),
    ("rate", "DD501", [2], 16, "lr is 0.1 on ranks 0 and 1, 0.05 on rank 2"),
    ("one_steps", "DD501", [0], 1, "0 steps on ranks 1 and 2, 20 steps on rank 0"),
    ("momentum", "DD501", [1], 4, "the optimizer state differs since step 4, with equal gradients"),
)
ALL = (
    "bypassed", "accumulated", "forward_only", "unfrozen", "clipped", "loaded", "rate", "one_steps", "momentum",
    "statistics", "dropped", "stale",
)  # fmt: skip


def test_gradients_that_are_not_synchronized(tmp_path: Path) -> None:
    names = ("bypassed", "accumulated", "forward_only", "unfrozen", "clipped")
    ran = run("replicas", tmp_path, *PATIENT, ranks=3, args=("wrong", *names))
    report = ran.report
    assert ran.status == 0  # without --fail-on
    check(report, SYNCHRONIZATION)
    found = finding(report, "accumulated")
    assert any("the same" in sentence and "forward_only.weight" in sentence for sentence in found["evidence"]), found
    assert (report["verdict"]["kind"], report["verdict"]["step"]) == ("grad-drift", 1)
    job = (JOBS / "replicas.py").read_text().splitlines()
    places = finding(report, "clipped")["where"]
    assert [(place["rank"], job[place["line"] - 1].strip()) for place in places] == [(1, "optimizer.step()")]
    grids = [grid for grid in grids_of(report).values() if "clipped.weight (gradient), from step 16 on" in grid.rows]
    (grid,) = grids
    assert cell_of(grid, "clipped.weight (gradient), from step 16 on", "rank 1") == "B"
    assert cell_of(grid, "clipped.weight (gradient), from step 16 on", "ranks 0, 2") == "A"


def test_parameters_that_drift_with_equal_gradients(tmp_path: Path) -> None:
    names = [name for name, *_ in PARAMETERS]
    ran = run("replicas", tmp_path, *PATIENT, "--fail-on", "error", ranks=3, args=("wrong", *names))
    report = ran.report
    assert (ran.status, report["job"]["exit_status"]) == (1, 0)
    check(report, PARAMETERS)
    assert {found["code"] for found in report["findings"]} == {"DD501", "DD505"}
    assert any("equal at step 4" in sentence for sentence in finding(report, "loaded")["evidence"])


def test_what_no_rank_does_unlike_the_others(tmp_path: Path) -> None:
    report = run("replicas", tmp_path, *PATIENT, ranks=2, args=("wrong", "statistics", "dropped", "stale")).report
    by_code = {found["code"]: found for found in report["findings"]}
    assert sorted(by_code) == ["DD502", "DD507", "DD508"], report["findings"]
    assert report["verdict"]["kind"] == "stale-optimizer"
    assert (by_code["DD502"]["tensor"], by_code["DD502"]["severity"]) == ("statistics.running_mean", "warning")
    assert by_code["DD507"]["severity"] == "info"


def test_of_two_ranks_it_cannot_be_determined_which(tmp_path: Path) -> None:
    ran = run("replicas", tmp_path, *PATIENT, ranks=2, args=("wrong", "loaded"))
    verdict = ran.report["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["confidence"]) == ("param-drift", [0, 1], "low"), verdict
    assert any("it is unknown which" in sentence for sentence in verdict["evidence"])
    assert (ran.status, ran.report["job"]["status"]) == (0, "finished")


def test_the_same_done_right_stays_silent(tmp_path: Path) -> None:
    report = run("replicas", tmp_path, *PATIENT, ranks=3, args=("right", *ALL)).report
    assert report["findings"] == []
    outcomes = {check["code"]: check["outcome"] for check in report["checks"]}
    assert {outcomes[f"DD50{n}"] for n in (1, 2, 3, 5, 7, 8)} == {"passed"}, report["checks"]


def test_differences_that_are_meant_are_no_alarm(tmp_path: Path) -> None:
    report = run("clean_meant", tmp_path, "--allow-different", "own.*", *PATIENT, ranks=3).report
    assert report["findings"] == []
    outcomes = {check["code"]: check["outcome"] for check in report["checks"]}
    assert {outcomes[f"DD50{n}"] for n in (1, 3, 5)} == {"passed"}, report["checks"]


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the first finding, worst first, that names a tensor of the layer."""
    found = [one for one in report["findings"] if (one["tensor"] or "").startswith(f"{name}.")]
    assert found, report["findings"]
    return found[0]


def check(report: dict[str, Any], rows: Any) -> None:
    """Hold the findings to rows of name, code, ranks, step and words of the cause."""
    for name, code, ranks, step, words in rows:
        found = finding(report, name)
        assert (found["code"], found["ranks"], found["step"]) == (code, ranks, step), found
        assert found["tensor"] == f"{name}.weight"
        assert words in found["summary"]
        assert found["fix"]


def test_models_that_nobody_wrapped_and_layers_that_no_optimizer_holds(tmp_path: Path) -> None:
    report = run("unwrapped", tmp_path, *PATIENT, ranks=2, args=("wrong", "averaged", "critic", "head", "own")).report
    reported = {(found["code"], found["tensor"]): found for found in report["findings"]}
    assert set(reported) == {("DD501", "averaged.weight"), ("DD501", "critic.weight"), ("DD508", "head.weight")}, (
        reported
    )
    assert "each rank created its own initial weights" in reported["DD501", "averaged.weight"]["summary"]
    assert "its gradients are not reduced" in reported["DD501", "critic.weight"]["summary"]
    assert "after the optimizer was created" in reported["DD508", "head.weight"]["summary"]


def test_the_same_wrapped_and_held_and_what_is_each_rank_s_own_stays_silent(tmp_path: Path) -> None:
    report = run("unwrapped", tmp_path, *PATIENT, ranks=2, args=("right", "averaged", "critic", "head", "own")).report
    assert report["findings"] == []
