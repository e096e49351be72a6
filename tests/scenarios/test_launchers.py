"""``wrap -- COMMAND``: ranks that anything has started are found, watched, judged and stopped as torchrun's are."""

import json
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need_module, need_programs
from tests.scenarios.running import (
    HANG_TIMEOUT_S,
    JOBS,
    PATIENT,
    Ran,
    begin,
    doctor,
    finish,
    free_port,
    job_pids,
    marked_lines,
    run,
    wait_for,
    words_of,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")
JOB = str(JOBS / "launched.py")
SHELL = (str(JOBS / "launch.sh"), JOB)
PYTHON = (sys.executable,)


def start_command(folder: Path, *words: str, options: tuple[str, ...] = PATIENT, **env: str) -> Any:
    command = [
        sys.executable, "-m", "ddpdoctor", "wrap", "--hang-timeout", str(HANG_TIMEOUT_S), "--on-hang", "kill",
        "--debug-level", "OFF", "--report-dir", str(folder), *options, "--", *words,
    ]  # fmt: skip
    more = {"MASTER_PORT": str(free_port()), "PYTHON": sys.executable, **env}
    return begin(*command, **more)


def run_command(folder: Path, *words: str, options: tuple[str, ...] = PATIENT, **env: str) -> Ran:
    return finish(start_command(folder, *words, options=options, **env), folder)


def blamed(ran: Ran) -> tuple[Any, ...]:
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    return ran.status, ran.report["job"]["status"], verdict["kind"], verdict["ranks"]


def lines_of(ran: Ran) -> list[int]:
    return [place["line"] for place in ran.report["verdict"]["where"]]


def accelerate(*words: str) -> tuple[str, ...]:
    need_module("accelerate", extra="accelerate")
    options = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    port = f"--main_process_port={free_port()}"
    return (sys.executable, "-m", "accelerate.commands.launch", *options, port, *words)


def mpirun(*words: str) -> tuple[str, ...]:
    need_programs("mpirun")
    return ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *words)


def test_a_healthy_job_of_a_shell_script_is_left_alone(tmp_path: Path) -> None:
    ran = run_command(tmp_path, *SHELL, WORLD_SIZE="2")
    assert (ran.status, ran.report["job"]["status"], ran.report["verdict"]) == (0, "finished", None), ran.stderr
    assert [row["state"] for row in ran.report["ranks"]] == ["exit status 0"] * 2
    assert ran.report["findings"] == []


def test_a_shell_scripts_rank_that_fails_is_named(tmp_path: Path) -> None:
    ran = run_command(tmp_path, *SHELL, WORLD_SIZE="2", MODE="sigkill")
    assert blamed(ran) == (137, "failed", "killed", [1])


def test_a_hung_shell_script_is_stopped_with_all_its_ranks(tmp_path: Path) -> None:
    ran = run_command(tmp_path, *SHELL, options=(), WORLD_SIZE="2", MODE="stuck")
    assert blamed(ran) == (124, "hung", "stuck", [1])
    assert set(lines_of(ran)) & set(marked_lines("launched"))
    assert job_pids(tmp_path) == []


@pytest.mark.parametrize("launcher", [accelerate, mpirun])
def test_a_rank_that_a_launcher_stops_is_a_victim_and_leaves_its_stack(launcher: Any, tmp_path: Path) -> None:
    ran = run_command(tmp_path, *launcher(JOB), MODE="raise", OTHERS_COMPUTE="1")
    assert blamed(ran) == (1, "failed", "crash", [1])
    assert set(lines_of(ran)) <= set(marked_lines("launched"))
    (victim,) = [row for row in ran.report["ranks"] if row["rank"] == 0]
    (line,) = [n for n, text in enumerate(Path(JOB).read_text().splitlines(), 1) if text.endswith("# VICTIM")]
    assert any(f"launched.py:{line} " in frame for frame in victim["stack"]), victim


def until_said(process: Any, *words: str) -> None:
    """Wait until a report on stderr has said all of ``words``; whoever reads it sees the job go on."""
    said = ""
    while not all(word in said for word in words):
        line = process.stderr.readline()
        assert line, said
        said += line


def test_ranks_that_cannot_be_seen_are_named_and_the_job_is_not_stopped(tmp_path: Path) -> None:
    words = ("bash", "-c", 'RANK=0 "$PYTHON" "$JOB" & RANK=1 "$PYTHON" -I "$JOB" & wait')
    process = start_command(tmp_path, *words, options=(), MODE="stuck", JOB=JOB, WORLD_SIZE="2")
    try:
        until_said(process, "DD601", "confidence low")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    finally:
        ran = finish(process, tmp_path)
    (found,) = [f for f in ran.report["findings"] if f["code"] == "DD901"]
    assert found["ranks"] == [1]
    assert "-I" in found["summary"]
    assert ran.report["job"]["status"] == "interrupted"
    assert job_pids(tmp_path) == []


