"""Puts reports and messages on a stream, as the stream can show them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.options import OutputFormat
    from ddpdoctor.model.findings import Report


def show_report(report: Report, output_format: OutputFormat, stream: TextIO, run_dir: Path | None) -> None:
    """Write a report to a stream: JSON the same everywhere, text as wide and as coloured as the stream allows."""
    if output_format == "json":
        from ddpdoctor.report.json_format import render_json

        write(stream, render_json(report))
        return
    from ddpdoctor.report.text import render_text

    width, colour = read_width(stream), has_colour(stream, os.environ)
    write(stream, render_text(report, width=width, colour=colour, run_dir=run_dir, cwd=_read_cwd()))


def say(stream: TextIO, message: str) -> None:
    """Write one line of ddpdoctor's own."""
    from ddpdoctor.report.lines import clean

    write(stream, f"ddpdoctor: {clean(message)}\n")


def write(stream: TextIO, text: str) -> None:
    """Write text of which the stream's encoding may not know every character; those are escaped."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def read_width(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for a pipe or file, where nothing is wrapped."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def has_colour(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Say whether colours are wanted: on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def _read_cwd() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
