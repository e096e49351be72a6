"""``ddpdoctor report``: shows a saved run again, offline, on any machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import FORMAT, PLOT, RUN_DIR, SAVED, VERBOSE, Option
from ddpdoctor.launch.command.options import SavedFormat
from ddpdoctor.model.exit_status import ExitStatus

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

REPORT_NAME = "report.json"
RUNS = "ddpdoctor-report"
"""The folder for run folders, below the folder in which `wrap` is started."""
RUN_MARK = "run.json"
"""A file that a run folder holds even if the run was cut short before its report was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the report of a saved run.

    Needs neither torch nor the machine that the job ran on.
    """

    run_dir: Annotated[Path | None, RUN_DIR] = None
    compare: Annotated[
        Path | None,
        SAVED.but(
            metavar="RUN_DIR",
            help="Another run: compare the time of a step.",
        ),
    ] = None
    format: Annotated[
        SavedFormat,
        FORMAT,
    ] = "text"
    verbose: Annotated[bool, VERBOSE] = False
    plot: Annotated[Path | None, PLOT.but(help="Draw the curves of allreduce-bench: .png, .svg, .html.")] = None
    curve: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Predict with a saved allreduce-bench (wrap --speed).",
        ),
    ] = None


def run(options: Options) -> int:
    """Show the saved report. Raises ``UserError`` for a folder or file that cannot be used."""
    from ddpdoctor.cli.delivery import check_plot_file, save_plot
    from ddpdoctor.cli.output import show_report
    from ddpdoctor.model.findings import Severity

    if options.plot is not None:
        check_plot_file(options.plot)
    path = options.run_dir or find_latest(Path(RUNS))
    saved = read_run(path)
    if options.compare is not None:
        return _show_comparison(options, path, saved, options.compare)
    if options.plot is not None:
        save_plot(saved, options.plot)
    folder = path.parent if path.is_file() else path
    if options.curve is not None:
        saved = _predict_by_curve(saved, folder, options.curve)
    show_report(saved, options.format, sys.stdout, folder, verbose=options.verbose, fail_on=Severity.ERROR)
    return ExitStatus.OK


def _show_comparison(options: Options, path: Path, saved: Report, other: Path) -> int:
    from ddpdoctor.cli.output import show_report
    from ddpdoctor.diagnose.comparison import compare_reports
    from ddpdoctor.model.errors import UserError
    from ddpdoctor.model.findings import Severity

    if options.plot is not None:
        raise UserError("--plot draws the curves of allreduce-bench, and not a comparison")
    if options.curve is not None:
        raise UserError("--curve predicts for one run, and not for a comparison")
    if _is_same(path, other):
        raise UserError(f"{path} and {other} are the same run", help="Give two runs: `ddpdoctor report A --compare B`.")
    compared = compare_reports((str(path), saved), (str(other), read_run(other)))
    show_report(compared, options.format, sys.stdout, None, verbose=options.verbose, fail_on=Severity.ERROR)
    return ExitStatus.OK


def _is_same(path: Path, other: Path) -> bool:
    files = [one / REPORT_NAME if one.is_dir() else one for one in (path, other)]
    return path.resolve() == other.resolve() or (all(one.exists() for one in files) and files[0].samefile(files[1]))


def _predict_by_curve(report: Report, folder: Path, curve: Path) -> Report:
    from ddpdoctor.diagnose.bandwidth.report import read_baseline
    from ddpdoctor.diagnose.speed import predict_by_curve

    return predict_by_curve(report, folder, read_baseline(read_run(curve), str(curve), "--curve"))


def find_latest(runs: Path) -> Path:
    """Return the run folder that was changed last. Raises ``UserError`` if there is none."""
    from ddpdoctor.model.errors import UserError

    folders = [path.parent for name in (REPORT_NAME, RUN_MARK) for path in runs.glob(f"*/{name}")]
    if not folders:
        raise UserError(
            f"there is no run folder in {runs}/ here",
            help="Give the folder of a run: `ddpdoctor report RUN_DIR`. `ddpdoctor wrap` says at its end where it is.",
        )
    return max(folders, key=lambda folder: (folder.stat().st_mtime_ns, folder.name))


def read_run(path: Path) -> Report:
    """Read the report of a run folder, or rebuild it from the records if the run was cut short.

    Raises ``UserError`` if the path is missing, damaged, or not a run folder.
    """
    from ddpdoctor.model.errors import UserError

    # The user's path may be a link. A file in a run folder from elsewhere must not lead out of that folder.
    file = path / REPORT_NAME if path.is_dir() else path.resolve() if path.is_file() else path
    if file.is_file():
        return _read_file(file)
    if (path / RUN_MARK).is_file():
        from ddpdoctor.diagnose.build import rebuild_report

        return rebuild_report(path)
    if not path.exists():
        raise UserError(f"there is no {path}", help="Run folders of `ddpdoctor wrap` are below ddpdoctor-report/.")
    raise UserError(
        f"{path} is no run folder of ddpdoctor: it holds no {REPORT_NAME}",
        help="Give a folder that `ddpdoctor wrap` wrote; by default they are below ddpdoctor-report/.",
    )


def _unpack(bundle: Path) -> bytes:
    from ddpdoctor.diagnose.bundles import read_packed

    return read_packed(bundle)


def _read_file(file: Path) -> Report:
    import zipfile

    from ddpdoctor.model.errors import UserError
    from ddpdoctor.recorder.storage.files import check_json, read_plain
    from ddpdoctor.report.json_format import parse_report

    try:
        content = _unpack(file) if zipfile.is_zipfile(file) else read_plain(file)
        return parse_report(check_json(content).decode())
    except UserError as error:
        raise UserError(f"{file}: {error.message}", help=error.help, status=error.status) from error
    except (ValueError, OSError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise UserError(f"{file}: the report cannot be read: {reason}") from error
