"""Makes what a run folder needs before a rank can be recorded in it."""

from __future__ import annotations

import os

from . import ring_layout
from .files import make_folder, open_new

CONTROL = "control"
"""The page through which the watcher asks ranks for evidence."""


def make_record(folder: str) -> None:
    """Make the subfolders and the control file, unless they are there. Raises OSError."""
    for name in ("rings", "prints", "evidence"):
        make_folder(os.path.join(folder, name))
    path = os.path.join(folder, CONTROL)
    if os.path.lexists(path):
        return
    fd = open_new(path)
    try:
        os.posix_fallocate(fd, 0, ring_layout.CONTROL_SIZE)  # writing to a hole on a full disk is fatal
    finally:
        os.close(fd)
