"""``ddpdoctor report``: shows a saved run again, offline, on any machine."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import FORMAT, OUTPUT, PLOT, REPORT, RUN_DIR, SAVED, VERBOSE, Option, settings_of
from ddpdoctor.cli.output import Outputs, check_files, save_plot, say, show_report, write_report
from ddpdoctor.launch.command_line import SavedFormat
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

REPORT_NAME = "report.json"
RUNS = "ddpdoctor-report"  # the folder for run folders, below the folder in which `wrap` is started
# Without one of these variables, Python would start a browser of the terminal, or none.
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
RUN_MARK = "run.json"  # a file that a run folder holds even if the run was cut short before its report was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the report of a saved run.

    Needs neither torch nor the machine that the job ran on.
    """

    run_dir: Annotated[Path | None, RUN_DIR] = None
    compare: Annotated[Path | None, SAVED.but(metavar="RUN_DIR", help="Another run: compare the time of a step.")] = (
        None
    )
    format: Annotated[SavedFormat, FORMAT] = "text"
    output: Annotated[Path | None, OUTPUT] = None
    opens: Annotated[bool, Option(names=("--open",), panel=REPORT, help="Show it as a page in the browser.")] = False
    verbose: Annotated[bool, VERBOSE] = False
    plot: Annotated[Path | None, PLOT.but(help="Draw the curves of allreduce-bench: .png, .svg, .html.")] = None
    curve: Annotated[
        Path | None, Option(metavar="FILE", help="Predict with a saved allreduce-bench (wrap --speed).")
    ] = None


def run(options: Options) -> int:
    if options.opens:
        if options.format not in {"text", "html"}:
            what = f"--open needs a page, which --format {options.format} is not"
            raise UserError(what, help="Leave --format out with --open.")
        output = options.output
        if output is None:  # a private temporary file, which stays
            try:
                fd, name = tempfile.mkstemp(prefix="ddpdoctor-", suffix=".html")
            except OSError as error:
                what = f"cannot create a temporary file: {error.strerror}"
                raise UserError(what, help="Give a file for the page: --output report.html.") from error
            os.close(fd)
            output = Path(name)
        options = replace(options, format="html", output=output)
    check_files(settings_of(options, Outputs, fail_on="error", report_dir=None))
    path = options.run_dir or find_latest(Path(RUNS))
    saved = read_run(path)
    if options.compare is not None:
        from ddpdoctor.diagnose.compare import compare_reports

        if options.plot is not None:
            raise UserError("--plot cannot draw a comparison, only curves of allreduce-bench")
        if options.curve is not None:
            raise UserError("--curve cannot be used with --compare")
        if is_same_run(path, options.compare):
            what = f"{path} and {options.compare} are the same run"
            raise UserError(what, help="Give two runs: `ddpdoctor report A --compare B`.")
        compared = compare_reports((str(path), saved), (str(options.compare), read_run(options.compare)))
        return _show(options, compared, None)
    if options.plot is not None:
        save_plot(saved, options.plot)
    folder = path.parent if path.is_file() else path
    if options.curve is not None:
        from ddpdoctor.diagnose.bandwidth import read_baseline
        from ddpdoctor.diagnose.job import predict_by_curve

        saved = predict_by_curve(saved, folder, read_baseline(read_run(options.curve), str(options.curve), "--curve"))
    return _show(options, saved, folder)


def _show(options: Options, report: Report, folder: Path | None) -> int:
    show = partial(show_report, report, options.format, verbose=options.verbose, fail_on=Severity.ERROR)
    if options.output is None:
        show(sys.stdout, folder)
    elif write_report(show, options.output) and options.opens:
        import webbrowser

        page, has_screen = options.output.resolve(), sys.platform == "darwin" or any(map(os.environ.get, SCREENS))
        is_open = has_screen and webbrowser.open(page.as_uri())
        say(sys.stderr, f"{'' if is_open else 'no browser could be opened; '}the page is {page}")
    return ExitStatus.OK


def is_same_run(path: Path, other: Path) -> bool:
    files = [place / REPORT_NAME if place.is_dir() else place for place in (path, other)]
    return path.resolve() == other.resolve() or (all(file.exists() for file in files) and files[0].samefile(files[1]))


def find_latest(runs: Path) -> Path:
    """Return the run folder that was changed last. Raises ``UserError`` if there is none."""
    folders = [path.parent for name in (REPORT_NAME, RUN_MARK) for path in runs.glob(f"*/{name}")]
    if not folders:
        raise UserError(
            f"no run folder found in {runs}/",
            help="Give the folder of a run: `ddpdoctor report RUN_DIR`. `ddpdoctor wrap` prints it at its end.",
        )
    return max(folders, key=lambda folder: (folder.stat().st_mtime_ns, folder.name))


def read_run(path: Path) -> Report:
    """Read a run's report, or rebuild it from its records. Raises ``UserError`` if it is not a run."""
    # The user's path may be a link. A file in a run folder from elsewhere must not lead out of that folder.
    file = path / REPORT_NAME if path.is_dir() else path.resolve() if path.is_file() else path
    if file.is_file():
        return _read_file(file)
    if (path / RUN_MARK).is_file():
        from ddpdoctor.diagnose.job import rebuild_report

        return rebuild_report(path)
    if not path.exists():
        raise UserError(f"{path} does not exist", help="Run folders of `ddpdoctor wrap` are below ddpdoctor-report/.")
    raise UserError(
        f"{path} is not a run folder of ddpdoctor: it has no {REPORT_NAME}",
        help="Give a folder that `ddpdoctor wrap` wrote; by default they are below ddpdoctor-report/.",
    )


def _read_file(file: Path) -> Report:
    import zipfile

    from ddpdoctor.recorder.storage.files import check_json, open_plain, read_plain
    from ddpdoctor.report.formats import parse_report

    try:
        with os.fdopen(open_plain(file, os.O_RDONLY), "rb") as stream:  # it never waits, as some files of /proc would
            is_packed = zipfile.is_zipfile(stream)
        if is_packed:
            from ddpdoctor.diagnose.bundle import read_packed

            content = read_packed(file)
        else:
            content = read_plain(file)
        return parse_report(check_json(content).decode())
    except UserError as error:
        raise UserError(f"{file}: {error.message}", help=error.help, status=error.status) from error
    except (ValueError, OSError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise UserError(f"{file}: the report cannot be read: {reason}") from error
