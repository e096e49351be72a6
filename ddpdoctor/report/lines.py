"""Plain lines: what was collected made safe to print, paths shortened, paragraphs wrapped between words only."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MIN_TEXT_WIDTH = 20
"""Narrower than this, wrapping does more harm than a line that is too long."""


def clean(text: str, cwd: Path | None = None) -> str:
    """Escape what a terminal would act on, and name files below ``cwd`` relative to it. Keeps line breaks."""
    printable = (_escape(char) for char in text.replace("\t", "    "))
    return _relative("".join(printable), cwd)


def printable(text: str) -> str:
    """Escape in a whole document what its reader would act on: control and bidi characters, lone surrogates, NUL.

    The last step of every format but JSON, which is ASCII: what was collected may come from anybody, and this way no
    field can be forgotten.
    """
    return text if text.replace("\n", "").isprintable() else "".join(map(_escape, text))


def wrap(text: str, width: int | None, *, first: str = "", rest: str | None = None) -> list[str]:
    """Wrap between words; ``first`` and ``rest`` begin the first and the other lines.

    A word that is too long, such as a path with its line, is never broken. ``width`` None wraps nothing.
    """
    lines: list[str] = []
    hanging = " " * len(first) if rest is None else rest
    for part in text.splitlines() or [""]:
        lines.extend(_wrap_line(part, width, hanging if lines else first, hanging))
    return lines


def _wrap_line(line: str, width: int | None, first: str, rest: str) -> list[str]:
    if width is None or width - len(rest) < MIN_TEXT_WIDTH:
        return [(first + line).rstrip()]
    wrapped = textwrap.wrap(
        line,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [first.rstrip()]


def _escape(char: str) -> str:
    if char.isprintable() or char == "\n":
        return char
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def _relative(text: str, cwd: Path | None) -> str:
    """Cut ``cwd`` off every path that begins with it; a path that only contains it stays as it is."""
    if cwd is None or cwd.parent == cwd:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(str(cwd))}/(?=[^\s/])", "", text)