def test_a_rank_may_run_in_another_environment(tmp_path: Path) -> None:
    """Its Python has torch, and no ddpdoctor: the recorder comes by its file's path."""
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    packages = next(other.glob("lib/python*/site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "ddpdoctor" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    python = str(other / "bin" / "python")
    assert subprocess.run([python, "-c", "import ddpdoctor"], cwd=other, capture_output=True, check=False).returncode
    words = ("-m", "torch.distributed.run", f"--master-port={free_port()}", "--nproc-per-node=2", JOB)
    ran = run_command(tmp_path / "run", python, *words, MODE="raise")
    assert blamed(ran) == (1, "failed", "crash", [1])
    assert [f for f in ran.report["findings"] if f["code"] == "DD901"] == []
    # The words of a launcher behind "--" stay where it writes them.
    assert ("ChildFailedError" in ran.stderr, (tmp_path / "run" / "torchrun.log").exists()) == (True, False)


def test_a_command_that_is_a_rank_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nraise KeyError(sys.argv[1])\n")
    ran = run_command(tmp_path / "run", *PYTHON, str(script), "--lr=0.1")
    assert blamed(ran) == (1, "failed", "crash", [0])
    assert lines_of(ran) == [2]


def test_a_command_that_spawns_its_ranks(tmp_path: Path) -> None:
    ran = run_command(tmp_path, *PYTHON, *words_of("crash_spawn"))
    assert blamed(ran) == (1, "failed", "crash", [1])
    assert set(lines_of(ran)) & set(marked_lines("crash_spawn"))
    assert len(ran.report["ranks"]) == ran.report["job"]["world_size"]


def test_a_wrap_inside_a_wrap_lets_the_outer_one_watch(tmp_path: Path) -> None:
    inner = ("-m", "ddpdoctor", "wrap", "--report-dir", str(tmp_path / "inner"), "--nproc-per-node=2")
    ran = run_command(tmp_path / "run", *PYTHON, *inner, f"--master-port={free_port()}", JOB, MODE="raise")
    assert blamed(ran) == (1, "failed", "crash", [1])
    assert not (tmp_path / "inner").exists()


def test_a_command_gets_signals_and_its_status_is_reported(tmp_path: Path) -> None:
    shown = tmp_path / "signals"
    process = start_command(tmp_path / "run", *PYTHON, *words_of("sleepy"), SIGNALS=str(shown))
    assert wait_for(lambda: shown.exists() and shown.read_text() == "ready\n")
    process.send_signal(signal.SIGUSR1)
    assert wait_for(lambda: shown.read_text() == "ready\nSIGUSR1\n")
    process.send_signal(signal.SIGTERM)
    ran = finish(process, tmp_path / "run")
    assert shown.read_text() == "ready\nSIGUSR1\nSIGTERM\n"
    assert ran.status == 7
    assert ran.report["job"]["status"] == "interrupted"


def test_each_attempt_has_a_section_of_its_own(tmp_path: Path) -> None:
    ran = run("each_attempt", tmp_path, "--max-restarts", "2", *PATIENT, ranks=2)
    assert blamed(ran) == (1, "failed", "crash", [1])
    sections = ran.report["data"]["sections"]
    shown = [(s["attempt"], s["status"], s["verdict"]["kind"], s["verdict"]["ranks"]) for s in sections]
    assert shown == [(0, "failed", "crash", [1]), (1, "failed", "killed", [0]), (2, "failed", "crash", [1])]
    assert all(s["started_at"] < s["ended_at"] for s in sections)
    assert [len(s["ranks"]) for s in sections] == [2, 2, 2]
    assert {place["line"] for place in sections[0]["verdict"]["where"]} == set(marked_lines("each_attempt"))
    redrawn = doctor("report", tmp_path).stdout
    (tmp_path / "report.json").unlink()
    rebuilt = doctor("report", tmp_path).stdout
    for text in (ran.stderr, redrawn, rebuilt):
        assert text.count("the first batch is bad") >= 1
        assert "attempt 1: failed after" in text
    assert redrawn.count("the first batch is bad") == rebuilt.count("the first batch is bad") == 1


def test_torchruns_variables_hold(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    variables = {"PET_NPROC_PER_NODE": "1", "PET_MODULE": "1", "DDPDOCTOR_REPORT_DIR": str(tmp_path / "run")}
    done = doctor("wrap", f"--master-port={free_port()}", "package.train", "--x", cwd=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (0, "0 ['--x']\n"), done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(report["ranks"]) == 1
