"""Runs a prepared job, and reports of it on stderr: while it runs, and at its end."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.cli.debug_level import debug_note
from ddpdoctor.cli.output import save_report, say, show_defect, show_error, show_report
from ddpdoctor.launch.command.options import WrapOptions
from ddpdoctor.launch.folders.report_dir import REPORT_NAME
from ddpdoctor.launch.folders.shared_folder import has_room
from ddpdoctor.launch.outcome import Telling, hangs
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.launch.outcome import Outcome
    from ddpdoctor.launch.session import Judge
    from ddpdoctor.model.findings import Finding, Judgement, Report

NCCL_LIMIT_S = 600
"""torch's ``default_pg_nccl_timeout``; that of other backends is 30 min."""
OUT_OF_MEANS = frozenset({
    errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS,
})  # fmt: skip
"""Errors by which a machine says that it has no more of something: no defect of ours."""

GOES_ON = {
    "auto": "the job goes on and is watched: it is stopped only once it can never go on (--on-hang kill stops it here)",
    "kill": "the job goes on and is watched: it is not certain that it hangs",
    "report": "the job goes on and is watched (--on-hang report)",
}
"""What is said below the report of a hang, by ``--on-hang``."""


def run_under_outer(options: WrapOptions) -> NoReturn:
    """Become the launcher: the ``wrap`` around this one watches the job, and reports of it."""
    from ddpdoctor.launch.processes.nested import become_launcher

    if not options.quiet:
        folder = options.report_dir
        say(
            sys.stderr,
            f"another ddpdoctor wrap watches this job already, with its own options; its report is in {folder}",
        )
    become_launcher(options)


def run_and_show(options: WrapOptions) -> Outcome:
    """Run the job, then write its report to stderr; stdout belongs to the script."""
    from ddpdoctor.launch.session import Session

    _say_notes(options)
    show = partial(_show, options)
    telling = Telling(
        save=partial(_save, options),
        show=show,
        go_on=partial(_go_on, options),
        withdraw=partial(_withdraw, options),
        tell_of_replicas=partial(_tell_of_replicas, options),
    )
    outcome = Session(options, _load_judge, telling).run()
    failure = outcome.failure
    try:
        show(outcome)
    except Exception as error:  # noqa: BLE001 - the job has ended, and its status is returned whatever fails here
        failure = failure or error
    if failure is not None:
        _say_failure(failure, outcome)
    if outcome.folder != outcome.run_dir and not has_room(outcome.run_dir):
        say(sys.stderr, f"{outcome.run_dir} had no room for the record of this run, which is in {outcome.folder}")
    return outcome


def _load_judge() -> Judge:
    from ddpdoctor.diagnose.progress import judge_folder

    return judge_folder


def _say_failure(failure: Exception, outcome: Outcome) -> None:
    """Say that the job was not watched or judged in full. Of a folder that is gone, the rest is no defect."""
    if not (outcome.folder / "run.json").exists():
        say(sys.stderr, f"there is no report: the run folder {outcome.run_dir} was removed while the job ran")
    elif isinstance(failure, UserError):
        show_error(failure)
    elif isinstance(failure, OSError) and failure.errno in OUT_OF_MEANS:
        say(sys.stderr, f"not all of this job could be watched or saved: {failure.strerror}. Its exit status stands.")
    else:
        show_defect(failure)


def outcome_report(outcome: Outcome) -> Report:
    """Build the report of an outcome, without the findings that the user ignores."""
    from ddpdoctor.diagnose.build import build_report

    return build_report(outcome.folder, outcome.judgement, outcome.end)


def keep_errors(report: Report) -> Report | None:
    """Leave nothing but errors in a report; None where there are none."""
    errors = tuple(finding for finding in report.findings if finding.severity is Severity.ERROR)
    if not errors:
        return None
    verdict = report.verdict if report.verdict in errors else None
    return replace(report, findings=errors, verdict=verdict)


