"""All ranks wait for something outside of the job that nobody will give them; healthy twins wait and get it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.running import PATIENT, Ran, finish, free_port, marked_lines, run, start, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")
BUILDER = """
import os, sys
held = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("begun", flush=True)
sys.stdin.read()
os.remove(sys.argv[1])
"""


def verdict_of(ran: Ran, line: int) -> dict[str, Any]:
    """Return the verdict: both ranks are stuck at a line of the script."""
    verdict: dict[str, Any] = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], verdict["ranks"], verdict["confidence"]) == ("stuck", [0, 1], "high"), verdict
    assert {(place["rank"], place["line"]) for place in verdict["where"]} >= {(0, line), (1, line)}, verdict
    return verdict


@pytest.mark.parametrize(("how", "fault"), [("variable", 0), ("url", 1)])
def test_a_store_that_nobody_serves_is_named_with_its_address(how: str, fault: int, tmp_path: Path) -> None:
    port = free_port()
    ran = run("stuck_store", tmp_path, "--debug-level", "OFF", ranks=2, args=(how, str(port)))
    verdict = verdict_of(ran, marked_lines("stuck_store")[fault])
    assert f":{port}" in verdict["summary"]
    assert any(f"no process listens on port {port}" in text for text in verdict["evidence"]), verdict
    assert (ran.status, ran.report["job"]["status"]) == (124, "hung")


def test_a_port_of_its_own_that_rank_0_serves_is_no_fault(tmp_path: Path) -> None:
    ran = run("stuck_store", tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2, args=("served", str(free_port())))
    assert (ran.status, ran.report["verdict"]) == (0, None), ran.stderr


def build(lock: Path) -> Any:
    """Start a process that holds a lock as torch's builds do, until its standard input is closed."""
    builder = subprocess.Popen(
        [sys.executable, "-I", "-c", BUILDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert builder.stdout is not None
    assert builder.stdout.readline() == "begun\n"
    return builder


def test_a_lock_that_its_dead_owner_left_behind_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    builder = build(lock)
    builder.kill()
    builder.communicate()
    ran = run("stuck_left_lock", tmp_path / "run", "--debug-level", "OFF", ranks=2, args=(str(lock),))
    verdict = verdict_of(ran, marked_lines("stuck_left_lock")[0])
    assert f": it waits for lock file {lock}, and the owner of that file is gone" in verdict["summary"]
    assert any(f"{lock} to be removed; no visible process has it open" in text for text in verdict["evidence"])
    assert verdict["fix"].startswith(f"`rm {lock}`")


def test_a_lock_whose_owner_is_at_work_is_waited_for(tmp_path: Path) -> None:
    lock, folder = tmp_path / "lock", tmp_path / "run"
    builder = build(lock)
    long = ("--hang-timeout", "15")  # on a busy machine the end of a process takes seconds
    process = start("stuck_left_lock", folder, "--debug-level", "OFF", *long, ranks=2, args=(str(lock),))
    assert wait_for(lambda: any((folder / "evidence").glob("*.json")))
    builder.communicate()
    ran = finish(process, folder)
    assert (ran.status, ran.report["verdict"]) == (0, None), ran.stderr
