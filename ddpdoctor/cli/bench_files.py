"""Files that `allreduce-bench` reads and writes: all are tried before anything is measured."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ddpdoctor.cli.output import say, show_report
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.cli.allreduce_bench import BenchFormat
    from ddpdoctor.cli.bench_options import Asked
    from ddpdoctor.model.findings import Report


def check_files(asked: Asked) -> None:
    """Raise ``UserError`` for what cannot be written, or not be drawn here. Makes the report folder."""
    from ddpdoctor.launch.folders.report_dir import make_report_dir

    if asked.plot is not None:
        from ddpdoctor.report.plots import check_plot

        check_plot(asked.plot)
        _check_writable(asked.plot, "--plot")
    if asked.output is not None:
        _check_writable(asked.output, "--output")
    if asked.output is not None and asked.output == asked.plot:
        raise UserError(f"--output and --plot are both {asked.output}", help="Give each a file of its own.")
    if asked.report_dir is not None:
        make_report_dir(asked.report_dir)


def read_compared(path: Path | None, world_size: int) -> Any:
    """Return the saved run to compare with; None where none was named.

    Raises ``UserError``, also for a run of another number of ranks.
    """
    from ddpdoctor.cli.report import read_run
    from ddpdoctor.diagnose.bandwidth_baseline import check_ranks, read_baseline

    if path is None:
        return None
    baseline = read_baseline(read_run(path), str(path))
    check_ranks(baseline, world_size)
    return baseline


def _check_writable(path: Path, option: str) -> None:
    """Open the file for writing, as permissions alone do not tell; one that was not there before is taken away."""
    existed = path.exists()
    if existed and not path.is_file() and not path.is_dir():
        return  # a pipe or a device: to open it may wait for a reader
    if path.is_symlink() and path.lstat().st_uid not in {os.geteuid(), 0}:
        raise UserError(f"{option} {path} is a link that another user made", help="Choose another file.")
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be written: {error.strerror}", help="Nothing was measured. Choose another file."
        ) from error


def save_plot(report: Report, path: Path) -> None:
    """Draw a report into a file; a full disk costs the file, never the report on the screen."""
    from ddpdoctor.report.plots import render_plot

    try:
        path.write_bytes(render_plot(report, path.suffix.lower()))
    except OSError as error:
        say(sys.stderr, f"the plot could not be saved: {path}: {error.strerror}")


def save_text(report: Report, output_format: BenchFormat, path: Path) -> None:
    """Write a report to a file as to a pipe; what cannot be written is shown instead."""
    try:
        with path.open("w", encoding="utf-8") as file:
            show_report(report, output_format, file, None)
    except OSError as error:
        say(sys.stderr, f"the report could not be saved: {path}: {error.strerror}")
        show_report(report, output_format, sys.stdout, None)
