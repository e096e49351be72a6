"""Runs one wrapped job from start to end: launch, watch, take evidence, have it judged, stop, save."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.collect.run_files import save
from ddpdoctor.collect.run_ranks import ASKED_TOGETHER_NS
from ddpdoctor.exchange.store import wait_until
from ddpdoctor.launch import stopping
from ddpdoctor.launch.attendance import Attendance, Leaving, locked, read_attendance
from ddpdoctor.launch.evidence import RESERVE, EvidenceTaker
from ddpdoctor.launch.hang import NOTHING_FOUND, Examining, has_errors
from ddpdoctor.launch.placement import Placement, Style, WrapOptions
from ddpdoctor.launch.replica_exchange import LiveComparison, SharedReplicas
from ddpdoctor.launch.run_folder import choose_folder, copy_back, refuse, write_run_file
from ddpdoctor.launch.starting import start_launcher
from ddpdoctor.launch.watch import JobWatch
from ddpdoctor.model.errors import ExitStatus
from ddpdoctor.model.facts import END_NAME, RECORD_NAME, JobEnd, RecordPlace, shell_status
from ddpdoctor.model.findings import Outcome, Severity, hangs, now
from ddpdoctor.recorder.storage.files import CONTROL, make_record, open_new, open_plain, remove, write_whole
from ddpdoctor.recorder.storage.ring_layout import CONTROL_CLOSING, CONTROL_SIZE, CONTROL_STOPPING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import FrameType

    from ddpdoctor.launch.first_node import FirstNode
    from ddpdoctor.launch.other_node import OtherNode
    from ddpdoctor.model.findings import Judgment

    # Judges an attempt from its run folder, by default the last one. The launch package itself knows no rules.
    Judge = Callable[[Path, int | None], Judgment]

Cause = tuple[tuple[str, tuple[int, ...]], ...]
LOOK_EVERY_S = 0.1
LAUNCHER_TAKES_OVER_S = 0.5
# Our choice: an elastic job continues with fewer nodes after torch gives one up (15 s) and waits for more (30 s).
ELASTIC_RESTART_S = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Batch systems send these to ``wrap``, the process that they know, but mean them for the job (``srun --signal``).
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Our choice: a process that has started this watcher comes at once. If none comes, it was killed meanwhile.
COME_LIMIT_S = 30.0
RESERVE_BYTES = 4 * 2**20  # room for the answers of about a hundred ranks, and for watch.json


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a wrapped job ended, or its state so far."""

    folder: Path  # the folder with the record: the run folder, unless that is on a shared file system or full
    run_dir: Path
    judgment: Judgment
    end: JobEnd
    failure: Exception | None  # The first error in watching or judging. It does not change the job's own exit status.
    repeats: bool = False  # the job ended during a hang that was shown while it ran
    # The report's place on the node that judged the job, such as "node0:/scratch/run"; None if it was this node.
    judged_at: str | None = None

    @property
    def exit_status(self) -> int:
        return self.end.exit_status or 0


class Notifier(Protocol):
    """Informs the user."""

    @property
    def started(self) -> Callable[[Path], None]:
        """Takes the folder of the record, once the launcher has started."""

    def save(self, outcome: JobOutcome) -> None: ...  # write report.json
    def show(self, outcome: JobOutcome) -> None: ...
    def go_on(self, outcome: JobOutcome, *, is_known: bool) -> None:
        """Show a hang of a job that is not stopped; ``is_known``: it was shown and withdrawn before."""

    def withdraw(self, judgment: Judgment) -> None: ...  # announce that a report no longer holds, and remove it
    def report_crash(self, what: str) -> None: ...  # say that a check crashed while the job runs, and which
    def report_replicas(self, folder: Path, said: frozenset[str]) -> frozenset[str]:
        """Print a line for each finding about a run's replicas and gradients that is not in ``said``; return codes."""


def cause_of(judgment: Judgment) -> Cause:
    """Return the codes and ranks of a hang. Two reports with the same ones are the same hang."""
    return tuple((finding.code, finding.ranks) for finding in hangs(judgment))


