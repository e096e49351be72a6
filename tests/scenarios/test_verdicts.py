"""Each kind of fault, seeded in a real job of three ranks, is found: the kind, the ranks to blame, the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.running import marked_lines, run

EVERYBODY = (0, 1, 2)
FAULTS = {
    "stuck_lock": ("stuck", (1,)),
    "stuck_gil": ("stuck", (0,)),
    "stuck_spin": ("stuck", (1,)),
    "stuck_before_init": ("stuck", (1,)),
    "stuck_loader_worker": ("stuck", (0,)),
    "stuck_everywhere": ("stuck", EVERYBODY),
    "crash_loader_worker": ("crash", (0,)),
    "crash_exit_status": ("crash", (1,)),
    "crash_everywhere": ("crash", EVERYBODY),
    "crash_before_init": ("crash", (2,)),
    "killed_segv": ("killed", (1,)),
    "killed_sigkill": ("killed", (0,)),
    "stopped_signal": ("stopped", (1,)),
    "stopped_debugger": ("stopped", (1,)),
    "early_exit_return": ("early-exit", (2,)),
    "early_exit_hard": ("early-exit", (0,)),
    "missing_world": ("missing", (3,)),
    "exit_hang_thread": ("exit-hang", (1,)),
    "exit_hang_atexit": ("exit-hang", (0,)),
    "mismatch_shape": ("mismatch", (2,)),
    "mismatch_operation": ("mismatch", (1,)),
    "mismatch_dtype": ("mismatch", (0,)),
}
HANGS = ("stuck", "stopped", "missing", "exit-hang")


@pytest.mark.parametrize("level", ["DETAIL", "OFF"])
@pytest.mark.parametrize("job", FAULTS)
def test_the_fault_is_found(job: str, level: str, tmp_path: Path) -> None:
    kind, ranks = FAULTS[job]
    ran = run(job, tmp_path, "--debug-level", level)
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], tuple(verdict["ranks"])) == (kind, ranks), verdict
    lines = marked_lines(job)
    if lines:
        assert {(Path(w["file"]).name, w["line"]) for w in verdict["where"]} & {(f"{job}.py", n) for n in lines}, (
            verdict
        )
    assert len(verdict["where"]) <= 2 * len(ranks) + 2
    if kind in HANGS:
        assert (ran.status, ran.report["job"]["status"]) == (124, "hung")
    else:
        assert ran.status not in (0, 2, 3)


@pytest.mark.parametrize(("job", "kind"), [("stuck_spawn", "stuck"), ("crash_spawn", "crash")])
def test_the_world_that_a_script_makes_is_judged(job: str, kind: str, tmp_path: Path) -> None:
    verdict = run(job, tmp_path, ranks=1).report["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == (kind, [1]), verdict
    assert verdict["where"][0]["line"] in marked_lines(job)


CLEAN = {
    "clean_slow_rank0": 3,
    "clean_groups": 3,
    "clean_point_to_point": 3,
    "clean_accumulate": 2,
    "clean_join": 3,
    "clean_spawn": 1,
    "clean_plain": 2,
}


@pytest.mark.parametrize("level", ["DETAIL", "OFF"])
@pytest.mark.parametrize("job", CLEAN)
def test_a_healthy_job_stays_without_verdict(job: str, level: str, tmp_path: Path) -> None:
    ran = run(job, tmp_path, "--debug-level", level, ranks=CLEAN[job])
    assert ran.report["verdict"] is None, ran.report["verdict"]
    assert ran.report["job"]["status"] == "finished", ran.stderr
    assert ran.status in (0, 1)
