"""Reads the machine and the script's control flow, but only if ranks make no progress or a device failed."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from ddpdoctor.model.node import DEVICE_ERROR

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Judgment


CODE = "DD611"
"""The rule that uses the machine's facts."""
ENDED = frozenset({"DD604", "DD605"})
"""The rules that use the kernel's log, if the error is one of a device, or an abort may have been caused by one."""
_ABORTED = ("SIGABRT", "SIGSEGV", "SIGBUS")
FRESH_S = 60.0
"""Our choice: facts younger than this are not read again for the next check."""


def note_machine(folder: Path, judgment: Judgment) -> bool:
    """Save the machine's facts if the judgment needs them; return whether there are new facts to judge by."""
    from ddpdoctor.collect.run.machine import FILE, SECTIONS, save_machine
    from ddpdoctor.collect.run.nccl_warnings import keep_users_logs

    ended = [finding.summary for finding in judgment.findings if finding.code in ENDED]
    if any(finding.code == CODE for finding in judgment.findings):
        sections = SECTIONS
    elif any(DEVICE_ERROR.search(text) or any(name in text for name in _ABORTED) for text in ended):
        sections = frozenset({"kernel_log"})
    else:
        return False
    if is_fresh(folder / FILE, FRESH_S):
        return False
    with contextlib.suppress(OSError):  # a full disk loses this evidence, but must not affect the job
        keep_users_logs(folder, os.environ.get("NCCL_DEBUG_FILE", ""))
        save_machine(folder, sections)
        return True
    return False


def is_fresh(path: Path, limit_s: float) -> bool:
    """Return whether a file was written less than so many seconds ago."""
    try:
        return time.time() - path.stat().st_mtime < limit_s
    except OSError:
        return False


CODES = frozenset({"DD602", "DD603"})
"""The rules that use the control flow."""


def note_control_flow(folder: Path, judgment: Judgment) -> bool:
    """Save the control flow if the judgment needs it; return whether there are new facts to judge by."""
    if not any(finding.code in CODES for finding in judgment.findings):
        return False
    from ddpdoctor.collect.run.control_flow import FILE, save_control_flow
    from ddpdoctor.collect.run.nodes import read_job
    from ddpdoctor.model.errors import UserError

    if (folder / FILE).exists():
        return False
    try:
        return save_control_flow(folder, read_job(folder))
    except UserError:
        return False
