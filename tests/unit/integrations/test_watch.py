"""What ``ddpdoctor.watch`` refuses, and what importing it costs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.integrations import place
from ddpdoctor.integrations import watch as watches
from ddpdoctor.integrations.place import Asked, take_place
from ddpdoctor.launch.attendance import (
    Attendance,
    HostWatch,
    Leaving,
    enter,
    leave,
    locked,
    read_attendance,
    read_meeting,
)
from ddpdoctor.launch.stopping import Target
from ddpdoctor.model.findings import JobStatus, JobSummary
from ddpdoctor.recorder.state import start_ticks
from ddpdoctor.report.formats import render_json
from tests.pictures import finding, report
from tests.scenarios.running import wait_for


def test_a_value_that_makes_no_sense_is_refused_before_anything_starts() -> None:
    """A watch that has not started has no report and may be stopped."""
    for settings, why in (
        ({"hang_timeout": 0}, "hang_timeout is 0"), ({"hang_timeout": float("nan")}, "hang_timeout is nan"),
        ({"on_hang": "auto"}, "on_hang is 'auto'; it must be one of report, kill"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            ddpdoctor.watch(**settings)
    watch = ddpdoctor.watch()
    watch.stop()
    assert watch.report() == ""


def test_nothing_heavy_is_imported_before_it_starts() -> None:
    code = "import ddpdoctor, ddpdoctor.integrations.pytest_plugin; ddpdoctor.watch()"
    code = f"import json, sys; old = set(sys.modules); {code}; print(json.dumps([*set(sys.modules) - old]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    heavy = {"torch", "rich", "psutil", "numpy", "pytest", "ddpdoctor.launch", "ddpdoctor.recorder"}

    assert heavy.isdisjoint(json.loads(done.stdout))


class Paused(BaseException):
    """It waits for something."""


def pause(_seconds: float) -> None:
    raise Paused


def save_report(folder: Path, status: JobStatus) -> None:
    job = JobSummary(world_size=2, nnodes=1, status=status, exit_status=1)
    (folder / "report.json").write_text(render_json(report(finding("DD604", "crash"), job=job)))


def test_a_rank_that_failed_waits_for_a_report_of_the_failure_and_not_for_the_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = os.getpid(), start_ticks()  # one that does not end
    watch = ddpdoctor.watch()
    watch._meeting, watch._has_failed = HostWatch(record=tmp_path, run_dir=tmp_path, watcher=watcher), True
    monkeypatch.setattr(watches.time, "sleep", pause)

    with pytest.raises(Paused):
        watch.report()
    save_report(tmp_path, JobStatus.RUNNING)
    with pytest.raises(Paused):
        watch.report()
    save_report(tmp_path, JobStatus.FAILED)
    assert "DD604 it is" in watch.report()


# How the ranks of one host find one run folder.


ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}


class Ranks:
    """Processes, in whose names this one takes their places."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.processes = folder, monkeypatch, contextlib.ExitStack()
        monkeypatch.setattr("tempfile.tempdir", str(folder))

    def start(self) -> Target:
        process = self.processes.enter_context(subprocess.Popen(["sleep", "600"]))
        self.processes.callback(process.kill)
        return process.pid, start_ticks(process.pid)

    def take(self, **env: str) -> HostWatch:
        process = self.start()
        self.monkeypatch.setattr(place, "this_process", lambda: process)
        asked = Asked(hang_timeout_s=60.0, on_hang="report", report_dir=self.folder / "run")
        return take_place(asked, {**os.environ, **ENV, "TMPDIR": str(self.folder), **env})


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(tmp_path, monkeypatch)
    with made.processes:
        yield made


def test_the_ranks_of_one_launch_share_a_folder_and_a_watcher_that_ends_with_them(tmp_path: Path, ranks: Ranks) -> None:
    first, second = (ranks.take(RANK=str(number)) for number in range(2))
    assert (first.run_dir, second) == (tmp_path / "run", first)
    ranks.processes.close()
    assert wait_for(lambda: not list(next(tmp_path.glob("ddpdoctor-watch-*")).iterdir()))


def test_another_launch_into_the_same_folder_and_another_host_get_subfolders(tmp_path: Path, ranks: Ranks) -> None:
    ranks.monkeypatch.setattr(place, "_start_watcher", lambda *_: ranks.start())
    # The second cannot be of the same launch, where there is a rank 0.
    launches: list[dict[str, str]] = [{"RANK": "0"}, {"RANK": "0"}, {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}]
    seen = [ranks.take(**env) for env in [*launches, {"RANK": "9", "GROUP_RANK": "1", "MASTER_PORT": "1"}]]
    assert [str(one.run_dir.relative_to(tmp_path)) for one in seen] == ["run", "run/run-2", "run/run-3", "run/node-1"]
    assert len({one.watcher for one in seen}) == 4


def test_who_comes_and_leaves_is_known(tmp_path: Path) -> None:
    me, gone = (os.getpid(), start_ticks()), (os.getpid(), 1)
    assert read_attendance(tmp_path) == Attendance()
    enter(tmp_path, me, "3")
    enter(tmp_path, gone, "4")
    assert read_attendance(tmp_path) == Attendance(present={me: "3"}, gone=frozenset({gone}))
    leave(tmp_path, me, Leaving.FAILED)
    assert read_attendance(tmp_path) == Attendance(left={me: Leaving.FAILED}, gone=frozenset({gone}))
    enter(tmp_path, me, "3")
    assert read_attendance(tmp_path).present == {me: "3"}


@pytest.mark.parametrize("text", ["", "null", "{}", '{"record": 1}', '{"record": "a", "run_dir": "b", "watcher": 1}'])
def test_a_damaged_meeting_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "meeting"
    file.write_text(text)
    with file.open() as opened:
        assert read_meeting(opened.fileno()) is None


def test_who_waits_for_a_meeting_that_is_removed_gets_the_next_one(tmp_path: Path) -> None:
    file, waits = tmp_path / "meeting", threading.Event()
    got: list[int] = []

    def wait() -> None:
        waits.set()
        with locked(file) as descriptor:
            got.append(os.fstat(descriptor).st_ino)

    with locked(file):
        thread = threading.Thread(target=wait)
        thread.start()
        waits.wait(60)
        file.unlink()
    thread.join(60)
    assert got == [file.stat().st_ino]


def test_a_meeting_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpdoctor.model.errors import UserError

    (tmp_path / f"ddpdoctor-watch-{os.getuid()}").symlink_to(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match="is a link"):
        take_place(Asked(hang_timeout_s=1.0, on_hang="report", report_dir=tmp_path / "run"), ENV)
