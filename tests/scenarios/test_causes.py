"""Real ranks that stand still or die for a reason that their process shows: the reason is named."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.hosts import lent_hosts, require
from tests.scenarios.running import (
    PATIENT,
    Ran,
    begin,
    clean_environment,
    finish,
    free_port,
    marked_lines,
    run,
    wait_for,
    words_of,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")

MIB = 2**20


def verdict_of(ran: Ran, job: str, kind: str, ranks: tuple[int, ...]) -> dict[str, object]:
    """Return the verdict, which must be of this kind, blame these ranks and name the guilty line."""
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], tuple(verdict["ranks"])) == (kind, ranks), verdict
    assert {place["line"] for place in verdict["where"]} & set(marked_lines(job)), verdict
    return dict(verdict)


def said(verdict: dict[str, object]) -> str:
    """Return all evidence of a verdict."""
    return "\n".join(map(str, verdict["evidence"]))  # type: ignore[call-overload]


@pytest.mark.kept
def test_an_error_that_everybody_meets_is_explained(tmp_path: Path) -> None:
    ran = run("early_step", tmp_path, *PATIENT, ranks=2)
    verdict = ran.report["verdict"]
    assert verdict["kind"] == "crash", verdict  # on one rank, or on both if the second came in time
    assert {place["line"] for place in verdict["where"]} <= set(marked_lines("early_step"))
    assert "a tensor changed after forward had saved it" in said(verdict)
    assert "before optimizer.step()" in str(verdict["fix"])


@pytest.mark.kept
def test_the_holder_of_a_file_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "cache.lock"
    ran = run("stuck_flock", tmp_path / "run", "--debug-level", "OFF", ranks=2, args=(str(lock),))
    verdict = verdict_of(ran, "stuck_flock", "stuck", (1,))
    assert f"rank 1: waits for the lock on {lock}; rank 0 (process" in said(verdict)
    assert str(verdict["fix"]).startswith("release the lock in rank 0")


@pytest.mark.kept
def test_a_child_that_died_is_named(tmp_path: Path) -> None:
    ran = run("stuck_dead_child", tmp_path, "--debug-level", "OFF", ranks=2)
    verdict = verdict_of(ran, "stuck_dead_child", "stuck", (1,))
    assert "was killed by SIGKILL" in said(verdict)
    assert "why that process ended" in str(verdict["fix"])


@pytest.mark.kept
def test_a_question_that_nobody_answers_is_named(tmp_path: Path) -> None:
    ran = run("stuck_input", tmp_path, "--debug-level", "OFF", ranks=2)
    verdict = verdict_of(ran, "stuck_input", "stuck", (1,))
    assert "rank 1: waits for input on stdin" in said(verdict)


@pytest.mark.kept
def test_a_build_that_does_not_end_is_named(tmp_path: Path) -> None:
    builder = tmp_path / "bin" / "ninja"
    builder.parent.mkdir()
    builder.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo 1.11.1; exit 0; }\nexec sleep 100000\n')
    builder.chmod(0o755)
    path = f"{builder.parent}{os.pathsep}{os.environ['PATH']}"
    ran = run(
        "stuck_extension", tmp_path / "run", "--debug-level", "OFF", ranks=2, PATH=path,
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )  # fmt: skip
    verdict = verdict_of(ran, "stuck_extension", "stuck", (1,))
    assert "rank 1: compiles (cpp_extension.py" in said(verdict)
    assert "`sleep 100000`" in said(verdict)


@pytest.mark.kept
def test_a_limit_of_addresses_is_named(tmp_path: Path) -> None:
    ran = run("crash_memory_limit", tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2)
    verdict = verdict_of(ran, "crash_memory_limit", "crash", (1,))
    assert "of the 8.0 GiB that RLIMIT_AS (ulimit -v) allows, and it asked for 16.0 GiB more" in said(verdict)


def command(job: str, folder: Path, *args: str, ranks: int = 2, hang_timeout: tuple[str, str] = PATIENT) -> list[str]:
    """Return the real command."""
    return [
        sys.executable, "-m", "ddpdoctor", "wrap", f"--nproc-per-node={ranks}", f"--master-port={free_port()}",
        *hang_timeout, "--on-hang", "kill", "--debug-level", "OFF", "--report-dir", str(folder), *words_of(job), *args,
    ]  # fmt: skip


@pytest.mark.alone
@pytest.mark.nightly
def test_what_the_oom_killer_ended_says_what_it_used(group: Any, tmp_path: Path) -> None:
    limited = group("memory", v1_memory__limit_in_bytes=1400 * MIB, v2_memory__max=1400 * MIB)
    ran = finish(begin(*limited, *command("killed_oom", tmp_path)), tmp_path)
    verdict = verdict_of(ran, "killed_oom", "killed", (1,))
    assert "killed by the kernel's OOM killer" in str(verdict["summary"])
    assert "rank 1: used" in said(verdict)
    assert "of the 1.4 GiB that its cgroup allows" in said(verdict)


def test_a_shared_memory_that_is_too_small_is_named(tmp_path: Path) -> None:
    require("unshare", "mount")
    shell = 'exec unshare --mount sh -c \'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"\' sh "$@"'
    ran = finish(begin("sh", "-c", shell, "sh", *command("crash_shared_memory", tmp_path)), tmp_path)
    verdict = verdict_of(ran, "crash_shared_memory", "crash", (1,))
    assert "of 8 MiB in use" in said(verdict)
    assert "--shm-size" in str(verdict["fix"])


def test_a_network_that_fails_in_mid_job_is_no_ranks_fault(tmp_path: Path) -> None:
    require("nft")
    begun = tmp_path / "begun"
    words = command("transport_dropped", tmp_path / "run", str(begun), ranks=3, hang_timeout=("--hang-timeout", "4"))
    port = next(word for word in words if word.startswith("--master-port=")).partition("=")[2]
    with lent_hosts(1) as hosts:
        process = hosts.start(0, *words, env=clean_environment())
        assert wait_for(begun.exists, 90)
        hosts.run(0, "nft", "add table inet t")
        hosts.run(0, "nft", "add chain inet t in { type filter hook input priority 0 ; }")
        hosts.run(0, "nft", f"add rule inet t in tcp sport != {port} tcp dport != {port} drop")
        ran = finish(process, tmp_path / "run")
    verdict = verdict_of(ran, "transport_dropped", "transport", (0, 1, 2))
    assert (ran.status, ran.report["job"]["status"]) == (124, "hung")
    assert "is not acknowledged" in said(verdict)
    assert (tmp_path / "run" / "machine.json").exists()


# All ranks wait for something outside of the job that nobody will give them; healthy twins wait and get it.


BUILDER = """
import os, sys
held = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("begun", flush=True)
sys.stdin.read()
os.remove(sys.argv[1])
"""


def wait_verdict_of(ran: Ran, line: int) -> dict[str, Any]:
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
    verdict = wait_verdict_of(ran, marked_lines("stuck_store")[fault])
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


@pytest.mark.kept
def test_a_lock_that_its_dead_owner_left_behind_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    builder = build(lock)
    builder.kill()
    builder.communicate()
    ran = run("stuck_left_lock", tmp_path / "run", "--debug-level", "OFF", ranks=2, args=(str(lock),))
    verdict = wait_verdict_of(ran, marked_lines("stuck_left_lock")[0])
    assert f": it waits for lock file {lock}, and the owner of that file is gone" in verdict["summary"]
    assert any(f"{lock} to be removed; no visible process has it open" in text for text in verdict["evidence"])
    assert verdict["fix"].startswith(f"`rm {lock}`")
