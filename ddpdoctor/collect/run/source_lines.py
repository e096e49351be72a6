"""Reads the lines of a user's file around the one that is blamed, while they are still those that ran."""

from __future__ import annotations

import re
from pathlib import Path

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.secrets import hide_in_text

AROUND = 2
"""Lines before and after the blamed one."""
MAX_SOURCE_BYTES = 2 * 2**20
MAX_WIDTH = 200
"""Our choice: longer lines are cut."""
LIMIT_S = 2.0
"""Our choice: the file may be on a server that does not answer, which may be why the job hangs."""
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_ENDS = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_HIDDEN_KEY = "<part of a private key>"


def read_excerpt(file: str, line: int, unchanged_since_s: float) -> SourceExcerpt | None:
    """Return the lines around a line without secrets, or None.

    None means that the file cannot be read, has no such line, is no regular file, is too large, or has changed since
    ``unchanged_since_s``, seconds since the epoch.
    """
    path = Path(file)
    reply = ask_side_by_side({"source": lambda: _read(path, unchanged_since_s)}, LIMIT_S)["source"]
    lines = _without_keys(reply.value) if reply.value else []
    if not 0 < line <= len(lines):
        return None
    first = max(1, line - AROUND)
    shown = lines[first - 1 : line + AROUND]
    return SourceExcerpt(file=file, first=first, lines=tuple(map(_shown, shown)), blamed=line)


def _read(path: Path, unchanged_since_s: float) -> list[str]:
    try:
        file = path.resolve(strict=True)
        if file.stat().st_mtime > unchanged_since_s:
            return []
        text = read_plain(file, MAX_SOURCE_BYTES).decode("utf-8", "replace")
    except (ValueError, RuntimeError) as error:  # a NUL in the path, a circle of links
        raise OSError(str(error)) from error
    return re.split(r"\r\n|\r|\n", text)  # as Python counts lines; str.splitlines() knows more ends


def _without_keys(lines: list[str]) -> list[str]:
    """Replace the lines of private keys, of which one alone does not look like a secret."""
    found, inside = [], False
    for line in lines:
        ends = _KEY_ENDS.search(line) is not None
        found.append(_HIDDEN_KEY if inside and not ends else line)
        inside = not ends and (inside or _KEY_BEGINS.search(line) is not None)
    return found


def _shown(line: str) -> str:
    shown = hide_in_text(line.expandtabs(4).rstrip())
    return shown if len(shown) <= MAX_WIDTH else shown[: MAX_WIDTH - 3] + "..."
