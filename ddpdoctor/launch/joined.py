"""Watches ranks that it did not start: they call ``ddpdoctor.watch`` themselves, and come and leave one by one."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.ends import ASKED_TOGETHER_NS
from ddpdoctor.launch.command.options import WrapOptions
from ddpdoctor.launch.command.placement import Placement, Style
from ddpdoctor.launch.folders.attendance import Attendance, Leaving, read_attendance
from ddpdoctor.launch.folders.host_meeting import locked
from ddpdoctor.launch.folders.report_dir import REPORT_NAME
from ddpdoctor.launch.outcome import cause_of
from ddpdoctor.launch.processes.stopping import GRACE_S, recorded, stop_all
from ddpdoctor.launch.session import ENDING_SIGNALS, Session, handling
from ddpdoctor.launch.watching.examining import has_errors
from ddpdoctor.recorder.settings import RecorderSettings
from ddpdoctor.recorder.storage.files import remove

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.command.options import OnHang
    from ddpdoctor.launch.outcome import Cause, JobOutcome, Notifier
    from ddpdoctor.launch.session import Judge
    from ddpdoctor.launch.watching.progress import Followed
    from ddpdoctor.model.findings import Judgment

COME_LIMIT_S = 30.0
"""Our choice: a process that has started this watcher comes at once. If none comes, it was killed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Where ranks join."""

    record: Path
    """The folder in which they record."""
    meeting: Path | None
    """The file at which further ranks find it, or None if nobody else may come."""


class JoinedSession(Session):
    """One watch over the ranks of this host, until the last of them has left or ended."""

    def __init__(
        self, options: WrapOptions, load_judge: Callable[[], Judge], notifier: Notifier, joining: Joining
    ) -> None:
        """Take what ``Session`` takes, and where ranks join."""
        self.joining = joining
        super().__init__(options, load_judge, notifier)
        self.attendance = Attendance()
        self.failed = 0
        """How many processes had left with an error at the last check."""
        self.shown_cause: Cause | None = None
        """What was shown last, apart from hangs of a job that goes on."""
        self.closed = False
        self._deadline = time.monotonic() + COME_LIMIT_S

    def run(self) -> JobOutcome:
        """Watch until nobody is left, then judge."""
        with handling(ENDING_SIGNALS, self._note_signal):
            self._prepare()
            return self._end(self._watch_to_the_end())

    def _choose_folder(self) -> Path:
        return self.joining.record

    def _poll(self) -> int | None:
        """Return None while a process is present; then 0 if all have left well, else 1."""
        if not self.closed:
            self.attendance = read_attendance(self.folder)
            if Leaving.INTERRUPTED in self.attendance.left.values():
                self._note_end_by("SIGINT", time.monotonic_ns())
            came = self.attendance.left or self.attendance.gone
            if self.attendance.present or (not came and time.monotonic() < self._deadline) or not self._close():
                return None
        left = self.attendance.left.values()
        return int(bool(self.attendance.gone) or Leaving.FAILED in left)

    def _close(self) -> bool:
        """Let nobody join any more. Return False if somebody has just joined."""
        if self.joining.meeting is not None:
            with contextlib.suppress(OSError), locked(self.joining.meeting):
                self.attendance = read_attendance(self.folder)
                if self.attendance.present:
                    return False
                remove(self.joining.meeting)
        self.closed = True
        return True

    def _react(self) -> None:
        """Report a failure at once: the process waits a moment for that, and its launcher may then end everything."""
        left = list(self.attendance.left.values())
        failed = left.count(Leaving.FAILED)
        if failed > self.failed and not self.signals and Leaving.INTERRUPTED not in left:
            self.failed = failed
            self._take_evidence()
            with self._job_goes_first():
                self._show_failure()
        else:
            super()._react()

    def _show_failure(self) -> None:
        self.watch.save(ended=False, launcher_status=1)
        judgment = self.examining.judge_now()
        if has_errors(judgment):
            outcome = self._outcome(1, judgment)
            self._save(outcome)
            self._show_once(outcome)

    def _show_once(self, outcome: JobOutcome) -> None:
        if not self.is_known(outcome.judgment):
            self.shown_cause = cause_of(outcome.judgment)
            self.notifier.show(outcome)

    def is_known(self, judgment: Judgment) -> bool:
        """Return whether a judgment was shown before."""
        shown = [cause_of(judgment) for judgment in (self.reported,) if judgment is not None] + [self.shown_cause]
        return cause_of(judgment) in shown

    def _pass_on_signal(self) -> None:
        """Save a report when somebody ends the job; whoever sent the signal sends it to the ranks too."""
        if self._note_interruption():
            self._take_evidence()
            self._save_at_once()

    def _stop_hung(self) -> None:
        """Show why, and stop the recorded processes. Their launcher then ends, and a batch system all that is left."""
        with self._job_goes_first():
            self._show_once(self._outcome(None))
        stop_all(lambda _processes: recorded(self.folder), GRACE_S)

    def _close_record(self, status: int) -> None:
        """Count those that have left as ended: what they do now is not watched."""
        self.watch.follow(at_once=True)
        if self.hang is None:
            self._note_sigterm_to_all()
        now_ns = time.monotonic_ns()
        for process in self.watch.followed.values():
            how = self.attendance.left.get((process.pid, process.ticks))
            if how is not None and process.ended_ns is None:
                process.ended_ns, process.exit_code = now_ns, int(how is Leaving.FAILED)
        super()._close_record(status)

    def _outcome(self, status: int | None, judgment: Judgment | None = None) -> JobOutcome:
        """Return the outcome without the processes' exit status, which is still to come: they go on after the watch.

        Lightning, for example, ends with a status of its own after an error, and after Ctrl-C.
        """
        outcome = super()._outcome(status, judgment)
        return outcome if outcome.end.hung else replace(outcome, end=replace(outcome.end, exit_status=None))

    def _note_sigterm_to_all(self) -> None:
        """Note an interruption if all ranks got SIGTERM together: somebody has ended the launcher, or the job."""
        asked = [self._asked_to_end_ns(rank) for rank in self.watch.ranks()]
        known = [at_ns for at_ns in asked if at_ns is not None]
        if asked and len(known) == len(asked) and max(known) - min(known) <= ASKED_TOGETHER_NS:
            self._note_end_by("SIGTERM", min(known))

    def _asked_to_end_ns(self, rank: Followed) -> int | None:
        """Return when a rank got SIGTERM, as far as that is known, or None if it ended otherwise."""
        ended_by_it = rank.exit_code == -signal.SIGTERM
        return self.watch.evidence.asked_to_end_ns(rank) or (rank.ended_ns if ended_by_it else None)

    def _note_end_by(self, name: str, at_ns: int) -> None:
        if self.watch.interrupted_by is None:
            self.watch.interrupted_by, self.watch.interrupted_ns = name, at_ns


def joined_options(
    run_dir: Path, hang_timeout_s: float, on_hang: OnHang, entry: str, command: tuple[str, ...]
) -> WrapOptions:  # fmt: skip
    """Return the settings of a session that starts nothing. ``command`` is that of the first rank."""
    return WrapOptions(
        hang_timeout_s=hang_timeout_s,
        on_hang=on_hang,
        debug_level=None,
        report_dir=run_dir,
        report_file=run_dir / REPORT_NAME,
        placement=Placement(style=Style.COMMAND),
        format="text",
        quiet=False,
        ignore=(),
        ranks=RecorderSettings(),
        allow_different=(),
        speed=False,
        torchrun_args=(),
        script=command[0] if command else "",
        is_module=False,
        is_command=True,
        no_python=False,
        script_args=(),
        nproc_note=None,
        command=command,
        entry=entry,
    )
