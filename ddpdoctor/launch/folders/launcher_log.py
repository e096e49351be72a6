"""Reads what torchrun said about the end of a job, which the recorder keeps out of the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.recorder.launcher_log import FILE
from ddpdoctor.recorder.storage.files import read_plain

if TYPE_CHECKING:
    from pathlib import Path


def read_launcher_log(folder: Path) -> str:
    """Return torchrun's messages and traceback. Empty if none were kept or they cannot be read."""
    try:
        return read_plain(folder / FILE).decode("utf-8", "replace")
    except OSError:
        return ""
