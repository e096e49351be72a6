"""``status`` while a real job runs: what it does, who waits for whom, and evidence on demand."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import forking
from tests.preloaded import preloaded
from tests.scenarios.running import JOBS, clean_environment, hold_to_schema, kill_job, marked_lines, start, wait_for

SCRIPT = "trains_until"


@dataclass(frozen=True)
class Live:
    """A job that trains until the test ends it."""

    process: subprocess.Popen[str]
    run: Path
    folder: Path

    def status(self, *options: str) -> subprocess.CompletedProcess[str]:
        return forking.run("-m", "ddpdoctor", "status", self.run, *options, env=clean_environment())

    def now(self) -> dict[str, Any]:
        done = self.status("--format", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def until(self, condition: Any) -> dict[str, Any]:
        """Ask until the status is as wanted, and return it."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            seen.update(self.now())
            return bool(condition(seen))

        assert wait_for(holds), seen
        return seen


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Lend one job to all tests that leave it as it was: any of them may be the first or the only one."""
    with lent_job(tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("runs") / "run") as live:
        yield live


@contextlib.contextmanager
def lent_job(folder: Path, run: Path) -> Iterator[Live]:
    with preloaded():
        process = start(SCRIPT, run, "--hang-timeout", "500", ranks=2, args=(str(folder),))
    try:
        assert wait_for(lambda: all((folder / f"at_{rank}").exists() for rank in range(2)))
        yield Live(process, run, folder)
    finally:
        process.kill()
        process.communicate()
        kill_job(run)


def test_a_job_that_trains_is_one_row_with_its_pace(job: Live) -> None:
    seen = job.until(lambda one: all(rank["step"] > 20 for rank in one["ranks"]) and one["replicas"])

    assert (seen["format"], seen["version"], seen["state"], seen["world_size"]) == ("ddpdoctor-status", 1, "running", 2)
    for rank in seen["ranks"]:
        assert rank["lives"]
        assert rank["step_ms"] > 10
        assert 0 <= rank["waits_share"] <= 1
        assert rank["epoch"] == (rank["batch"] - 1) // 8 + 1
        assert abs(rank["batch"] - rank["step"]) <= 1
        assert rank["memory_bytes"] > 50 * 2**20
    assert seen["replicas"]["equal_up_to"] >= 1
    assert seen["replicas"]["differing"] == []
    text = job.status().stdout
    assert text.startswith("ddpdoctor: the job runs for ")
    assert f", 2 ranks; run folder {job.run}\n" in text
    assert "replicas equal up to optimizer step " in text


def test_watched_in_a_pipe_it_is_written_block_by_block_until_ctrl_c(job: Live) -> None:
    with preloaded():
        watching = forking.start("-m", "ddpdoctor", "status", job.run, "--watch", "--every", "50ms",
                                 env=clean_environment())  # fmt: skip
    assert watching.stdout is not None
    blocks = 0
    while blocks < 2:
        blocks += watching.stdout.readline().startswith("ddpdoctor: the job runs for ")
    watching.send_signal(signal.SIGINT)
    rest, errors = watching.communicate(timeout=100)
    assert (watching.returncode, errors) == (0, "")
    assert "\x1b" not in rest


def test_a_reader_that_goes_ends_the_watch(job: Live) -> None:
    watching = forking.start("-m", "ddpdoctor", "status", job.run, "--watch", "--every", "50ms", "--format", "json",
                             env=clean_environment())  # fmt: skip
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["state"] == "running"
    watching.stdout.close()
    assert watching.wait(100) == 0


def test_who_waits_for_whom_is_said_with_the_line_and_a_dump_judges_it(job: Live) -> None:
    (job.folder / "hold").touch()
    assert wait_for((job.folder / "held").exists)
    seen = job.until(lambda one: one["waits"] and not any(rank["trains"] for rank in one["ranks"]))
    rank0, rank1 = seen["ranks"]

    assert [(wait["ranks"], wait["call"]) for wait in seen["waits"]] == [([0], "all_reduce of float32[]")]
    assert seen["waited_for"] == [1]
    assert (rank0["trains"], rank0["state"], rank1["state"]) == (False, "in all_reduce", "in the script")
    assert rank1["where"]["line"] in marked_lines(SCRIPT) or rank1["where"]["function"] == "wait_for_the_test"
    text = job.status().stdout
    assert "\nrank 0 has waited for rank 1 for " in text
    assert " s, in all_reduce of float32[]\n" in text
    assert f"\nrank 1 is at {Path(JOBS / SCRIPT).relative_to(Path.cwd())}.py:{rank1['where']['line']} in " in text

    done = job.status("--dump", "--format", "json")
    report = json.loads(done.stdout)
    (job.folder / "hold").unlink()
    hold_to_schema(report)
    assert (done.returncode, report["job"]["status"]) == (0, "running")
    assert all(row["stack"] for row in report["ranks"])
    assert any("wait_for_the_test" in line for line in report["ranks"][1]["stack"])


def test_after_a_dump_the_job_trains_on_and_the_report_can_be_drawn_again(job: Live) -> None:
    before = len(list((job.run / "dumps").glob("*")))
    done = job.status("--dump")
    step = job.now()["ranks"][0]["step"]
    folder = job.run / "dumps" / str(before + 1)

    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("ddpdoctor: the job continues\n")
    assert done.stdout.startswith("ddpdoctor: no problem found\n")
    assert f"  running (interim report), 2 ranks; report in {folder}\n" in done.stdout
    job.until(lambda one: all(rank["step"] > step + 5 and rank["trains"] for rank in one["ranks"]))
    again = forking.run("-m", "ddpdoctor", "report", folder, env=clean_environment())
    assert again.stdout == done.stdout


def test_history_shows_a_job_that_still_runs(job: Live) -> None:
    done = forking.run("-m", "ddpdoctor", "history", job.run.parent, "--format", "json", env=clean_environment())
    (found,) = json.loads(done.stdout)["jobs"]
    assert [(one["status"], one["ended_at"], one["steps"] > 0) for one in found["starts"]] == [("running", None, True)]
    assert (found["failures"], found["span_s"] > 0) == (0, True)


def test_the_watch_ends_with_the_job_whose_status_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with lent_job(tmp_path / "job", tmp_path / "run") as job:
        assert job.status("--dump").returncode == 0
        the_watch_ends_with(job)
        assert list((job.run / "dumps").iterdir()) != []


def the_watch_ends_with(job: Live) -> None:
    watching = forking.start("-m", "ddpdoctor", "status", job.run, "--watch", "--every", "50ms",
                             env=clean_environment())  # fmt: skip
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("ddpdoctor: the job runs for ")
    (job.folder / "end").touch()
    shown, _ = watching.communicate(timeout=200)

    assert (watching.returncode, job.process.wait(100)) == (0, 0)
    assert shown.endswith(f"the job has ended with exit status 0\n  report  ddpdoctor report {job.run}\n")
    refused = job.status("--dump")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"`ddpdoctor report {job.run}`" in refused.stderr
