"""Writes reports and messages in a form that the stream supports, and tests outputs before a measurement."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ddpdoctor import __version__
from ddpdoctor.cli.options import settings_of
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.recorder.storage.files import write_whole
from ddpdoctor.report.lines import clean, printable, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.live import Live
    from typing_extensions import Self

    from ddpdoctor.cli.options import FailOn
    from ddpdoctor.launch.command_line import SavedFormat
    from ddpdoctor.model.findings import Report

ISSUES_URL = "https://github.com/ddpdoctor/ddpdoctor/issues"
ISSUES_HINT = f"Please report it with this file at {ISSUES_URL}. Your script and your files are unchanged."
HELP = "Nothing was measured. Choose another file."
TRIAL = b"ddpdoctor"
_shown: list[Live] = []  # what the terminal shows until the first output


def show_report(
    report: Report, output_format: SavedFormat, stream: TextIO, run_dir: Path | None, *, verbose: bool = False,
    fail_on: Severity | None = None,
) -> None:  # fmt: skip
    """Write a report; a text by the stream's width and colors. ``verbose`` is for texts, ``fail_on`` for JUnit."""
    if output_format != "text":
        write(stream, render(report, output_format, fail_on=fail_on))
        return
    from ddpdoctor.report.text import render_text

    width, color = read_width(stream), has_color(stream, os.environ)
    write(stream, render_text(report, width=width, color=color, run_dir=run_dir, cwd=read_cwd(), verbose=verbose))


def render(report: Report, output_format: SavedFormat, *, fail_on: Severity | None = None) -> str:
    from ddpdoctor.report import formats

    match output_format:
        case "json":
            return formats.render_json(report)
        case "junit":
            text = formats.render_junit(report, fail_on)
        case "github":
            text = formats.render_github(report, read_cwd())
        case "sarif":
            from ddpdoctor.diagnose.files import read_titles

            text = formats.render_sarif(report, read_titles({finding.code for finding in report.findings}), read_cwd())
        case "csv":
            text = formats.render_csv(report)
        case "nccl-tests":
            from ddpdoctor.report.bandwidth.content import render_nccl_tests

            text = render_nccl_tests(report)
        case "html":
            from ddpdoctor.report.html.page import render_html

            text = render_html(report)
        case _:
            from ddpdoctor.report.formats import render_markdown

            text = render_markdown(report)
    return printable(text)


def save_report(run_dir: Path, report: Report, name: str = "report.json") -> bool:
    """Write a report completely or not at all. If the disk is full, write that to stderr and return False."""
    from ddpdoctor.report.formats import render_json

    problem = f"report could not be saved in {run_dir}"
    return _is_saved(problem, lambda: write_whole(run_dir / name, render_json(report)))


def save_page(report: Report, path: Path) -> bool:
    problem = f"page could not be saved: {path}"
    return _is_saved(problem, lambda: path.write_text(render(report, "html"), encoding="utf-8"))


def _is_saved(problem: str, save: Callable[[], object]) -> bool:
    try:
        save()
    except OSError as error:
        say(sys.stderr, f"the {problem}: {error.strerror}")
        return False
    return True


def say(stream: TextIO, message: str, first: str = "") -> None:
    """Write a message that begins with ``first`` or "ddpdoctor:". On a terminal, it is wrapped between words."""
    text = clean(message if first else f"ddpdoctor: {message}")
    write(stream, "\n".join(wrap(text, read_width(stream), first=first, rest="  ")) + "\n")


def show_error(error: UserError) -> None:
    print_error(f"error: {error.message}", error.help)


def print_error(message: str, hint: str) -> None:
    """Write a message to stderr, and the hint below it if there is one."""
    say(sys.stderr, message)
    if "`" in hint:  # a command with inserted line breaks could not be pasted
        write(sys.stderr, f"  {clean(hint)}\n")
    elif hint:
        say(sys.stderr, hint, "  ")


def show_defect(error: Exception) -> None:
    """Write to stderr what failed, and where the traceback was saved or why it could not be saved."""
    print_error(describe_defect(error), ISSUES_HINT)


def describe_defect(error: Exception) -> str:
    """Save the traceback. Return what failed, and where the traceback is or why it could not be saved."""
    import traceback

    what = f"internal error in ddpdoctor: {type(error).__name__}."
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ddpdoctor-defect-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"ddpdoctor {__version__}, Python {sys.version}\n{text}")
    except OSError as failure:
        return f"{what} The traceback could not be saved: {failure.strerror}."
    return f"{what} The traceback is in {file.name}"


def show_status(what: str) -> None:
    """Show on a terminal what the command does, until its first output. No thread draws it: the process may fork."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False)
        _shown.append(Live(f"{what} ...", auto_refresh=False, transient=True, redirect_stdout=False, console=console))
        atexit.register(end_status)  # also after a Ctrl-C: the cursor is hidden until then
        _shown[0].start(refresh=True)


def end_status() -> None:
    while _shown:
        _shown.pop().stop()


def write(stream: TextIO, text: str) -> bool:
    """Write text, escaped for the stream. If a pipe's reader is gone, drop all from now on and return False."""
    if _shown:
        end_status()
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return False
    return True


