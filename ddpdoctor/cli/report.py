"""``ddpdoctor report``: draws a saved run again, offline, on any machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpdoctor.launch.command.options import SavedFormat

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

REPORT_NAME = "report.json"
RUNS = "ddpdoctor-report"
"""Where `wrap` puts run folders, below the folder that it is started in."""
RUN_MARK = "run.json"
"""What a run folder holds even when the run was cut short before its report was written."""


def report(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_DIR]", help=f"A run folder, or the report.json in it.  [default: the latest in {RUNS}/]"
        ),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        SavedFormat,
        typer.Option(help="How the report is written to stdout; csv and nccl-tests of allreduce-bench only."),
    ] = "text",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Of check-env: show every check with what it saw.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of allreduce-bench: draw its plot too, a .png, .svg or .html.")
    ] = None,
) -> None:
    """Draw the report of a saved run again; needs neither torch nor the machine it ran on."""
    from ddpdoctor.cli.output import show_report
    from ddpdoctor.model.findings import Severity

    run_dir = find_latest(Path(RUNS)) if run_dir is None else run_dir
    folder = run_dir.parent if run_dir.is_file() else run_dir
    saved = read_run(run_dir)
    if plot is not None:
        _draw(saved, plot)
    show_report(saved, format, sys.stdout, folder, verbose=verbose, fail_on=Severity.ERROR)


def find_latest(runs: Path) -> Path:
    """Return the run folder that was changed last. Raises ``UserError`` where there is none."""
    from ddpdoctor.model.errors import UserError

    folders = [path.parent for name in (REPORT_NAME, RUN_MARK) for path in runs.glob(f"*/{name}")]
    if not folders:
        raise UserError(
            f"there is no run folder in {runs}/ here",
            help="Give the folder of a run: `ddpdoctor report RUN_DIR`. `ddpdoctor wrap` says at its end where it is.",
        )
    return max(folders, key=lambda folder: (folder.stat().st_mtime_ns, folder.name))


def _draw(report: Report, plot: Path) -> None:
    from ddpdoctor.cli.bench_files import save_plot
    from ddpdoctor.report.plots import check_plot

    check_plot(plot)
    save_plot(report, plot)


def read_run(path: Path) -> Report:
    """Read the report of a run folder, or rebuild it from what the run left where it was cut short.

    Raises ``UserError`` for what is missing, damaged, or no run folder.
    """
    from ddpdoctor.model.errors import UserError

    # What the user names may be a link; what is in a folder that came from elsewhere must not lead out of it.
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


def _read_file(file: Path) -> Report:
    from ddpdoctor.model.errors import UserError
    from ddpdoctor.recorder.storage.files import check_json, read_plain
    from ddpdoctor.report.json_format import parse_report

    try:
        return parse_report(check_json(read_plain(file)).decode())
    except UserError as error:
        raise UserError(f"{file}: {error.message}", help=error.help, status=error.status) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: the report cannot be read: it is not UTF-8 text") from error
    except ValueError as error:
        raise UserError(f"{file}: the report cannot be read: {error}") from error
    except OSError as error:
        raise UserError(f"{file}: the report cannot be read: {error.strerror}") from error
