"""Reads the lines of a user's file around the one that is blamed, and keeps them in the run folder.

A run folder may come from elsewhere, and its paths may name anything on this machine. So a file is read only by the
``wrap`` that runs the job, and by a command that asks about a job of the same user while it runs. All others show what
was kept, or nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.proc import read_environment
from ddpdoctor.collect.run.evidence import load, save
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE = "source.json"
"""In a run folder: the ``SourceExcerpt`` of its latest verdict."""
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


def keep_excerpt(folder: Path, excerpt: SourceExcerpt) -> None:
    """Save an excerpt in a run folder. A full disk loses it, and nothing else."""
    with contextlib.suppress(OSError):
        save(folder / FILE, excerpt)


def load_excerpt(folder: Path, file: str, line: int) -> SourceExcerpt | None:
    """Return the excerpt that a run folder holds of a line, or None. No other file is read."""
    kept = load(SourceExcerpt, folder / FILE)
    if kept is None or (kept.file, kept.blamed) != (file, line) or not kept.first <= line < kept.first + AROUND + 1:
        return None
    lines = tuple(map(_shown, kept.lines[: 2 * AROUND + 1]))
    return SourceExcerpt(file=file, first=kept.first, lines=lines, blamed=line) if lines else None


def records_own_job(folder: Path, pids: Iterable[int]) -> bool:
    """Return whether one of these processes is of this user, sees the same files, and records in the folder now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            own = Path("/proc/self/ns/mnt")
            process = Path(f"/proc/{pid}")
            named = [one for one in read_environment(pid) if one.startswith(b"DDPDOCTOR_RUN=")]
            if (
                named
                and process.stat().st_uid == os.geteuid()
                and (process / "ns/mnt").readlink() == own.readlink()
                and (process / "cwd" / os.fsdecode(named[0][14:])).samefile(folder)
            ):
                return True
    return False


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
