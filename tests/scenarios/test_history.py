"""``history`` of a real job that torchrun restarts, and that is then started once more, as a scheduler does."""

import json
from pathlib import Path

import pytest

from tests import forking
from tests.scenarios.running import PATIENT, clean_environment, marked_lines, run

pytestmark = pytest.mark.usefixtures("preloaded_python")
SCRIPT = "resumes"


def test_restarts_and_requeued_runs_are_one_history(tmp_path: Path) -> None:
    job, runs = tmp_path / "job", tmp_path / "runs"
    job.mkdir()
    arguments = (str(job), "2:1:raised", "4:1:killed")
    first = run(SCRIPT, runs / "first", *PATIENT, "--max-restarts=1", ranks=2, args=arguments)
    second = run(SCRIPT, runs / "second", *PATIENT, "--max-restarts=1", ranks=2, args=arguments, SAVES="")
    assert (first.status, second.status) == (1, 0)

    done = forking.run("-m", "ddpdoctor", "history", runs, "--format", "json", env=clean_environment())
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["jobs"]
    starts = found["starts"]

    assert [(Path(one["run"]).name, one["attempt"], one["status"]) for one in starts] == [
        ("first", 0, "failed"), ("first", 1, "failed"), ("second", 0, "finished"),
    ]  # fmt: skip
    assert [one["code"] for one in starts] == ["DD604", "DD605", ""]
    assert f"resumes.py:{marked_lines(SCRIPT)[0]}" in starts[0]["summary"]
    # Epochs of four batches: 0, 1 and 2; from the checkpoint 2, 3 and 4; from the next one 4 and 5.
    assert [one["steps"] for one in starts] == [12, 12, 8]
    assert [one["lost_steps"] for one in starts] == [4, 4, None]
    assert all(one["lost_s"] > 0 for one in starts[:2])
    assert starts[2]["lost_s"] is None
    assert [one["saved_step"] for one in starts] == [None, None, 8]
    assert (found["failures"], [(row["rank"], row["times"]) for row in found["returning"]]) == (2, [(1, 2)])
    assert 0 < found["between_failures_s"] < found["span_s"]

    shown = forking.run("-m", "ddpdoctor", "history", runs / "first", env=clean_environment()).stdout
    assert shown.startswith("ddpdoctor: 2 starts in ")
    assert f", 2 failures; rank 1 on {found['returning'][0]['host']} was to blame in 2 of them; mean time " in shown
    assert "\n  1: DD604 crash, rank 1: rank 1 raised ValueError in strike" in shown
