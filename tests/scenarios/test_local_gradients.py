"""Local gradients with NaN are reported with rank, parameter, step and what was first; harmless ones are not."""

import pytest

from tests.scenarios.running import PATIENT, marked_lines, run

pytestmark = pytest.mark.usefixtures("preloaded_python")


def verdict(script, folder, ranks):
    ran = run(script, folder, "--debug-level", "OFF", *PATIENT, ranks=ranks)
    assert ran.status in (0, -6), ran.stderr
    found = ran.report["verdict"]
    assert [place["line"] for place in found["where"]] == marked_lines(script)
    return found


def test_an_operation_with_an_infinite_slope(tmp_path):
    found = verdict("nonfinite_backward", tmp_path / "run", 3)
    assert (found["kind"], found["ranks"], found["step"]) == ("nonfinite-grad", [2], 6)
    assert found["tensor"] == "second.bias"
    assert "the loss and the input were finite" in found["summary"]


def test_a_sample_that_holds_nan(tmp_path):
    """No optimizer of torch makes the steps: the parameters show that the gradients were used."""
    found = verdict("nonfinite_input", tmp_path / "run", 2)
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


@pytest.mark.full
def test_nan_is_said_once_while_the_job_runs(tmp_path):
    options = ("--debug-level", "OFF", *PATIENT)
    ran = run("nonfinite_input", tmp_path / "run", *options, ranks=2, args=("80",))
    said = [line for line in ran.stderr.splitlines() if "training continues" in line]
    assert len(said) == 1, ran.stderr
    assert said[0].startswith("ddpdoctor: DD504 nonfinite-grad, rank 0")
    assert ran.report["verdict"]["code"] == "DD504"
