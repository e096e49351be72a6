"""What a running job cannot change is tried by restarts, and only then. Ctrl-C leaves no process of them."""

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.running import finish, job_pids, marked_lines, wait_for
from tests.scenarios.test_tune import KEPT, PATIENT, rows_of, start, tune

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.nightly]


def launches_of(folder: Path) -> list[Path]:
    """Return the run folders of the launches after the first."""
    return sorted(folder.glob("round-*"))


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


def test_a_setting_under_which_the_job_fails_costs_that_setting_only(tmp_path: Path) -> None:
    only = ("--only", "buffers_off", "--only", "static_graph")
    ran = tune(tmp_path / "run", *PATIENT, *only, args=("picky", str(tmp_path / "model.pt")))
    assert ran.status == 0, ran.stderr
    rows = rows_of(ran)
    assert "this model has no static graph" in rows["static_graph"]["reason"]
    assert (rows["buffers_off"]["reason"], rows["buffers_off"]["rounds"]) == ("", 4)
    assert "In effect was: static_graph=True (round 1 of 4)" in ran.stderr
    assert len([path for path in launches_of(ran.folder) if "static_graph" in path.name]) == 1


def test_a_healthy_job_is_not_restarted(tmp_path: Path) -> None:
    ran = tune(tmp_path / "run", *PATIENT, args=("healthy",))
    assert ran.status == 0, ran.stderr
    assert launches_of(ran.folder) == []
    assert "by restarts" not in ran.stderr


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
