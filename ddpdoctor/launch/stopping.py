"""Stops a whole job: the launcher, all below it, and every process that was recorded, whoever its parent is by now."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

STOP_GRACE_S = 5.0
"""How long a launcher may take to end its ranks by its own means. Ours: less than a batch system's grace of 30 s."""
GRACE_S = 2.0

Target = tuple[int, int]
"""A pid and its start ticks, which together name a process for good."""


def stop_job(launcher: subprocess.Popen[bytes], folder: Path, while_waiting: Callable[[], None]) -> None:
    """Stop a job that hangs: SIGCONT and SIGTERM, SIGKILL after some seconds.

    The launcher is told first, and ends its ranks if it does so at all; those that it leaves are told after it.
    """
    below = _members(launcher.pid, folder)
    _signal(below, signal.SIGCONT)
    launcher.terminate()
    told = False
    limit = time.monotonic() + STOP_GRACE_S
    while time.monotonic() < limit and (launcher.poll() is None or any(is_same(*target) for target in below)):
        while_waiting()
        if launcher.poll() is not None and not told:
            told = True
            _signal(below, signal.SIGTERM)
        time.sleep(0.05)
    _signal(below, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(1.0)
    if launcher.poll() is None:
        launcher.kill()


def stop_tree(pid: int, folder: Path, grace_s: float = GRACE_S) -> None:
    """Stop a launcher and its job at once: SIGTERM to all, and after a moment SIGKILL to what is left."""
    targets = _members(pid, folder)
    launcher = proc.read_process(pid)
    if launcher is not None:
        targets.append((pid, launcher.start_ticks))
    _signal(targets, signal.SIGTERM)
    _signal(targets, signal.SIGCONT)
    limit = time.monotonic() + grace_s
    while time.monotonic() < limit and any(is_same(*target) for target in targets):
        time.sleep(0.05)
    _signal(targets, signal.SIGKILL)


def _members(launcher_pid: int, folder: Path) -> list[Target]:
    """Return what is below the launcher, and what was recorded: a rank whose own parent has ended is still one."""
    processes = proc.read_processes()
    below = [(p.pid, p.start_ticks) for p in proc.descendants(launcher_pid, processes)]
    names = (path.stem.split("-") for path in (folder / "rings").glob("*-*.ring"))
    known = [*((int(name[0]), int(name[1])) for name in names), *_unrecorded(folder)]
    return [*below, *(target for target in known if target not in below and target[0] != launcher_pid)]


def _unrecorded(folder: Path) -> list[Target]:
    """Return the ranks without a recorder that were there at the last look."""
    try:
        rows = json.loads((folder / "watch.json").read_text())["processes"]
    except (OSError, ValueError, KeyError):
        return []
    return [(int(pid), int(row["ticks"])) for pid, row in rows.items() if "unrecorded" in row]


def is_same(pid: int, start_ticks: int) -> bool:
    """Return whether the very process still runs, and is no zombie."""
    process = proc.read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.state not in "ZX"


def is_in_foreground() -> bool:
    """Return whether this process is in the terminal's foreground group, which a Ctrl-C reaches as a whole."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _signal(targets: Iterable[Target], number: signal.Signals) -> None:
    for target in targets:
        if is_same(*target):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target[0], number)
