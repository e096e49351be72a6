"""Watches the processes that a test starts, once one of them is a rank, and fails the test if they hang."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddpdoctor.integrations import place
from ddpdoctor.launch.attendance import Leaving, enter, leave
from ddpdoctor.model.errors import ExitStatus
from ddpdoctor.recorder.start import is_foreign
from ddpdoctor.recorder.state import pass_on
from ddpdoctor.recorder.storage.files import make_record
from ddpdoctor.recorder.storage.ring_layout import RANK_SHAPE

if TYPE_CHECKING:
    from collections.abc import Generator

LOOK_EVERY_S = 0.2
VERDICT_LIMIT_S = 15.0  # our choice: how long a failed test waits for the verdict of its ranks


class WatchedTests:
    """The part of the plugin that is active only with the option."""

    def __init__(self, timeout_s: float) -> None:
        self._asked = place.Asked(hang_timeout_s=timeout_s, on_hang="kill", report_dir=None, entry="pytest")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run one test under watch, unless this job is watched already."""
        if is_foreign():
            return (yield)
        try:
            run = WatchedTest(self._asked)
        except OSError as error:  # there is no room for a record: a test must not fail because of that
            pass_on(error)
            item.add_report_section("call", "ddpdoctor", f"this test is not watched: {error}")
            return (yield)
        failure: BaseException | None = None
        result: object = None
        former = place.record_pythons(run.folder)
        try:
            result = yield
        except BaseException as error:  # noqa: BLE001 - it is raised again below, with what was found
            failure = error
        finally:
            place.restore(former)
        headline = verdict = ""
        try:
            verdict = run.end(failed=failure is not None)
            headline = run.headline if verdict and run.was_stopped else ""
        except Exception as error:  # noqa: BLE001 - a test that has ended keeps its outcome, whatever fails here
            pass_on(error)
            verdict = f"the watch of this test failed: {error}"
        if headline:
            pytest.fail(f"{headline}\n\n{verdict}", pytrace=False)
        if verdict:
            item.add_report_section("call", "ddpdoctor", verdict)
        if failure is not None:
            raise failure
        return result


class WatchedTest:
    """The record of one test."""

    def __init__(self, asked: place.Asked) -> None:
        self._asked = asked
        self.folder = Path(tempfile.mkdtemp(prefix="ddpdoctor-test-"))
        self._watcher: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        make_record(str(self.folder))
        enter(self.folder, place.this_process(), "")
        self._thread = threading.Thread(target=self._await_ranks, name="ddpdoctor-test", daemon=True)
        self._thread.start()

    @property
    def was_stopped(self) -> bool:
        report = place.read_report(self.folder)
        return report is not None and report.job is not None and report.job.exit_status == ExitStatus.HUNG

    @property
    def headline(self) -> str:
        report = place.read_report(self.folder)
        if report is None or report.verdict is None:
            return "the ranks of this test hung"
        return f"{report.verdict.code} {report.verdict.kind}: {report.verdict.summary}"

    def end(self, *, failed: bool) -> str:
        """End the watch; return the verdict of a test that has failed or whose ranks were stopped, else ""."""
        self._ended.set()
        self._thread.join()
        leave(self.folder, place.this_process(), Leaving.FAILED if failed else Leaving.DONE)
        watcher = self._watcher
        if watcher is not None and (failed or self.was_stopped):
            with contextlib.suppress(subprocess.TimeoutExpired):
                watcher.wait(VERDICT_LIMIT_S)
            if verdict := place.draw_verdict(self.folder):
                return verdict
        if watcher is not None:
            watcher.kill()
            watcher.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        return ""

    def _await_ranks(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            if any(path.stat().st_size == RANK_SHAPE.total_bytes for path in (self.folder / "rings").glob("*.ring")):
                break
        else:
            return
        command = place.watcher_command(self._asked, [str(self.folder), str(self.folder), ""])
        env, nowhere = place.watcher_environment(os.environ), subprocess.DEVNULL
        self._watcher = subprocess.Popen(command, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere)
