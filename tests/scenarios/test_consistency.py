"""Each silent fault of replicas is found on real ranks, with its cause; beside it, the same done right stays silent.

Models are trained one after another in one job, so that a few starts of torch do for all of them. The first layer of a
model has the name of its fault: the tensor that is named tells which was found.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.running import JOBS, PATIENT, cell_of, check_finished, grids_of, marked_lines, run, words_of

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]

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


def test_ranks_that_no_process_group_connects(tmp_path: Path) -> None:
    ran = run("separate", tmp_path, *PATIENT, ranks=2, args=("wrong",))
    verdict = ran.report["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["severity"]) == ("not-distributed", [0, 1], "warning")
    assert ran.status == 0


def test_ranks_that_one_connects(tmp_path: Path) -> None:
    assert run("separate", tmp_path, *PATIENT, ranks=2, args=("right",)).report["findings"] == []


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


# A backward that leaves gradients out on one rank: the parameters are named, and no drift that follows from it.


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


# Buffers of models under FSDP and tensor parallelism, which nothing makes equal on all ranks after ``to_empty``.


@pytest.mark.parametrize(
    ("kind", "fault", "ranks", "confidence", "words"),
    [
        ("fsdp2", "empty", 2, "high", "no write was seen to blocks.0.inv_freq, blocks.1.inv_freq on rank 1"),
        ("fsdp2", "other", 3, "high", "no wrapper of the model makes blocks.0.inv_freq, blocks.1.inv_freq equal"),
        ("fsdp1", "other", 3, "high", "no wrapper of the model makes blocks.0.inv_freq, blocks.1.inv_freq equal"),
        ("tensor", "other", 3, "high", "no wrapper of the model makes blocks.0.inv_freq, blocks.1.inv_freq equal"),
    ],
)
def test_a_buffer_without_the_common_value_is_found(
    kind: str, fault: str, ranks: int, confidence: str, words: str, tmp_path: Path
) -> None:
    args = ("--debug-level", "OFF", *PATIENT)
    ran = run("constants", tmp_path / "run", *args, ranks=ranks, args=(kind, fault))
    verdict = next((one for one in ran.report["findings"] if one["code"] == "DD502"), None)
    assert verdict is not None, ran.stderr
    assert kind == "tensor" or ran.report["verdict"] == verdict, ran.report["verdict"]  # there the gradients differ too
    assert (verdict["ranks"], verdict["tensor"]) == ([ranks - 1], "blocks.0.inv_freq"), verdict
    assert verdict["confidence"] == confidence, verdict
    assert words in verdict["summary"], verdict
    assert "after to_empty()" in verdict["fix"], verdict


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "tensor"])
def test_what_ranks_have_for_themselves_is_no_difference(kind: str, tmp_path: Path) -> None:
    ran = run("constants", tmp_path / "run", "--debug-level", "OFF", *PATIENT, ranks=3, args=(kind, "none"))
    assert ran.report["verdict"] is None, ran.report["verdict"]
    check_finished(ran)
    streams = [stream for stream in ran.report["data"]["consistency"]["streams"] if stream["model"] == 2]
    assert [stream["compared"] for stream in streams] == [1], streams
    assert {one["code"] for one in ran.report["findings"]}.isdisjoint({"DD502", "DD901"}), ran.report["findings"]


# Local gradients with NaN are reported with rank, parameter, step and what was first; harmless ones are not.


def verdict_of(script, folder, ranks):
    ran = run(script, folder, "--debug-level", "OFF", *PATIENT, ranks=ranks)
    assert ran.status in (0, -6), ran.stderr
    found = ran.report["verdict"]
    assert [place["line"] for place in found["where"]] == marked_lines(script)
    return found


def test_an_operation_with_an_infinite_slope(tmp_path):
    found = verdict_of("nonfinite_backward", tmp_path / "run", 3)
    assert (found["kind"], found["ranks"], found["step"]) == ("nonfinite-grad", [2], 6)
    assert found["tensor"] == "second.bias"
    assert "the loss and the input were finite" in found["summary"]


def test_a_sample_that_holds_nan(tmp_path):
    """No optimizer of torch makes the steps: the parameters show that the gradients were used."""
    found = verdict_of("nonfinite_input", tmp_path / "run", 2)
    assert (found["kind"], found["ranks"], found["step"]) == ("nonfinite-grad", [0], 4)
    assert "input was not finite" in found["summary"]
    assert any("argument 0 of forward holds NaN" in line for line in found["evidence"])


def test_gradients_that_do_no_harm(tmp_path):
    """A scaler that skips, hooks of the script's own, gradients that are mended, and unusual backwards."""
    ran = run("clean_gradients", tmp_path / "run", "--debug-level", "OFF", *PATIENT, ranks=2)
    assert ran.status in (0, -6), ran.stderr
    assert ran.report["verdict"] is None
    found = [finding for finding in ran.report["findings"] if finding["code"] != "DD612"]
    assert [(each["code"], each["severity"], each["ranks"]) for each in found] == [("DD504", "info", [1])] * 2
