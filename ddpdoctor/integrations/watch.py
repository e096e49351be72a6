"""``ddpdoctor.watch``: records and watches a job from inside its script, without ``ddpdoctor wrap``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.launch.attendance import HostWatch

HangAction = Literal["report", "kill"]
# Our choice: how long a rank that fails waits until the watcher has its evidence. The launcher may then stop all.
FAILURE_LIMIT_S = 3.0
REPORT_LIMIT_S = 10.0
POLL_S = 0.05
_active: Watch | None = None  # the watch of this process: a process is recorded once
_has_said = False
TITLE = "ddpdoctor"  # the name under which loggers get the report


class Watch(contextlib.ContextDecorator):
    """A watch over this process and the other ranks that call it: a context manager, and a decorator.

    It ends on a host when all ranks there have left it. If ddpdoctor itself fails, it says so on stderr once, and
    training continues.
    """

    def __init__(
        self,
        *,
        hang_timeout: float = 300.0,
        on_hang: HangAction = "report",
        report_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Take the seconds until a hang is reported, what to do then, and the run folder. Raises ``ValueError``."""
        if not hang_timeout > 0:
            raise ValueError(f"hang_timeout is {hang_timeout!r}; it must be a number of seconds above 0")
        if on_hang not in get_args(HangAction):
            raise ValueError(f"on_hang is {on_hang!r}; it must be one of {', '.join(get_args(HangAction))}")
        self._hang_timeout_s = float(hang_timeout)
        self._on_hang = on_hang
        self._report_dir = None if report_dir is None else Path(report_dir)
        self.entry = "ddpdoctor.watch"  # what the user has called: a callback of a framework is known by its own name
        self._meeting: HostWatch | None = None
        self._pid = 0
        self._has_failed = False
        self._former: dict[str, str | None] = {}

    def start(self) -> Self:
        """Begin to record this process. It does nothing in a job under ``wrap``, or where another watch runs."""
        global _active
        self._meeting, self._has_failed = None, False
        with _wall("this job is not watched"):
            from ddpdoctor.recorder.start import begin_late, is_foreign

            if _active is not None or is_foreign():
                _say_once("this process is already watched; ddpdoctor.watch does nothing here")
                return self
            _active, self._pid = self, os.getpid()
            from ddpdoctor.integrations.place import Asked, record_pythons, take_place

            limit_s, on_hang = self._hang_timeout_s, self._on_hang
            asked = Asked(hang_timeout_s=limit_s, on_hang=on_hang, report_dir=self._report_dir, entry=self.entry)
            self._meeting = take_place(asked, os.environ)
            self._former = record_pythons(self._meeting.record)
            begin_late(str(self._meeting.record))
            atexit.register(self._at_exit)
        return self

    def stop(self) -> None:
        """Leave the watch. The process stays recorded until the other ranks have left too."""
        self.leave(None)

    def report(self, wait_s: float = REPORT_LIMIT_S) -> str:
        """Return the findings of the watch as text, or "" if there are none.

        Waits until all ranks have left the watch, at most ``wait_s``. In a rank that failed it waits for a report of
        the failure only. A launcher may kill the rank at any moment: Lightning's does so up to five seconds after
        another rank has failed.
        """
        text = ""
        with _wall("the report cannot be read"):
            if self._meeting is None:
                return text
            from ddpdoctor.integrations.place import draw_verdict, read_report
            from ddpdoctor.model.findings import JobStatus

            run_dir, deadline = self._meeting.run_dir, time.monotonic() + wait_s
            while time.monotonic() < deadline and _is_watched(self._meeting):
                report = read_report(run_dir) if self._has_failed else None
                if report is not None and report.job is not None and report.job.status is JobStatus.FAILED:
                    break
                time.sleep(POLL_S)
            text = draw_verdict(run_dir)
        return text  # noqa: RET504 - the wall returns too

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None) -> None:
        """Leave the watch. After an error, wait until the evidence is taken."""
        global _active  # noqa: PLW0603 - a process has one recorder
        self._has_failed = self._has_failed or isinstance(error, Exception)
        if _active is not self or self._pid != os.getpid():  # a forked child has a copy of its parent's watch
            return
        _active = None
        with _wall("the watch could not be left"):
            from ddpdoctor.integrations.place import restore, this_process
            from ddpdoctor.launch.attendance import Leaving, leave
            from ddpdoctor.launch.run_folder import REPORT_NAME
            from ddpdoctor.recorder.errors import note_exception

            atexit.unregister(self._at_exit)
            restore(self._former)
            meeting, has_failed = self._meeting, isinstance(error, Exception)
            if meeting is None:
                return
            if has_failed and error is not None:
                note_exception(error, uncaught=True)
            interrupted = isinstance(error, KeyboardInterrupt)
            how = Leaving.FAILED if has_failed else Leaving.INTERRUPTED if interrupted else Leaving.DONE
            leave(meeting.record, this_process(), how)
            report, deadline = meeting.run_dir / REPORT_NAME, time.monotonic() + FAILURE_LIMIT_S
            while has_failed and time.monotonic() < deadline and not report.exists() and _is_watched(meeting):
                time.sleep(POLL_S)

    def _at_exit(self) -> None:
        self.leave(getattr(sys, "last_value", None))


def _is_watched(meeting: HostWatch) -> bool:
    from ddpdoctor.launch.stopping import is_same

    return is_same(*meeting.watcher)


@contextlib.contextmanager
def _wall(what_fails: str) -> Iterator[None]:
    """Report that ddpdoctor itself failed, and let training continue without it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the wall around ddpdoctor
        from ddpdoctor.recorder.state import pass_on  # here, so that importing ddpdoctor costs nothing

        pass_on(error)
        _say_once(f"{what_fails}: {getattr(error, 'message', error)}")


def _say_once(message: str) -> None:
    """Write a line to stderr, once for each process and on one rank."""
    global _has_said  # noqa: PLW0603 - once for each process
    number = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    if not _has_said and number == "0":
        _has_said = True
        with _wall("no stderr"):
            sys.stderr.write(f"ddpdoctor: {message}\n")


class TrainingWatch:
    """The base of framework callbacks and trackers: a watch that restarts with each training."""

    begins_at_once = False

    def __init__(
        self,
        *,
        hang_timeout: float = 300.0,
        on_hang: HangAction = "report",
        report_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Take what ``ddpdoctor.watch`` takes, and raise ``ValueError`` as it does."""
        super().__init__()
        self._watch = Watch(hang_timeout=hang_timeout, on_hang=on_hang, report_dir=report_dir)
        self._watch.entry = type(self).__name__
        self._runs = False
        if self.begins_at_once:
            self._begin()

    def _begin(self) -> None:
        if not self._runs:
            self._runs = True
            self._watch.start()

    def _end(self, log: Callable[[str], None] | None, error: BaseException | None = None) -> None:
        """Stop, and give ``log`` the report if something was found. ``log`` is None on ranks that log nothing."""
        if not self._runs:
            return
        self._runs = False
        self._watch.leave(error)
        if log is not None and (text := self._watch.report()):
            log(text)
