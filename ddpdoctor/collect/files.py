"""Reads files that may vanish at any time or be closed to us, such as those of /proc and of control groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST_CHARACTERS = 4 * 2**20 - 1
"""Our choice: /proc/PID/net/tcp has about 30,000 connections in it. The kernel refuses to read 4 MiB of /proc/sys."""


def read_text(path: Path) -> str:
    """Return a file's text, or an empty string if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_CHARACTERS)
    except OSError:
        return ""


def read_link(path: Path) -> str:
    """Return where a link leads, or an empty string if it cannot be read."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, or [] if it cannot be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - there can be thousands, and nobody needs their paths
    except OSError:
        return []


def list_pids(proc: Path) -> list[int]:
    """Return the pids of all processes that can be seen."""
    return sorted(int(name) for name in list_names(proc) if name.isdecimal())
