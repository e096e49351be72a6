"""Prepares lines of text: escapes collected data, shortens paths, and wraps paragraphs between words."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MIN_TEXT_WIDTH = 20
"""Below this width, wrapped text is worse than lines that are too long."""

_GITHUB = re.compile(
    r"(?:^|(?<=\s))::(?=(?:error|warning|notice|debug|group|endgroup|add-mask|add-path|set-env|set-output|save-state|echo"
    r"|stop-commands|add-matcher|remove-matcher)\b)",
    re.IGNORECASE,
)
"""A command of GitHub Actions, which its runner obeys at the beginning of any printed line. A text is wrapped later, so
it may come to stand there from behind any blank. https://github.com/actions/runner, ActionCommand.cs."""
_AZURE = re.compile(r"##(?=(?:vso)?\[)", re.IGNORECASE)
"""The same for Azure Pipelines and for older forms of GitHub's, which are obeyed anywhere in a line."""


def clean(text: str, cwd: Path | None = None) -> str:
    """Escape what controls a terminal or a CI runner, and make paths below ``cwd`` relative. Line breaks are kept."""
    shown = _relative("".join(_escape(char) for char in text.replace("\t", "    ")), cwd)
    if "::" in shown:
        shown = _GITHUB.sub(r"\\x3a:", shown)
    return _AZURE.sub(r"\\x23#", shown)


def printable(text: str) -> str:
    """Escape control and bidi characters, lone surrogates, NUL, and commands of a CI runner in a whole document.

    This is the last step of every format except JSON, which is ASCII. Collected data is untrusted, and escaping the
    whole document covers every field.
    """
    text = text if text.replace("\n", "").isprintable() else "".join(map(_escape, text))
    return _AZURE.sub(r"\\x23#", text)


def wrap(text: str, width: int | None, *, first: str = "", rest: str | None = None) -> list[str]:
    """Wrap between words. ``first`` is the prefix of the first line, ``rest`` that of the others.

    A word that is too long, such as a path with its line, is never broken. If ``width`` is None, nothing is wrapped.
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
    """Remove ``cwd`` from every path that begins with it. A path that only contains it is not changed."""
    if cwd is None or cwd.parent == cwd:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(str(cwd))}/(?=[^\s/])", "", text)
