"""Runs a prepared job and reports on stderr, while it runs and at its end."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.cli.output import read_cwd, save_page, save_report, say, show_defect, show_error, show_report, write
from ddpdoctor.launch.placement import WrapOptions
from ddpdoctor.launch.run_folder import REPORT_NAME, has_space, read_launcher_log
from ddpdoctor.launch.starting import notes_of
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import JobStatus, Outcome, Severity, hangs
from ddpdoctor.model.words import rank_list
from ddpdoctor.report.lines import clean, title_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.session import JobOutcome, Judge
    from ddpdoctor.model.findings import Finding, Judgment, Report

    MakeReport = Callable[[JobOutcome], Report]
    Act = Callable[[Report, Path], None]

# Errors for an exhausted resource of the machine. They are not defects of ddpdoctor.
NO_ROOM = frozenset({errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS})
# The message below the report of a hang, by the value of ``--on-hang``.
GOES_ON = {
    "auto": "the job keeps running. It is stopped only if it can never continue (--on-hang kill stops it now)",
    "kill": "the job keeps running, because it may not be hung",
    "report": "the job keeps running (--on-hang report)",
}


def run_and_show(
    options: WrapOptions, make_report: MakeReport | None = None, is_last: Callable[[JobOutcome], bool] | None = None,
    act: Act | None = None, started: Callable[[Path], None] = lambda _: None,
) -> JobOutcome:  # fmt: skip
    """Run the job, then write its report to stderr. stdout belongs to the script.

    ``make_report`` is by default that of ``wrap``. ``is_last``: whether the report is shown at the end, as no other
    launch follows. ``act`` acts on one that was shown. ``started`` gets the folder of the record after the launcher's
    start.
    """
    from ddpdoctor.launch.session import Session

    if options.placement.number in {0, None} and not options.quiet:  # of several nodes, only the first says it
        for note in notes_of(options, os.environ):
            say(sys.stderr, note)
    make = make_report or outcome_report
    reports = JobReports(options=options, make=make, goes_on=GOES_ON[options.on_hang], act=act, started=started)
    return finish(Session(options, load_judge, reports).run(), reports, is_shown=is_last)


def finish(
    outcome: JobOutcome, reports: JobReports, *, is_shown: Callable[[JobOutcome], bool] | None = None
) -> JobOutcome:
    """Show the report of a job that has ended, unless ``is_shown`` is False, and what went wrong with ddpdoctor."""

    def show() -> None:
        if is_shown is None or is_shown(outcome):
            reports.show(outcome)

    def say_where() -> None:
        if outcome.folder != outcome.run_dir and not has_space(outcome.run_dir):
            say(sys.stderr, f"{outcome.run_dir} is full. The record of this run is in {outcome.folder}")

    def show_launcher_log() -> None:
        """Show what torchrun printed about the end of a job that failed without a verdict."""
        errors = {finding.code for finding in outcome.judgment.findings if finding.severity is Severity.ERROR}
        if outcome.exit_status and not errors - set(outcome.end.ignore):
            write(sys.stderr, clean(read_launcher_log(outcome.folder)))

    return after_the_job(replace(outcome, failure=None), show_launcher_log, show, say_where, failure=outcome.failure)


def after_the_job(outcome: JobOutcome, *steps: Callable[[], None], failure: Exception | None = None) -> JobOutcome:
    """Take some steps even if some fail; report the first failure unless one was reported, and keep it."""
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - nothing of ours changes the status of a job that has ended
            failure = failure or error
    if failure is None or outcome.failure is not None:
        return outcome
    with contextlib.suppress(Exception):  # there may be no stderr either
        if not (outcome.folder / "run.json").exists():
            say(sys.stderr, f"no report: the run folder {outcome.run_dir} was removed while the job ran")
        elif isinstance(failure, UserError):
            show_error(failure)
        elif isinstance(failure, OSError) and failure.errno in NO_ROOM:
            what = f"ddpdoctor could not watch or save all of this job: {failure.strerror}"
            say(sys.stderr, f"{what}. The exit status is the job's own.")
        elif isinstance(failure, ImportError) or not os.path.exists(__file__):  # noqa: PTH110 - pathlib may be gone
            what = "ddpdoctor was updated or removed while the job ran, and could not report all of it"
            say(sys.stderr, f"{what}. The exit status is the job's own.")
        else:
            show_defect(failure)
    return replace(outcome, failure=failure)


def load_judge() -> Judge:
    from ddpdoctor.diagnose.job import judge_folder

    return judge_folder


def outcome_report(outcome: JobOutcome) -> Report:
    from ddpdoctor.diagnose.job import build_report

    return build_report(outcome.folder, outcome.judgment, outcome.end)


def keep_errors(report: Report) -> Report | None:
    """Keep only the errors of a report. Return None if there are none."""
    errors = tuple(finding for finding in report.findings if finding.severity is Severity.ERROR)
    verdict = report.verdict if report.verdict in errors else None
    return replace(report, findings=errors, verdict=verdict) if errors else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReports:
    """Reports on one job for its session: on stderr, in its report file and on its page."""

    options: WrapOptions
    make: MakeReport
    goes_on: str  # stands below the report of a hang
    act: Act | None = None
    started: Callable[[Path], None] = lambda _: None
    said: list[Finding] = field(default_factory=list)  # what was printed of it before its end

    @property
    def page(self) -> Path | None:
        """The file for the page, if one is wanted and this node writes the report of the job."""
        return self.options.html if self.options.report_file.name == REPORT_NAME else None

    def report_crash(self, what: str) -> None:
        """Report that a running job cannot be judged, for example after ddpdoctor was updated."""
        if not self.options.quiet:
            said = f"a check crashed ({what}). The job keeps running, but a hang may not be reported."
            say(sys.stderr, f"{said} An update of ddpdoctor while the job runs can cause this")

    def report_replicas(self, folder: Path, said: frozenset[str]) -> frozenset[str]:
        """Print a line for each new problem of the replicas and gradients of a running job. Return the codes."""
        if self.options.quiet:
            return frozenset()
        from ddpdoctor.diagnose.job import judge_replicas

        left_out = said.union(self.options.ignore)
        found = [f for f in judge_replicas(folder) if f.severity is not Severity.INFO and f.code not in left_out]
        # The first is what the others follow from. A script may skip reductions and average parameters itself: that is
        # known only at the end.
        for finding in found[:1]:
            problem = f"{title_of(finding)}: {finding.summary}"
            say(sys.stderr, f"interim: {problem}; training continues, and the report at the end is final")
            self.said.append(finding)
        return frozenset(finding.code for finding in found)

    def show(self, outcome: JobOutcome) -> None:
        """Show the report of an outcome, or one line if the same was shown before or another node writes it."""
        options = self.options
        if outcome.judged_at is not None and options.format == "text":
            # In one line what is wrong. With one wrap per rank, only blamed ranks say it.
            report = outcome_report(outcome)
            verdict, member = report.verdict, options.placement
            if verdict is not None and verdict.severity is Severity.ERROR:
                is_blamed = bool({row.rank for row in report.ranks} & set(verdict.ranks))
                where = f"the report of all nodes is in {outcome.judged_at}, this one's part in {options.report_file}"
                if is_blamed or not member.of_ranks:
                    say(sys.stderr, f"{title_of(verdict)}: {verdict.summary}; {where}")
            return
        report = self.make(outcome)
        shown = keep_errors(report) if options.quiet else report
        if shown is not None and outcome.repeats and options.format == "text":
            from ddpdoctor.report.verbs.job import read_attempts, status_words

            words = status_words(report, max(0, len(read_attempts(report)) - 1))
            headline = report.verdict.summary if report.verdict is not None else "the report above holds"
            say(sys.stderr, f"{headline}\n  {words}, as reported above; report in {outcome.run_dir}")
        elif shown is not None:
            file = options.report_file
            place = outcome.run_dir if file.name == REPORT_NAME else file
            from ddpdoctor.report.verbs.job import read_attempts, replica_words

            job, crashed = report.job, any(check.outcome is Outcome.CRASHED for check in report.checks)
            is_well = job is not None and job.status is JobStatus.FINISHED and not (job.exit_status or report.findings)
            is_plain = options.format == "text" and not options.speed and len(read_attempts(report)) < 2
            if is_well and is_plain and not crashed:
                equal = (replica_words(report) or "").startswith("replicas equal")
                what = "no problem, replicas equal" if equal else "no problem found"
                say(sys.stderr, f"{what}: {clean(str(place), read_cwd())}")
            else:
                show_report(shown, options.format, sys.stderr, place)
        for finding in self.said:
            if finding.code not in {one.code for one in report.findings}:
                say(sys.stderr, f"final: {title_of(finding)}, reported while the job ran, does not hold at the end")
        if self.act is not None and outcome.judged_at is None:
            self.act(report, options.report_file)

    def go_on(self, outcome: JobOutcome, *, is_known: bool) -> None:
        """Show a hang of a job that is not stopped, and what happens next. A hang shown before gets only one line."""
        found = self._reported_hangs(outcome.judgment)
        if found and is_known:
            say(sys.stderr, f"{found[0].code} {found[0].kind} again: {found[0].summary}")
        elif found:
            self.show(outcome)
            say(sys.stderr, self.goes_on)

    def withdraw(self, judgment: Judgment) -> None:
        """Report that a hang is over, and remove its report, because a running job has none."""
        for file in filter(None, (self.options.report_file, self.page)):
            file.unlink(missing_ok=True)
        found = self._reported_hangs(judgment)
        if found:
            ranks = found[0].ranks
            move = "moves" if len(ranks) == 1 else "move"
            who = f"{rank_list(ranks)} {move} again" if ranks else "the job moves again"
            say(sys.stderr, f"{who}: the report of {found[0].code} {found[0].kind} is withdrawn")

    def _reported_hangs(self, judgment: Judgment) -> list[Finding]:
        return [finding for finding in hangs(judgment) if finding.code not in self.options.ignore]

    def save(self, outcome: JobOutcome) -> None:
        file, report = self.options.report_file, self.make(outcome)
        if not save_report(file.parent, report, file.name) and outcome.folder != outcome.run_dir:
            save_report(outcome.folder, report)
        if self.page is not None:
            try:
                save_page(report, self.page)
            except Exception as error:  # noqa: BLE001 - nothing may keep a job that hangs from being stopped
                show_defect(error)
