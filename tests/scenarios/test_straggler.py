"""A slow rank in a real job that finishes is found, with its phase and line; jobs whose ranks keep pace are not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.running import HANG_TIMEOUT_S, PATIENT, check_finished, marked_lines, run

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.alone]

SLOW = {
    "straggler_before": (3, (1,), "DETAIL", "before forward"),
    "straggler_forward": (2, (0,), "DETAIL", "in forward"),
    "straggler_backward": (4, (1, 3), "OFF", "in backward"),
    "straggler_plain": (3, (2,), "OFF", "between collectives"),
}
KEEPING_PACE = {"clean_checkpoints": (2, "DETAIL"), "clean_turns": (2, "OFF")}


@pytest.mark.kept
@pytest.mark.parametrize("job", SLOW)
def test_the_slow_rank_is_named_with_its_phase_and_line(job: str, tmp_path: Path) -> None:
    ranks, slow, level, phase = SLOW[job]
    ran = run(job, tmp_path, "--debug-level", level, *PATIENT, ranks=ranks)
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], tuple(verdict["ranks"]), verdict["severity"]) == ("straggler", slow, "warning"), verdict
    assert {(place["rank"], place["line"]) for place in verdict["where"]} >= {
        (rank, line) for rank in slow for line in marked_lines(job)
    }, verdict
    assert f"slow {phase}" in verdict["summary"]
    assert (ran.status, ran.report["job"]["status"]) == (0, "finished"), ran.stderr
    assert [row["rank"] for row in ran.report["data"]["steps"]] == list(range(ranks))


@pytest.mark.kept
@pytest.mark.parametrize("job", KEEPING_PACE)
def test_ranks_that_keep_pace_are_left_alone(job: str, tmp_path: Path) -> None:
    ranks, level = KEEPING_PACE[job]
    ran = run(job, tmp_path, "--debug-level", level, *PATIENT, ranks=ranks)
    assert ran.report["verdict"] is None, ran.report["verdict"]
    assert {row["steps"] for row in ran.report["data"]["steps"]} == {30}


@pytest.mark.nightly
def test_a_rank_whose_loader_workers_are_slow_is_named_with_the_workers_line(tmp_path: Path) -> None:
    ran = run("straggler_input", tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2, args=("one", "forkserver"))
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], verdict["ranks"]) == ("straggler", [1]), verdict
    assert {(1, line) for line in marked_lines("straggler_input")} <= {(p["rank"], p["line"]) for p in verdict["where"]}
    assert any("a loader worker of rank 1 takes" in text for text in verdict["evidence"]), verdict


@pytest.mark.nightly
def test_a_rank_that_is_behind_where_all_wait_for_their_workers_is_left_alone(tmp_path: Path) -> None:
    ran = run("straggler_input", tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2, args=("all", "fork"))
    assert (ran.status, ran.report["verdict"]) == (0, None), ran.report["verdict"]
    assert all(rank["steps"] == 30 for rank in ran.report["data"]["steps"])


@pytest.mark.nightly
def test_ranks_that_get_little_of_a_core_are_not_stuck_and_their_loaders_not_slow(tmp_path: Path) -> None:
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(30)]
    try:
        ran = run("starved", tmp_path, "--hang-timeout", str(HANG_TIMEOUT_S), ranks=3)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    check_finished(ran)
    assert [finding["kind"] for finding in ran.report["findings"] if finding["kind"] != "exit-abort"] == []
    assert "withdrawn" not in ran.stderr
