"""Writes reports and messages to a stream in a form that the stream can show."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddpdoctor import __version__
from ddpdoctor.recorder.storage.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command_line import SavedFormat
    from ddpdoctor.model.errors import UserError
    from ddpdoctor.model.findings import Report, Severity


ISSUES_URL = "https://github.com/ddpdoctor/ddpdoctor/issues"
ISSUES_HINT = f"Please report it with this file at {ISSUES_URL}. Your script and your files are unchanged."


def show_report(
    report: Report,
    output_format: SavedFormat,
    stream: TextIO,
    run_dir: Path | None,
    *,
    verbose: bool = False,
    fail_on: Severity | None = None,
) -> None:
    """Write a report to a stream. Text uses the stream's width and colors. Other formats do not depend on the stream.

    ``verbose`` applies to text. ``fail_on``, the least severity that is a failure, applies to JUnit.
    """
    if output_format == "text":
        write(stream, _draw_text(report, stream, run_dir, verbose=verbose))
    else:
        write(stream, render(report, output_format, fail_on=fail_on))


def render(report: Report, output_format: SavedFormat, *, fail_on: Severity | None = None) -> str:
    """Render a report in a format that does not depend on the stream."""
    if output_format == "json":
        from ddpdoctor.report.formats import render_json

        return render_json(report)
    from ddpdoctor.report.lines import printable

    return printable(_render_other(report, output_format, fail_on))


def _render_other(report: Report, output_format: SavedFormat, fail_on: Severity | None) -> str:
    if output_format in {"junit", "github", "sarif"}:
        return _render_for_ci(report, output_format, fail_on)
    if output_format == "csv":
        from ddpdoctor.report.formats import render_csv

        return render_csv(report)
    if output_format == "nccl-tests":
        from ddpdoctor.report.bandwidth.nccl_tests import render_nccl_tests

        return render_nccl_tests(report)
    if output_format == "html":
        from ddpdoctor.report.html.page import render_html

        return render_html(report)
    from ddpdoctor.report.markdown import render_markdown

    return render_markdown(report)


def _render_for_ci(report: Report, output_format: SavedFormat, fail_on: Severity | None) -> str:
    if output_format == "github":
        from ddpdoctor.report.formats import render_github

        return render_github(report, read_cwd())
    if output_format == "sarif":
        from ddpdoctor.diagnose.files import read_titles
        from ddpdoctor.report.formats import render_sarif

        return render_sarif(report, read_titles({finding.code for finding in report.findings}), read_cwd())
    from ddpdoctor.report.formats import render_junit

    return render_junit(report, fail_on)


def _draw_text(report: Report, stream: TextIO, run_dir: Path | None, *, verbose: bool) -> str:
    from ddpdoctor.report.text.report import render_text

    width, color = read_width(stream), has_color(stream, os.environ)
    return render_text(report, width=width, color=color, run_dir=run_dir, cwd=read_cwd(), verbose=verbose)


def save_report(run_dir: Path, report: Report, name: str = "report.json") -> bool:
    """Write a report completely or not at all. A full disk loses only the file, not the report on the screen.

    Return whether it was written. If not, say why on stderr.
    """
    from ddpdoctor.report.formats import render_json

    try:
        write_whole(run_dir / name, render_json(report))
    except OSError as error:
        say(sys.stderr, f"the report could not be saved in {run_dir}: {error.strerror}")
        return False
    return True


def save_page(report: Report, path: Path) -> bool:
    """Write a report as an HTML page. Return whether it was written. If not, say why on stderr."""
    try:
        path.write_text(render(report, "html"), encoding="utf-8")
    except OSError as error:
        say(sys.stderr, f"the page could not be saved: {path}: {error.strerror}")
        return False
    return True


def say(stream: TextIO, message: str) -> None:
    """Write a message that begins with "ddpdoctor:". On a terminal, it is wrapped between words."""
    write(stream, _wrapped(stream, f"ddpdoctor: {message}"))


def show_error(error: UserError) -> None:
    """Write a problem that the user can fix, and how, to stderr."""
    print_error(f"error: {error.message}", error.help)


def print_error(message: str, hint: str) -> None:
    """Write a message to stderr, and the hint below it if there is one."""
    from ddpdoctor.report.lines import clean

    say(sys.stderr, message)
    if hint:
        # A command with inserted line breaks could not be pasted.
        write(sys.stderr, f"  {clean(hint)}\n" if "`" in hint else _wrapped(sys.stderr, f"  {hint}"))


def show_defect(error: Exception) -> None:
    """Write to stderr what failed, and where the traceback was saved or why it could not be saved."""
    print_error(describe_defect(error), ISSUES_HINT)


def describe_defect(error: Exception) -> str:
    """Save the traceback. Return what failed, and where the traceback is or why it could not be saved."""
    return f"internal error in ddpdoctor: {type(error).__name__}. {_save_traceback(error)}"


def _save_traceback(error: Exception) -> str:
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ddpdoctor-defect-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"ddpdoctor {__version__}, Python {sys.version}\n{text}")
    except OSError as failure:
        return f"The traceback could not be saved: {failure.strerror}."
    return f"The traceback is in {file.name}"


def _wrapped(stream: TextIO, text: str) -> str:
    from ddpdoctor.report.lines import clean, wrap

    first = text[: len(text) - len(text.lstrip())]
    return "\n".join(wrap(clean(text.lstrip()), read_width(stream), first=first, rest="  ")) + "\n"


def write(stream: TextIO, text: str) -> bool:
    """Write text. Characters that the stream's encoding does not support are escaped.

    If the reader of a pipe has ended, as after `| head -1`, this and all later text is dropped, and False is returned.
    """
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
    """Return the working directory, or None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
