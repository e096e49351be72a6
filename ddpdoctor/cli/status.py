"""``ddpdoctor status``: shows what a job under `wrap` does right now."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ddpdoctor.cli.options import FORMAT, Argument, Option, parse_duration, typed
from ddpdoctor.cli.output import LiveText, has_color, read_cwd, read_width, save_report, say, show_report, write
from ddpdoctor.cli.report import REPORT_NAME, RUN_MARK, RUNS, read_run
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.facts import RECORD_NAME
from ddpdoctor.model.live import STATUS_FORMAT, STATUS_VERSION, Liveness
from ddpdoctor.report.lines import title_of

if TYPE_CHECKING:
    from ddpdoctor.model.live import JobNow

StatusFormat = Literal["text", "json"]
NOT_WRAPPED = "If `ddpdoctor wrap` did not start the job, use `ddpdoctor attach`."
# A pause is at least this many times as long as the reading took, so that reading takes 5 % of a core at most.
LEAST_PAUSE = 20
NICENESS = 10  # our choice: the job has its cores first, and this command still gets a twentieth of a crowded one


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show what a job under wrap does right now.

    Steps, pace, which ranks wait for which, whether replicas are equal, and memory. It only reads what the ranks record
    anyway, so it does not slow the job down.
    """

    run: Annotated[Path | None, Argument(metavar="[RUN]", help="The job's run folder.  [default: the latest]")] = None
    watch: Annotated[bool, Option(help="Refresh until the job ends or Ctrl-C.")] = False
    every: Annotated[
        float, Option(metavar="DURATION", parse=parse_duration, help="How often to refresh: 500ms, 10s.")
    ] = typed("2s")
    dump: Annotated[bool, Option(help="Save a report with all stacks; the job continues.")] = False
    format: Annotated[StatusFormat, FORMAT] = "text"


def run(options: Options) -> int:
    if options.watch and options.dump:
        raise UserError("use either --watch or --dump, not both", help="Leave one out.")
    run_dir = _find(options.run)
    if options.dump:
        from ddpdoctor.diagnose.job import take_dump
        from ddpdoctor.launch.evidence import ask_for_evidence
        from ddpdoctor.launch.run_folder import make_dump_dir

        report, folder = take_dump(run_dir, ask_for_evidence), make_dump_dir(run_dir)
        save_report(folder, report)
        show_report(report, options.format, sys.stdout, folder)
        say(sys.stderr, "the job continues")
        return ExitStatus.OK
    if not options.watch:
        write(sys.stdout, _draw_status(_read_job(run_dir), options))
        return ExitStatus.OK
    # From the second time on, the job has the cores first.
    with contextlib.suppress(KeyboardInterrupt), LiveText(sys.stdout, in_place=options.format == "text") as screen:
        while True:
            began = time.process_time()
            status = _read_job(run_dir)
            is_read = screen.show(_draw_status(status, options))
            if status.state is Liveness.ENDED or not is_read:
                break
            took_s = time.process_time() - began
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
            time.sleep(max(options.every, took_s * LEAST_PAUSE))
    return ExitStatus.OK


def _find(given: Path | None) -> Path:
    """Return the run folder. Raises ``UserError`` if there is none, or if the folder is not one of a job."""
    if given is None:
        marks = (*Path(RUNS).glob(f"*/{RUN_MARK}"), *Path(RUNS).glob(f"*/{RECORD_NAME}"))
        found = {path.parent for path in marks}
        if not found:
            raise UserError(f"no run folder found in {RUNS}/", help=f"Give the run folder. {NOT_WRAPPED}")
        return max(found, key=lambda folder: (folder.stat().st_mtime_ns, folder.name))
    if not given.exists():
        raise UserError(f"{given} does not exist", help=NOT_WRAPPED)
    if given.is_file() and given.name in {REPORT_NAME, RUN_MARK}:
        given = given.parent
    folders = (given, *given.glob("nodes/*"))
    if not any((folder / name).is_file() for folder in folders for name in (RUN_MARK, RECORD_NAME)):
        raise UserError(f"{given} is not the run folder of a job under `ddpdoctor wrap`", help=NOT_WRAPPED)
    return given


def _read_job(run_dir: Path) -> JobNow:
    from ddpdoctor.diagnose.live import read_status

    found = read_status(run_dir)
    if found.state is Liveness.RUNNING and (run_dir / REPORT_NAME).is_file():
        with contextlib.suppress(UserError):
            if (verdict := read_run(run_dir).verdict) is not None:
                return replace(found, reported=f"{title_of(verdict)}: {verdict.summary}")
    return found


def _draw_status(status: JobNow, options: Options) -> str:
    if options.format == "json":
        from ddpdoctor.model.codec import encode
        from ddpdoctor.report.formats import write_json

        return write_json({"format": STATUS_FORMAT, "version": STATUS_VERSION, **encode(status)})
    from ddpdoctor.report.verbs.live import render_status

    width, color = read_width(sys.stdout), has_color(sys.stdout, os.environ)
    return render_status(status, width=width, color=color, cwd=read_cwd())