def read_width(stream: TextIO) -> int | None:
    """Return the width of a terminal, or None for a pipe or file, where nothing is wrapped."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def has_color(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Return whether to use colors: on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def read_cwd() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


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


def check_outputs(options: Any, **others: Any) -> Outputs:
    """Make the report folder; return where the report goes. Raise ``UserError`` if an output cannot be written here."""
    outputs = settings_of(options, Outputs, **others)
    if outputs.ignore:
        from ddpdoctor.diagnose.files import check_codes

        check_codes(outputs.ignore)
    check_files(outputs)
    if outputs.report_dir is not None:
        from ddpdoctor.launch.run_folder import make_report_dir

        make_report_dir(outputs.report_dir)
    return outputs


def check_files(outputs: Outputs) -> None:
    if outputs.plot is not None:
        from ddpdoctor.report.bandwidth.figure import check_plot

        check_plot(outputs.plot)
        check_writable(outputs.plot, "--plot")
    given: dict[Path, str] = {} if outputs.plot is None else {outputs.plot: "--plot"}
    for path, option in ((outputs.output, "--output"), (outputs.html, "--html")):
        if path is None:
            continue
        check_writable(path, option)
        if path in given:
            raise UserError(f"{given[path]} and {option} are both {path}", help="Give each its own file.")
        given[path] = option


def check_writable(path: Path, option: str) -> None:
    """Try to write, because permissions are not conclusive; remove a new file again. Raises ``UserError``."""
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
    """Save a report, then show it, as a reader may close the pipe early; return it without what the user ignores."""
    if outputs.ignore:
        from ddpdoctor.diagnose.files import check_codes
        from ddpdoctor.diagnose.report import leave_out

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
    return deliver(report, outputs).exit_status(severity_of(outputs.fail_on))


def severity_of(fail_on: FailOn) -> Severity | None:
    """Return the least severity that is a failure, or None for "never"."""
    return None if fail_on == "never" else Severity(fail_on)


def save_plot(report: Report, path: Path) -> None:
    """Draw a report into a file. If the disk is full, only the file is lost, not the report on the screen."""
    from ddpdoctor.report.bandwidth.figure import render_plot

    suffix = path.suffix.lower()
    _is_saved(f"plot could not be saved: {path}", lambda: path.write_bytes(render_plot(report, suffix)))


def write_report(show: Callable[[TextIO, Path | None], None], path: Path) -> bool:
    """Write a report to --output, formatted as for a pipe. If that fails, show it instead, and return False."""
    try:
        with path.open("w", encoding="utf-8") as file:
            show(file, None)
    except OSError as error:
        say(sys.stderr, f"the report could not be saved: {path}: {error.strerror}")
        show(sys.stdout, None)
        return False
    return True


class LiveText:
    """A context manager whose ``show`` replaces the text on a terminal, and appends it elsewhere."""

    def __init__(self, stream: TextIO, *, in_place: bool) -> None:
        """Take the stream. Without ``in_place``, each text is appended on a terminal too, without an empty line."""
        self._stream, self._in_place = stream, in_place
        self._live: Live | None = None
        self._is_first = True
        if in_place and stream.isatty():
            from rich.console import Console
            from rich.live import Live

            # Drawn in show() only: a drawing thread would take time from the job.
            console = Console(file=stream, highlight=False)
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, text: str) -> bool:
        """Show a text. Return False if the stream no longer has a reader."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text.from_ansi(text.rstrip("\n")), refresh=True)
            return True
        gap = "" if self._is_first or not self._in_place else "\n"
        self._is_first = False
        return write(self._stream, gap + text)


class ShownProgress(AbstractContextManager["ShownProgress"]):
    """Its ``show`` updates the bar. Any thread may stop the bar before it prints a report."""

    def __init__(self, stream: TextIO, *, wanted: bool) -> None:
        """Take the stream. ``wanted`` is True on only one rank of a job."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        words = TextColumn("{task.description}", markup=False)
        left = TextColumn("{task.fields[left]}", markup=False)
        # Draw only in show(), between measurements. A drawing thread would compete with them.
        kept: dict[str, Any] = {"transient": True, "auto_refresh": False, "disable": not (wanted and stream.isatty())}
        self._bar = Progress(words, BarColumn(), left, console=Console(file=stream), **kept)
        self._task = self._bar.add_task("", total=1.0, left="")

    def show(self, what: str, share: float, left_s: float | None) -> None:
        """Show what is being measured, the share that is done (0 to 1), and the seconds left, if known."""
        end_status()
        self._bar.start()
        minutes, seconds = divmod(max(0, round(left_s or 0)), 60)
        left = "" if left_s is None else f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"
        self._bar.update(self._task, description=what, completed=share, left=left, refresh=True)

    def stop(self, *_: object) -> None:
        self._bar.stop()
        self._bar.disable = True

    __exit__ = stop
