"""``ddpdoctor.watch``: a job under torchrun alone, which watches itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.needs import need_module
from tests.scenarios.running import (
    JOBS,
    begin,
    doctor,
    free_port,
    hold_to_schema,
    marked_lines,
    pids_with,
    python,
    wait_for,
    words_of,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")


def start(script: str, *words: str, front: tuple[str, ...] = ("torch.distributed.run",), **env: str) -> Any:
    ranks = ("--nproc-per-node=2", f"--master-port={free_port()}")
    return begin(sys.executable, "-m", *front, *ranks, f"{JOBS / script}.py", *words, **env)


def finish(process: Any, folder: Path) -> tuple[int, str, str, dict[str, Any]]:
    """Wait for a job and its watcher; return the job's status, streams and report."""
    stdout, stderr = process.communicate(timeout=200)  # the watcher has stderr too, until it ends
    print(stdout, stderr)
    report = json.loads((folder / "report.json").read_text())
    hold_to_schema(report)
    return process.returncode, stdout, stderr, report


def test_a_hung_rank_is_named_with_its_line_and_the_ranks_are_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, _, stderr, report = finish(start("watched", str(folder), "hang"), folder)

    assert (report["verdict"]["code"], report["verdict"]["ranks"]) == ("DD601", [1])
    assert "--hang-timeout" not in report["verdict"]["fix"]
    assert report["verdict"]["where"][0]["line"] == marked_lines("watched")[0]
    assert "waits in all_reduce" in " ".join(report["verdict"]["evidence"])  # by its name in the script
    assert (status != 0, report["job"]["status"], stderr.count("explain DD601")) == (True, "hung", 1)
    assert "DD601 stuck, rank 1" in doctor("report", folder).stdout


def test_a_rank_that_raises_is_named_once_and_before_the_launcher_ends_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, _, stderr, report = finish(start("watched", str(folder), "crash"), folder)

    assert (report["verdict"]["code"], report["verdict"]["ranks"]) == ("DD604", [1])
    assert report["verdict"]["where"][0]["line"] == marked_lines("watched")[1]
    assert (stderr.count("explain DD604"), report["job"]["status"]) == (1, "failed")
    assert report["job"]["exit_status"] is None  # it is still to come, and Lightning's is one of its own
    assert stderr.index("DD604 crash") < stderr.index("ChildFailedError")


@pytest.mark.parametrize("fault", ["none", "afterwards"])
def test_a_healthy_job_is_silent_and_keeps_its_environment(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "run"
    status, stdout, stderr, report = finish(start("watched", str(folder), fault), folder)

    assert (status, stdout, report["job"]["status"], report["verdict"]) == (0, "left\nleft\n", "finished", None)
    said = [line for line in stderr.splitlines() if "ddpdoctor" in line]
    assert said == ["ddpdoctor: this process is already watched; ddpdoctor.watch does nothing here"]


def test_ctrl_c_is_no_finding_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    mark = f"INTERRUPTED_JOB={folder}"
    process = start("watched", str(folder), "interrupted", INTERRUPTED_JOB=str(folder))
    assert process.stdout.readline() == process.stdout.readline() == "trains\n"
    os.killpg(process.pid, signal.SIGINT)
    _, _, stderr, report = finish(process, folder)

    assert (report["job"]["status"], "DD6" in stderr) == ("interrupted", False)
    assert wait_for(lambda: not pids_with(mark))


@pytest.mark.cold  # its children get the module path of a Python that was started in the simple way
def test_ranks_that_the_watched_script_starts_are_watched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, _, _, report = finish(begin(sys.executable, JOBS / "watched_spawn.py", folder), folder)

    assert (report["verdict"]["code"], report["verdict"]["ranks"]) == ("DD601", [1])
    assert report["verdict"]["where"][0]["line"] == marked_lines("watched_spawn")[0]


def test_under_wrap_it_does_nothing_and_says_so_once(tmp_path: Path) -> None:
    wrap = ("ddpdoctor", "wrap", "--report-dir", str(tmp_path / "outer"))
    process = start("watched", str(tmp_path / "inner"), "none", front=wrap)
    status, _, stderr, _ = finish(process, tmp_path / "outer")

    assert (status, (tmp_path / "inner").exists()) == (0, False)
    assert stderr.count("ddpdoctor.watch does nothing here") == 1


def test_without_a_place_for_its_folder_the_job_runs_unwatched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start("watched", str(tmp_path / "file" / "run"), "none")
    stdout, stderr = process.communicate(timeout=200)

    assert (process.returncode, stdout) == (0, "left\nleft\n")
    assert stderr.count("ddpdoctor: this job is not watched: ") == 1


# The callbacks of frameworks watch each training, and give the framework's own log what was found.


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def run(script: str, *words: str, front: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    port = (f"--master-port={free_port()}",) if front else ()
    done = python(*front, *port, *words_of(script), *words, TRANSFORMERS_VERBOSITY="warning")
    print(done.stdout, done.stderr)
    return done


def codes(folder: Path) -> list[str]:
    return [finding["code"] for finding in json.loads((folder / "report.json").read_text())["findings"]]


def test_lightnings_logger_gets_the_verdict_of_a_training_that_failed(tmp_path: Path) -> None:
    need_module("lightning", extra="lightning")
    done = run("watched_lightning", str(tmp_path))

    assert (done.returncode != 0, codes(tmp_path / "good"), codes(tmp_path / "bad")[:1]) == (True, [], ["DD604"])
    good, bad = (tmp_path / "logs" / name / "hparams.yaml" for name in ("good", "bad"))
    logged = yaml.safe_load(bad.read_text())["ddpdoctor"]
    assert (good.exists(), "DD604 crash, rank 1" in logged) == (False, True)
    assert f"frameworks.py:{marked_lines('watched_lightning')[0]}" in logged


@pytest.mark.alone
@pytest.mark.nightly
def test_the_history_of_transformers_gets_the_verdict_of_a_slow_training(tmp_path: Path) -> None:
    need_module("transformers", extra="transformers")
    done = run("watched_transformers", str(tmp_path), front=TORCHRUN)

    assert sorted(line for line in done.stdout.splitlines() if line[:1] in "01" and line) == [
        "0 bad True", "0 good False", "1 bad False", "1 good False",
    ]  # fmt: skip
    assert (done.returncode, codes(tmp_path / "good"), codes(tmp_path / "bad")) == (0, [], ["DD610"])


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize(("pace", "found"), [("even", []), ("slow", ["DD610"])])
def test_accelerates_log_gets_the_verdict_of_a_slow_training(tmp_path: Path, pace: str, found: list[str]) -> None:
    need_module("accelerate", extra="accelerate")
    done = run("watched_accelerate", str(tmp_path / "run"), pace, front=TORCHRUN)

    assert (done.returncode, codes(tmp_path / "run")) == (0, found)
    # Once from the watcher, and once from the log.
    assert done.stderr.count("explain DD610") == 2 * len(found)
