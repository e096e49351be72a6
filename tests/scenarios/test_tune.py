"""A trial names the setting that shortens the step, keeps nothing, and says why if it has no result."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.running import (
    JOBS,
    Ran,
    begin,
    cell_of,
    finish,
    free_port,
    grids_of,
    job_pids,
    marked_lines,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")
JOB = JOBS / "tune.py"
PATIENT = ("--hang-timeout", "60")
KEPT = "the checkpoint of an earlier run"


def start(folder: Path, *options: str, args: tuple[str, ...], script: Path = JOB) -> Any:
    """Start ``ddpdoctor tune`` on a job; ``folder`` becomes the run folder."""
    command = [
        sys.executable, "-m", "ddpdoctor", "tune", "--nproc-per-node=2", f"--master-port={free_port()}",
        "--report-dir", str(folder), *options, str(script), *args,
    ]  # fmt: skip
    return begin(*command)


def tune(folder: Path, *options: str, args: tuple[str, ...]) -> Ran:
    """Run a trial to its end."""
    ran = finish(start(folder, *options, args=args), folder)
    assert job_pids(folder) == []
    return ran


def rows_of(ran: Ran) -> dict[str, Any]:
    """Return the rows of the table by setting."""
    return {row["setting"]: row for row in ran.report["data"]["tune"]["result"]["rows"]}


@pytest.mark.nightly
def test_the_setting_that_shortens_the_step_is_named_and_no_checkpoint_is_touched(tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    saved.write_text(KEPT)
    only = ("--only", "buffers_off", "--only", "static_graph")
    ran = tune(tmp_path / "run", *PATIENT, *only, args=("slow_buffers", str(saved)))
    assert ran.status == 0, ran.stderr
    result = ran.report["data"]["tune"]["result"]
    assert result["verdict"] == "change", result
    assert result["fix"] == "DistributedDataParallel(broadcast_buffers=False)"
    assert {Path(place["file"]).name for place in result["where"]} == {"tune.py"}
    assert rows_of(ran)["buffers_off"]["measured"]["high"] < 1
    assert not rows_of(ran)["static_graph"]["is_gain"]
    (grid,) = grids_of(ran.report).values()
    assert cell_of(grid, rows_of(ran)["buffers_off"]["title"], "measured").startswith("-")
    assert ran.report["findings"] == []
    assert "what torch.save writes is discarded" in ran.stderr.replace("\n", " ")
    assert "broadcast_buffers=False makes the step" in ran.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.pt"]
    assert saved.read_text() == KEPT


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("few", "the script ended after 5 optimizer steps, before a setting was tried"),
        pytest.param(
            "short", "the script ended after 60 optimizer steps, but this trial needs", marks=pytest.mark.nightly
        ),
        pytest.param("bare", "the script trains, but not a DistributedDataParallel model", marks=pytest.mark.nightly),
        pytest.param("two", "the script has 2 DistributedDataParallel models", marks=pytest.mark.nightly),
        pytest.param("unstepped", "the script makes no steps with a torch optimizer", marks=pytest.mark.nightly),
    ],
)
def test_a_trial_without_a_result_says_why_and_what_to_do(way: str, says: str, tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", *PATIENT, "--only", "accumulate", args=(way,))
    assert ran.status == 2, ran.stderr
    trial = ran.report["data"]["tune"]
    assert says in trial["problem"]
    assert trial["help"]
    assert f"no result: {trial['problem']}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_ranks_that_the_script_starts_itself_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(JOBS)!r}]\nimport training\n"
        'if __name__ == "__main__":\n    training.loop.__defaults__ = (training.random_batch, 100_000)\n'
        "    training.spawn()\n"
    )
    process = start(tmp_path / "run", "--nproc-per-node=1", *PATIENT, args=(), script=script)
    ran = finish(process, tmp_path / "run")
    assert ran.status == 2, ran.stderr
    assert "the script starts its ranks itself" in ran.stderr
    assert job_pids(tmp_path / "run") == []


def test_a_job_that_crashes_in_the_trial_is_diagnosed_as_ever(tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", *PATIENT, args=("crash",))
    assert ran.status == 1
    assert (ran.report["verdict"]["kind"], ran.report["verdict"]["ranks"]) == ("crash", [1])
    assert "The trial has no result. In effect was:" in ran.stderr


def test_ctrl_c_between_two_settings_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *PATIENT, args=("healthy",))
    first = folder / "tuning" / "0.jsonl"
    assert wait_for(lambda: first.exists() and b"steps_ns" in first.read_bytes())
    os.killpg(process.pid, signal.SIGINT)
    ran = finish(process, folder)
    assert ran.status == 130, ran.stderr
    assert ran.report["data"]["tune"]["result"] is None
    assert job_pids(folder) == []


@pytest.mark.nightly
def test_a_parameter_that_goes_unused_while_ddp_does_not_look_costs_that_setting_only(tmp_path: Path) -> None:
    only = ("--only", "find_unused_off", "--only", "gradient_as_bucket_view")
    # steps before the last settings: 10, and 3 settings of 8 steps in 4 rounds
    ran = tune(tmp_path / "run", *PATIENT, *only, args=("search", "130"))
    assert ran.status == 0, ran.stderr
    rows = rows_of(ran)
    assert rows["find_unused_off"]["reason"] == "a parameter went unused in a later step"
    assert rows["gradient_as_bucket_view"]["rounds"] == 4


@pytest.mark.nightly
def test_settings_that_would_stop_the_job_are_not_tried(tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", *PATIENT, "--only", "find_unused_off", args=("search", "30"))
    assert ran.status == 0, ran.stderr
    row = rows_of(ran)["find_unused_off"]
    assert (row["rounds"], row["reason"]) == (0, "the parameters that go unused change from step to step")
    assert "no setting could be tried" in ran.stderr


@pytest.mark.nightly
def test_reductions_of_micro_batches_are_left_out_but_for_the_last(tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", *PATIENT, "--only", "no_sync", "--only", "accumulate", args=("micro_batches",))
    assert ran.status == 0, ran.stderr
    rows = rows_of(ran)
    assert rows["no_sync"]["rounds"] == 4
    assert rows["accumulate"]["reason"] == "it does not fit this job"


# What a running job cannot change is tried by restarts, and only then.


def launches_of(folder: Path) -> list[Path]:
    """Return the run folders of the launches after the first."""
    return sorted(folder.glob("round-*"))


@pytest.mark.nightly
def test_loader_workers_that_keep_up_are_named(tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", *PATIENT, "--only", "workers", args=("waits_for_files",))
    assert ran.status == 0, ran.stderr
    result = ran.report["data"]["tune"]["result"]
    tried = [row for row in result["rows"] if row["setting"] != "again"]
    faster = [row["title"] for row in tried if row["measured"]["high"] < 1]
    assert result["fix"] in {f"DataLoader({title}, persistent_workers=True)" for title in faster}, result
    assert all(row["by_restarts"] and row["predicted"] is not None and row["rounds"] == 4 for row in tried)
    assert {place["line"] for place in result["where"]} == set(marked_lines("tune"))
    assert len(launches_of(ran.folder)) == 4 * (2 + len(tried))
    assert "Tried by restarts: num_workers=" in ran.stderr


@pytest.mark.nightly
def test_with_a_hook_of_the_script_the_setting_is_found_by_restarts_and_no_checkpoint_is_touched(
    tmp_path: Path,
) -> None:
    saved = tmp_path / "model.pt"
    saved.write_text(KEPT)
    ran = tune(tmp_path / "run", *PATIENT, "--only", "buffers_off", args=("hooked", str(saved)))
    assert ran.status == 0, ran.stderr
    result = ran.report["data"]["tune"]["result"]
    assert result["fix"] == "DistributedDataParallel(broadcast_buffers=False)", result
    assert rows_of(ran)["buffers_off"]["measured"]["high"] < 1
    assert ran.report["findings"] == []
    assert "the script has registered a communication hook. Tried by restarts: broadcast_buffers=False" in ran.stderr
    assert "12 launches" in ran.stderr
    assert saved.read_text() == KEPT


@pytest.mark.nightly
def test_a_setting_under_which_the_job_fails_costs_that_setting_only(tmp_path: Path) -> None:
    only = ("--only", "buffers_off", "--only", "static_graph")
    ran = tune(tmp_path / "run", *PATIENT, *only, args=("picky", str(tmp_path / "model.pt")))
    assert ran.status == 0, ran.stderr
    rows = rows_of(ran)
    assert "this model has no static graph" in rows["static_graph"]["reason"]
    assert (rows["buffers_off"]["reason"], rows["buffers_off"]["rounds"]) == ("", 4)
    assert "In effect was: static_graph=True (round 1 of 4)" in ran.stderr
    assert len([path for path in launches_of(ran.folder) if "static_graph" in path.name]) == 1


@pytest.mark.nightly
def test_ctrl_c_between_two_launches_leaves_no_process_and_starts_none(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *PATIENT, "--only", "buffers_off", args=("compiled", str(tmp_path / "model.pt")))
    assert wait_for(lambda: any(b'"end"' in path.read_bytes() for path in folder.glob("round-1-*/tuning/0.jsonl")))
    os.killpg(process.pid, signal.SIGINT)
    ran = finish(process, folder)
    assert ran.status == 130, ran.stderr
    made = launches_of(folder)
    assert len(made) <= 2
    assert [pid for one in (folder, *made) for pid in job_pids(one)] == []
    assert ran.report["data"]["tune"]["problem"] == "interrupted before it was tried in every round"
    assert "defect of ddpdoctor" not in ran.stderr
