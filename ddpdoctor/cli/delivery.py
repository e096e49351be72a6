"""Saves and shows reports. Outputs are tested before a measurement, and reports are saved before they are shown."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TextIO

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.cli.options import FailOn
    from ddpdoctor.launch.command_line import SavedFormat
    from ddpdoctor.model.findings import Report, Severity

HELP = "Nothing was measured. Choose another file."
TRIAL = b"ddpdoctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The options of a command for its report: destination, format, and the least severity that is a failure."""

    format: SavedFormat
    fail_on: FailOn
    report_dir: Path | None
    verbose: bool = False
    output: Path | None = None
    plot: Path | None = None
    html: Path | None = None
    ignore: tuple[str, ...] = ()


def check_outputs(outputs: Outputs) -> None:
    """Make the report folder. Raise ``UserError`` if an output cannot be written or a plot cannot be drawn here."""
    if outputs.ignore:
        check_codes(outputs.ignore)
    check_files(outputs)
    if outputs.report_dir is not None:
        from ddpdoctor.launch.run_folder import make_report_dir

        make_report_dir(outputs.report_dir)


def check_files(outputs: Outputs) -> None:
    """Raise ``UserError`` if a file cannot be written, a plot cannot be drawn here, or two are the same file."""
    if outputs.plot is not None:
        check_plot_file(outputs.plot)
    given: dict[Path, str] = {} if outputs.plot is None else {outputs.plot: "--plot"}
    for path, option in ((outputs.output, "--output"), (outputs.html, "--html")):
        if path is None:
            continue
        check_writable(path, option)
        if path in given:
            raise UserError(f"{given[path]} and {option} are both {path}", help="Give each a file of its own.")
        given[path] = option


def check_plot_file(path: Path) -> None:
    """Raise ``UserError`` if a plot cannot be drawn here or cannot be written to this file."""
    from ddpdoctor.report.bandwidth.figure import check_plot

    check_plot(path)
    check_writable(path, "--plot")


def check_writable(path: Path, option: str) -> None:
    """Try to write, because permissions alone are not enough to know. A new file is removed again.

    Raises ``UserError`` if the file cannot be written.
    """
    existed = path.exists()
    if existed and not path.is_file() and not path.is_dir():
        return  # a pipe or a device: opening it may wait for a reader
    if path.is_symlink() and path.lstat().st_uid not in {os.geteuid(), 0}:
        raise UserError(f"{option} {path} is a link that another user made", help="Choose another file.")
    try:
        try:
            with path.open("ab") as file:
                file.write(b"" if existed else TRIAL)
        finally:
            if not existed:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}", help=HELP) from error


def deliver(report: Report, outputs: Outputs, name: str = "report.json", *, shows: bool = True) -> Report:
    """Save a report, then show it, and return it without the findings that the user ignores.

    The order matters because a reader may close the pipe early.
    """
    from ddpdoctor.cli.output import save_page, save_report, show_report

    if outputs.ignore:
        from ddpdoctor.diagnose.job import leave_out

        report = leave_out(report, check_codes(outputs.ignore))
    if outputs.report_dir is not None:
        save_report(outputs.report_dir, report, name)
    if outputs.plot is not None:
        save_plot(report, outputs.plot)
    if outputs.html is not None:
        save_page(report, outputs.html)
    show = partial(show_report, report, outputs.format, verbose=outputs.verbose, fail_on=severity_of(outputs.fail_on))
    if not shows:
        return report
    if outputs.output is not None:
        write_report(show, outputs.output)
    else:
        show(sys.stdout, outputs.report_dir)
    return report


def deliver_check(report: Report, outputs: Outputs) -> int:
    """Save and show the report of a check, and return the exit status."""
    from ddpdoctor.model.exit_status import report_status

    return report_status(deliver(report, outputs), severity_of(outputs.fail_on))


def check_codes(codes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codes of --ignore in upper case. Raises ``UserError`` for an unknown one."""
    from ddpdoctor.diagnose.files import check_codes as check

    return check(codes)


def severity_of(fail_on: FailOn) -> Severity | None:
    """Return the least severity that is a failure, or None for "never"."""
    from ddpdoctor.model.findings import Severity

    return None if fail_on == "never" else Severity(fail_on)


def save_plot(report: Report, path: Path) -> None:
    """Draw a report into a file. If the disk is full, only the file is lost, not the report on the screen."""
    from ddpdoctor.cli.output import say
    from ddpdoctor.report.bandwidth.figure import render_plot

    try:
        path.write_bytes(render_plot(report, path.suffix.lower()))
    except OSError as error:
        say(sys.stderr, f"the plot could not be saved: {path}: {error.strerror}")


def write_report(show: Callable[[TextIO, Path | None], None], path: Path) -> bool:
    """Write a report to --output, formatted as for a pipe. If that fails, show it instead, and return False."""
    from ddpdoctor.cli.output import say

    try:
        with path.open("w", encoding="utf-8") as file:
            show(file, None)
    except OSError as error:
        say(sys.stderr, f"the report could not be saved: {path}: {error.strerror}")
        show(sys.stdout, None)
        return False
    return True