def _say_notes(options: WrapOptions) -> None:
    """Say what was chosen, once for the job where one node can say it for all."""
    if options.placement.number not in {0, None}:
        return
    level = debug_note(options.debug_level, os.environ)
    for note in (options.placement.note, options.nproc_note, level, _patience_note(options.hang_timeout_s)):
        if note and not options.quiet:
            say(sys.stderr, note)


def _patience_note(hang_timeout_s: float) -> str | None:
    """Return what comes of a hang timeout that is no shorter than torch's own limit may be."""
    if hang_timeout_s < NCCL_LIMIT_S:
        return None
    return (
        f"--hang-timeout is {round(hang_timeout_s)} s. torch's own limit of a wait is 10 min over NCCL and 30 min over "
        "Gloo, unless the script sets another; where that is shorter, torch ends the job before a hang is reported"
    )


def _tell_of_replicas(options: WrapOptions, folder: Path) -> bool:
    """Say in one line what is wrong with the replicas of a job that goes on; return whether there was anything."""
    if options.quiet:
        return True
    from ddpdoctor.diagnose.progress import judge_replicas
    from ddpdoctor.report.names import title_of

    found = [f for f in judge_replicas(folder) if f.severity is not Severity.INFO and f.code not in options.ignore]
    if found:
        # Only the end shows whether a script that leaves out reductions averages parameters by itself.
        problem = f"{title_of(found[0])}: {found[0].summary}"
        say(sys.stderr, f"{problem}; training goes on, and the report at its end has the last word")
    return bool(found)


def _show(options: WrapOptions, outcome: Outcome) -> None:
    if outcome.judged_at is not None and options.format == "text":
        _show_elsewhere(options, outcome)
        return
    report = outcome_report(outcome)
    shown = keep_errors(report) if options.quiet else report
    if shown is not None:
        file = options.report_file
        show_report(shown, options.format, sys.stderr, outcome.run_dir if file.name == REPORT_NAME else file)


def _go_on(options: WrapOptions, outcome: Outcome, is_known: bool) -> None:
    """Show a hang of a job that is not stopped, in one line where it was shown before, and say what happens next."""
    found = _told_hangs(options, outcome.judgement)
    if not found:
        return
    if is_known:
        say(sys.stderr, f"{_title(found[0])} again: {found[0].summary}")
    else:
        _show(options, outcome)
        say(sys.stderr, GOES_ON[options.on_hang])


def _withdraw(options: WrapOptions, judgement: Judgement) -> None:
    """Say that a hang which was shown is over, and remove its report: a job that goes on has none."""
    options.report_file.unlink(missing_ok=True)
    found = _told_hangs(options, judgement)
    if found:
        ranks = found[0].ranks
        who = f"{rank_list(ranks)} {'moves' if len(ranks) == 1 else 'move'} again" if ranks else "the job moves again"
        say(sys.stderr, f"{who}: the report of {_title(found[0])} is withdrawn")


def _told_hangs(options: WrapOptions, judgement: Judgement) -> list[Finding]:
    return [finding for finding in hangs(judgement) if finding.code not in options.ignore]


def _title(finding: Finding) -> str:
    return f"{finding.code} {finding.kind}"


def _show_elsewhere(options: WrapOptions, outcome: Outcome) -> None:
    """Say in a line what is wrong with a job that another node reports of; of many ranks, those to blame say it."""
    from ddpdoctor.report.names import title_of

    report = outcome_report(outcome)
    verdict = report.verdict
    if verdict is None or verdict.severity is not Severity.ERROR:
        return
    if not options.placement.of_ranks or {row.rank for row in report.ranks} & set(verdict.ranks):
        where = f"the report of all nodes is in {outcome.judged_at}, this one's part in {options.report_file}"
        say(sys.stderr, f"{title_of(verdict)}: {verdict.summary}; {where}")


def _save(options: WrapOptions, outcome: Outcome) -> None:
    file, report = options.report_file, outcome_report(outcome)
    if not save_report(file.parent, report, file.name) and outcome.folder != outcome.run_dir:
        save_report(outcome.folder, report)