def join_nodes(placement: Placement, folder: Path) -> FirstNode | OtherNode | None:
    """Serve the others, or look for the first; None if there are none, or no place to meet.

    If members on one host have no numbers, the one that gets the port is the first. A ``folder`` for the report that
    all nodes see is a second way to the first.
    """
    if placement.alone or not placement.hosts:
        return None
    from ddpdoctor.exchange.meeting import by_port
    from ddpdoctor.launch.first_node import FirstNode, further_ways
    from ddpdoctor.launch.other_node import OtherNode

    host = socket.gethostname()
    if placement.number == 0 or (placement.number is None and placement.one_host):
        first = FirstNode(placement, host, folder)
        if not first.serve() or placement.number == 0:
            return first
        first.close()
    other = OtherNode(placement, host, (by_port(placement.hosts, placement.port), *further_ways(placement, folder)))
    other.start()
    return other


class Session:
    """The state of one wrapped job."""

    def __init__(
        self, options: WrapOptions, load_judge: Callable[[], Judge], notifier: Notifier, folder: Path | None = None
    ) -> None:
        """Prepare the record, in ``folder`` or where there is room. Raises ``UserError`` if nothing can be recorded.

        ``load_judge`` imports the rules; it is called after the launcher has started.
        """
        self.options = options
        self.load_judge = load_judge
        self.judge: Judge = lambda *_: NOTHING_FOUND  # until the rules are loaded
        self.notifier = notifier
        self.run_dir = options.report_dir.resolve()
        self.folder = folder or choose_folder(self.run_dir)
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self.signals: list[tuple[signal.Signals, int]] = []  # the ending signals that the watcher received, and when
        # The same for signals passed on to the launcher, with which a batch system may warn of the coming end.
        self.warnings: list[tuple[signal.Signals, int]] = []
        self.answered_warnings = 0
        self.hang: Judgment | None = None  # the hang for which the job was stopped
        self.reported: Judgment | None = None  # the hang that was reported and still holds, while the job continues
        self.reported_causes: set[Cause] = set()  # all hangs that were reported
        self.attempt = 0
        self.shown: set[tuple[str, tuple[int, ...]]] = set()
        self.said: set[str] = set()  # codes of findings about replicas and gradients that were said while the job runs
        self.nonfinite = 0  # how often gradients were found not to be finite
        self.has_reported_crash = False
        self.failure: Exception | None = None
        self.launched_ns = time.monotonic_ns()
        try:
            write_run_file(self.folder, options, self.started_at, self.launched_ns)
            if self.folder != self.run_dir:
                place = RecordPlace(host=socket.gethostname(), folder=str(self.folder))
                with contextlib.suppress(OSError):  # for `ddpdoctor status`, which a full disk may cost
                    save(self.run_dir / RECORD_NAME, place)
            make_record(str(self.folder))
            # Reserve space for evidence, because a job that fills the disk often fails next.
            with contextlib.suppress(OSError), os.fdopen(open_new(self.folder / RESERVE), "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
            with os.fdopen(open_plain(self.folder / CONTROL, os.O_RDWR), "r+b") as file:
                self.control = mmap.mmap(file.fileno(), CONTROL_SIZE)
        except OSError as error:
            raise refuse(self.folder, error) from error

    def run(self) -> JobOutcome:
        mark = {"DDPDOCTOR_RUN": str(self.folder), "DDPDOCTOR_WATCHER": str(os.getpid())}
        guardian = stopping.Guardian(self.folder, mark, partial(copy_back, self.folder, self.run_dir))
        try:
            with handling(ENDING_SIGNALS, self._note_signal):
                self.launcher = start_launcher(self.options, self.folder, mark, guardian.protect_self)
                try:
                    with handling(OTHER_SIGNALS, self._note_signal):
                        self._prepare(self.launcher.pid)  # no rank waits for the rules to be imported
                        status = self._watch_to_the_end()
                finally:
                    if self.launcher.poll() is None:
                        stopping.stop_tree(self.launcher.pid, self.folder)
                    elif self.watch.interrupted_by is not None or self.launcher.returncode < 0:
                        # A shell that is asked to end leaves its ranks behind, and so does torchrun if a signal kills
                        # it.
                        stopping.stop_tree(self.launcher.pid, self.folder, grace_s=stopping.STOP_GRACE_S)
        finally:
            guardian.dismiss()
        return self._end(status)

    def _end(self, status: int) -> JobOutcome:
        outcome: JobOutcome | None = None
        with self._job_goes_first():
            with self._job_goes_first():
                self._close_record(status)
                if status and self.hang is None and not self.signals:
                    self.hang = self.examining.take_stop()
            known = len(self.signals)
            judgment = self.hang
            if judgment is None:
                judged = self.examining.judge_end(status, lambda: len(self.signals) > known)
                judgment = self._settle(judged, status)
            outcome = self._outcome(status, judgment)
            with self._job_goes_first():  # the findings are shown even if saving fails
                copy_back(self.folder, self.run_dir)
                self._save(outcome)
        with self._job_goes_first():
            if self.examining.nodes is not None:
                self.examining.nodes.close()
        return outcome or self._outcome(status)

    def _note_signal(self, number: int, _frame: object) -> None:
        noted = self.signals
        if number in OTHER_SIGNALS:
            self.launcher.send_signal(number)
            noted = self.warnings
        noted.append((signal.Signals(number), time.monotonic_ns()))

    def _prepare(self, launcher_pid: int | None) -> None:
        """Begin to watch, load the rules, and connect to the other nodes if there are any."""
        options = self.options
        self.shared = None if options.placement.alone else SharedReplicas(options.allow_different)
        replicas = LiveComparison(self.folder, options.ranks.check_every, options.allow_different, self.shared)
        evidence = EvidenceTaker(self.folder, self.control)
        self.watch = JobWatch(evidence, options.hang_timeout_s, self.launched_ns, replicas, launcher_pid)
        if options.placement.expected < options.placement.most:
            self.watch.restart_patience_s = ELASTIC_RESTART_S
        place = f"{socket.gethostname()}:{options.report_file.resolve().parent}"
        self.examining = Examining(self.watch, self._judge, options.hang_timeout_s, options.on_hang, place)
        with self._job_goes_first():
            nodes = join_nodes(self.options.placement, self.options.report_file.resolve().parent)
            self.examining.nodes = nodes
            if nodes is not None and self.shared is not None:
                self.shared.start(nodes)
        with self._job_goes_first():
            try:
                self.judge = self.load_judge()
            except Exception as error:
                self._report_crash(repr(error))
                raise
        with self._job_goes_first():
            self.notifier.started(self.folder)

    def _judge(self, folder: Path, attempt: int | None) -> Judgment:
        """Judge a run folder. If that fails while the job runs, say so once, because a hang may go unreported."""
        try:
            judgment = self.judge(folder, attempt)
        except Exception as error:
            self._report_crash(repr(error))
            raise
        for check in judgment.checks:
            if check.outcome is Outcome.CRASHED:
                self._report_crash(f"{check.code} {check.id}: {check.seen}")
        return judgment

    def _poll(self) -> int | None:
        """Return the status of the launcher, or None while it runs."""
        return self.launcher.poll()

    def _stop_hung(self) -> None:
        stopping.stop_job(self.launcher, self.folder, self.watch.evidence.acknowledge)

    def _report_crash(self, what: str) -> None:
        if not self.has_reported_crash and self._poll() is None:
            self.has_reported_crash = True
            self.notifier.report_crash(what)

    def _watch_to_the_end(self) -> int:
        while (status := self._poll()) is None:
            with self._job_goes_first():
                self.watch.wait(LOOK_EVERY_S)
                self.watch.follow()
                if self.watch.agent.attempt > self.attempt:  # save one that was given up, before the next overwrites it
                    self.watch.save(ended=True, launcher_status=None, attempt=self.attempt)
                    self.attempt = self.watch.agent.attempt
            with self._job_goes_first():
                self._react()
            with self._job_goes_first():
                if self.hang is None and not self.signals:
                    self.examining.serve()
            nonfinite = sum(rank.cells.get("nonfinite", 0) for rank in self.watch.ranks())
            if self.watch.replicas.has_news or nonfinite > self.nonfinite:
                self.nonfinite = nonfinite
                with self._job_goes_first():  # say it once, as soon as the rules find it wrong
                    self.watch.replicas.has_news = False
                    self.watch.replicas.save()
                    self.examining.save_nodes()
                    self.said |= self.notifier.report_replicas(self.folder, frozenset(self.said))
        # A signal may have ended the launcher before the next check. So may a warning, if the script has no handler.
        self.signals += [(number, at_ns) for number, at_ns in self.warnings if status == -number][:1]
        if self.signals and self._note_interruption(*self.signals[0]):
            self.watch.stopping_since_ns = self.watch.interrupted_ns
        return status

    def _react(self) -> None:
        """Do what is due: pass on signals, take evidence that is asked for, examine, stop a job that hangs."""
        if self.signals:
            self._pass_on_signal()
        elif len(self.warnings) > self.answered_warnings:
            self.answered_warnings = len(self.warnings)
            self._take_evidence()
            copy_back(self.folder, self.run_dir)
        elif self.watch.evidence.closing_ns():
            self._take_evidence()
            with self._job_goes_first():  # why a rank failed, for torchrun's closing block
                alone = self.options.placement.alone
                found = self.examining.judge_now().findings if alone and self.hang is None else ()
                if found and found[0].severity is Severity.ERROR:
                    line = f"{found[0].code} {found[0].kind} (ddpdoctor): {found[0].summary}"
                    write_whole(self.folder / "verdict.txt", " ".join(line.split()))
            self.watch.evidence.acknowledge()
        elif self.hang is None and (examined := self.examining.examine()) is not None:
            if examined.stop:
                # Ranks here fail if other nodes stop theirs sooner, so save first that the job is being stopped.
                self.watch.stopping_since_ns = time.monotonic_ns()
                self.watch.save(ended=False, launcher_status=None)
                self.examining.announce(examined.judgment, stop=True)
                self.hang = examined.judgment
                self._save(self._outcome(None))
                self.watch.evidence.set_control(CONTROL_STOPPING, time.monotonic_ns())
                self._stop_hung()
            elif has_errors(examined.judgment):
                self.examining.announce(examined.judgment, stop=False)
                self.examining.stand_by(examined.judgment)
                self._report(examined.judgment)
            else:
                self._withdraw()

    @contextlib.contextmanager
    def _job_goes_first(self) -> Iterator[None]:
        """Keep ddpdoctor's own errors for the end: a job must not stop because, say, its folder is gone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no error of ddpdoctor ends a job, or changes how it ends
            self.failure = self.failure or error
            time.sleep(LOOK_EVERY_S)

    def _take_evidence(self) -> None:
        with self._job_goes_first():
            self.watch.take_evidence()

    def _report(self, judgment: Judgment) -> None:
        """Show once what is wrong with a job that continues. Save a hang too: the job may never end by itself."""
        outcome = self._outcome(None, judgment)
        found = _said(judgment)
        if not hangs(judgment):
            if found != self.shown:
                self.notifier.show(outcome)
            self.shown = found
            return
        cause = cause_of(judgment)
        if self.reported is None or cause_of(self.reported) != cause:
            self.reported = judgment
            copy_back(self.folder, self.run_dir)
            self._save(outcome)
            self.notifier.go_on(outcome, is_known=cause in self.reported_causes)
            self.reported_causes.add(cause)

    def _withdraw(self) -> None:
        self.examining.withdraw()
        reported, self.reported = self.reported, None
        if reported is not None:
            for folder in (self.watch.evidence.readable(), self.run_dir):
                (folder / END_NAME).unlink(missing_ok=True)
            self.notifier.withdraw(reported)

    def _save(self, outcome: JobOutcome) -> None:
        """Save the report, and then the job's end or state in the run folder so that it can be judged again."""
        self.notifier.save(outcome)
        for folder in dict.fromkeys((outcome.folder, outcome.run_dir)):
            with contextlib.suppress(OSError):  # the report comes first on a nearly full disk
                save(folder / END_NAME, outcome.end)

    def _settle(self, judged: Judgment, status: int | None) -> Judgment:
        """Return the final judgment: the one at the end, or the reported hang if the job was ended during it."""
        if self.reported is None or hangs(judged) or self.examining.judged_at is not None:
            return judged
        if status != 0 or self.watch.interrupted_by is not None:
            return self.reported
        self._withdraw()
        return judged

    def _pass_on_signal(self) -> None:
        """Save evidence within a scheduler's grace time, then let the launcher end its ranks in its usual way."""
        number, began_ns = self.signals[0]
        if self._note_interruption(*self.signals[0]):
            if self.examining.have_moved():
                self._withdraw()
            self._take_evidence()
            self.watch.stopping_since_ns = time.monotonic_ns()
            taker, poll = self.watch.evidence, self.launcher.poll
            taker.acknowledge()
            if number == signal.SIGINT:
                # The launcher needs a moment to react to a terminal's Ctrl-C; a SIGINT from kill(1) did not reach it.
                wait_until(
                    lambda: taker.read_control(CONTROL_CLOSING) > began_ns or poll() is not None,
                    LAUNCHER_TAKES_OVER_S,
                    0.02,
                )
            # The launcher needs no signal if it already stops its ranks, or got the terminal's Ctrl-C itself. A second
            # one would interrupt what a script does at the first, such as saving its last checkpoint.
            has_heard = poll() is not None or taker.read_control(CONTROL_CLOSING) > began_ns
            by_terminal = number == signal.SIGINT and self.options.placement.style is not Style.TORCHRUN
            if not has_heard and not (by_terminal and stopping.is_in_foreground()):
                self.launcher.send_signal(number)
            self._save_at_once()
        elif len(self.signals) > 1:
            stopping.stop_tree(self.launcher.pid, self.folder)
        self.watch.evidence.acknowledge()

    def _note_interruption(self, number: signal.Signals, at_ns: int) -> bool:
        """Record the signal that ends the job; return False if one is recorded already."""
        if self.watch.interrupted_by is not None:
            return False
        self.watch.interrupted_by, self.watch.interrupted_ns = number.name, at_ns
        return True

    def _save_at_once(self) -> None:
        """Save a report from this node's evidence, because a scheduler's grace time may end before the job does."""
        with self._job_goes_first():
            copy_back(self.folder, self.run_dir)
            judgment = self._settle(self.examining.judge_now(), None)
            self._save(self._outcome(None, judgment))

    def _close_record(self, status: int) -> None:
        self.watch.follow(at_once=True)
        self.watch.evidence.release()
        if self.shared is not None:
            self.shared.close()  # from here on nothing is forgotten, because all nodes' files are compared
        self.watch.replicas.close()
        if self.hang is None:
            self.watch.evidence.forget_kept()
            self.watch.save(ended=True, launcher_status=status)

    def _outcome(self, status: int | None, judgment: Judgment | None = None) -> JobOutcome:
        hung, nodes = self.hang is not None, self.examining.nodes
        exit_status = ExitStatus.HUNG if hung else shell_status(status) if status is not None else None
        if self.watch.interrupted_by == "SIGINT":
            exit_status = ExitStatus.INTERRUPTED
        found = judgment or self.hang or NOTHING_FOUND
        return JobOutcome(
            folder=self.watch.evidence.readable(), run_dir=self.run_dir, judgment=found,
            end=JobEnd(
                hung=hung, interrupted=self.watch.interrupted_by is not None, exit_status=exit_status,
                started_at=self.started_at, ended_at=now(), ignore=self.options.ignore,
            ),
            repeats=status is not None and self.reported is not None and _said(found) == _said(self.reported),
            failure=self.failure or self.watch.replicas.failure or (nodes.failure if nodes is not None else None),
            judged_at=self.examining.judged_at,
        )  # fmt: skip


@contextlib.contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle some signals for a while, and put back the former handlers."""
    # If nohup made this process ignore SIGHUP, keep ignoring it, here and in the launcher.
    taken = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _said(judgment: Judgment) -> set[tuple[str, tuple[int, ...]]]:
    return {(finding.code, finding.ranks) for finding in judgment.findings}


class JoinedSession(Session):
    """One watch over the ranks of this host, until the last of them has left or ended."""

    def __init__(
        self, options: WrapOptions, load_judge: Callable[[], Judge], notifier: Notifier, record: Path,
        meeting: Path | None,
    ) -> None:  # fmt: skip
        """Take what ``Session`` takes; further ranks find ``record`` at ``meeting``, or nobody may come (None)."""
        super().__init__(options, load_judge, notifier, record)
        self.meeting = meeting
        self.attendance = Attendance()
        self.failed = 0  # how many processes had left with an error at the last check
        self.shown_cause: Cause | None = None  # what was shown last, apart from hangs of a job that goes on
        self.closed = False
        self._deadline = time.monotonic() + COME_LIMIT_S

    def run(self) -> JobOutcome:
        with handling(ENDING_SIGNALS, self._note_signal):
            self._prepare(None)
            return self._end(self._watch_to_the_end())

    def _poll(self) -> int | None:
        """Return None while a process is present; then 0 if all have left well, else 1."""
        if not self.closed:
            self.attendance = read_attendance(self.folder)
            if Leaving.INTERRUPTED in self.attendance.left.values():
                self._note_interruption(signal.SIGINT, time.monotonic_ns())
            came = self.attendance.left or self.attendance.gone
            if self.attendance.present or (not came and time.monotonic() < self._deadline):
                return None
            if self.meeting is not None:  # let nobody join any more, unless somebody has just joined
                with contextlib.suppress(OSError), locked(self.meeting):
                    self.attendance = read_attendance(self.folder)
                    if self.attendance.present:
                        return None
                    remove(self.meeting)
            self.closed = True
        left = self.attendance.left.values()
        return int(bool(self.attendance.gone) or Leaving.FAILED in left)

    def _react(self) -> None:
        """Report a failure at once: the process waits a moment for that, and its launcher may then end everything."""
        left = list(self.attendance.left.values())
        failed = left.count(Leaving.FAILED)
        if failed > self.failed and not self.signals and Leaving.INTERRUPTED not in left:
            self.failed = failed
            self._take_evidence()
            with self._job_goes_first():
                self.watch.save(ended=False, launcher_status=1)
                judgment = self.examining.judge_now()
                if has_errors(judgment):
                    outcome = self._outcome(1, judgment)
                    self._save(outcome)
                    self._show_once(outcome)
        else:
            super()._react()

    def _show_once(self, outcome: JobOutcome) -> None:
        if not self.is_known(outcome.judgment):
            self.shown_cause = cause_of(outcome.judgment)
            self.notifier.show(outcome)

    def is_known(self, judgment: Judgment) -> bool:
        shown = [cause_of(judgment) for judgment in (self.reported,) if judgment is not None] + [self.shown_cause]
        return cause_of(judgment) in shown

    def _pass_on_signal(self) -> None:
        """Save a report when somebody ends the job; whoever sent the signal sends it to the ranks too."""
        if self._note_interruption(*self.signals[0]):
            self._take_evidence()
            self._save_at_once()

    def _stop_hung(self) -> None:
        """Show why, and stop the recorded processes. Their launcher then ends, and a batch system all that is left."""
        with self._job_goes_first():
            self._show_once(self._outcome(None))
        stopping.stop_all(lambda _processes: stopping.recorded(self.folder), stopping.GRACE_S)

    def _close_record(self, status: int) -> None:
        """Count those that have left as ended: what they do now is not watched."""
        self.watch.follow(at_once=True)
        if self.hang is None:
            # Note an interruption if all ranks got SIGTERM together: somebody has ended the launcher, or the
            # job.
            asked = [
                self.watch.evidence.asked_to_end_ns(rank)
                or (rank.ended_ns if rank.exit_code == -signal.SIGTERM else None)
                for rank in self.watch.ranks()
            ]
            known = [at_ns for at_ns in asked if at_ns is not None]
            if asked and len(known) == len(asked) and max(known) - min(known) <= ASKED_TOGETHER_NS:
                self._note_interruption(signal.SIGTERM, min(known))
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
