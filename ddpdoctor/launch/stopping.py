"""Stops a whole job: the launcher, its descendants, and every recorded process, also after the watcher was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc
from ddpdoctor.recorder.storage.files import read_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

# Our choice: the time that a launcher has to end its ranks itself; less than a batch system's grace of 30 s.
STOP_GRACE_S = 5.0
GRACE_S = 2.0
# Our choice: stop after this many scans in a row find nothing. A single scan can miss a process that just started.
QUIET_CHECKS = 3
KILL_LIMIT_S = 30.0  # Our choice: how long SIGKILL is repeated. Nothing ends a process that is blocked in the kernel.
Target = tuple[int, int]  # a pid and its start ticks, which together identify a process even if the pid is reused
_DONE = b"done\n"


def stop_job(launcher: subprocess.Popen[bytes], folder: Path, while_waiting: Callable[[], None]) -> None:
    """Stop a job that hangs: SIGTERM, first to the launcher, which may end its ranks itself; SIGKILL after seconds."""
    below = _targets(proc.descendants(launcher.pid, proc.read_processes()))
    # Ranks whose parent has ended are recorded only.
    below += [target for target in recorded(folder) if target not in below and target[0] != launcher.pid]
    _signal(below, signal.SIGCONT)
    launcher.terminate()
    asked = False
    limit = time.monotonic() + STOP_GRACE_S
    while time.monotonic() < limit and (launcher.poll() is None or any(is_same(*target) for target in below)):
        while_waiting()
        if launcher.poll() is not None and not asked:
            asked = True
            _signal(below, signal.SIGTERM)
        time.sleep(0.05)
    _signal(below, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(1.0)
    if launcher.poll() is None:
        launcher.kill()


def stop_tree(pid: int, folder: Path, grace_s: float = GRACE_S) -> None:
    """Stop a launcher and its job at once: SIGTERM to all, and SIGKILL to those left after ``grace_s``."""

    def find(processes: dict[int, proc.Process]) -> list[Target]:
        launcher = [processes[pid]] if pid in processes else []
        return [*_targets(launcher), *recorded(folder)]

    stop_all(find, grace_s)


def stop_all(find: Callable[[dict[int, proc.Process]], Iterable[Target]], grace_s: float) -> None:
    """Stop what ``find`` selects and all below it, until scans find no more: a launcher may start another rank."""
    known: set[Target] = set()
    asked: set[Target] = set()
    limit = time.monotonic() + grace_s
    quiet_checks = 0
    while quiet_checks < QUIET_CHECKS and time.monotonic() < limit + KILL_LIMIT_S:
        processes = proc.read_processes()
        children = proc.by_parent(processes)
        known.update(find(processes))
        alive = {target for target in known if _is_alive(target, processes)}
        alive.update(*(_targets(proc.below(pid, children)) for pid, _ in tuple(alive)))
        alive = {target for target in alive if _is_alive(target, processes)}
        known |= alive
        if time.monotonic() < limit:
            _signal(alive - asked, signal.SIGTERM)
            _signal(alive - asked, signal.SIGCONT)
            asked |= alive
        else:
            _signal(alive, signal.SIGKILL)
        quiet_checks = 0 if alive else quiet_checks + 1
        time.sleep(0.05)


def _targets(processes: Iterable[proc.Process]) -> list[Target]:
    return [(process.pid, process.start_ticks) for process in processes]


def _is_alive(target: Target, processes: dict[int, proc.Process]) -> bool:
    process = processes.get(target[0])
    return process is not None and process.start_ticks == target[1] and process.state not in "ZX"


def recorded(folder: Path) -> list[Target]:
    """Return the processes that have a ring, and the ranks without a recorder that the last saved watch.json lists."""
    names = (path.stem.split("-") for path in (folder / "rings").glob("*-*.ring"))
    found = [(int(name[0]), int(name[1])) for name in names]
    try:
        rows = json.loads(read_plain(folder / "watch.json"))["processes"]
    except (OSError, ValueError, KeyError):
        return found
    return found + [(int(pid), int(row["ticks"])) for pid, row in rows.items() if "unrecorded" in row]


def is_same(pid: int, start_ticks: int) -> bool:
    """Return whether this same process still runs and is not a zombie."""
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
        if target[0] != os.getpid() and is_same(*target):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target[0], number)


class Guardian:
    """A process that is forked before the launcher starts. Call ``dismiss`` when the job has ended."""

    def __init__(self, folder: Path, mark: Mapping[str, str], on_orphaned: Callable[[], None]) -> None:
        """Fork. The job's environment holds ``mark``; ``on_orphaned`` runs in the guardian once the job was stopped."""
        reader, self._writer = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:  # no process may be added: the job goes first, and its ranks outlive a watcher that is killed
            self.pid = -1
        if self.pid == 0:
            os.close(self._writer)
            try:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_IGN)
                os.setsid()  # a SIGKILL to the watcher's whole process group must not end the guardian too
                text = b""
                while chunk := os.read(reader, 4096):
                    text += chunk
                if text and not text.endswith(_DONE):
                    pid, start_ticks = map(int, text.decode().split())

                    def find(processes: dict[int, proc.Process]) -> list[Target]:
                        """Find all marked processes too: a new rank may already have lost its parent."""
                        marked = [p for p in processes.values() if proc.has_variables(p.pid, mark)]
                        return [(pid, start_ticks), *recorded(folder), *_targets(marked)]

                    stop_all(find, GRACE_S)
                    on_orphaned()
            finally:
                os._exit(0)
        os.close(reader)

    def protect_self(self) -> None:
        """Register this process as the launcher. The watcher's child calls it before it executes the launcher.

        The child holds the pipe open until then. So even if the watcher is killed, the guardian knows the launcher.
        """
        if self.pid < 0:
            return
        pid = os.getpid()
        own = proc.read_process(pid)
        with contextlib.suppress(OSError):
            os.write(self._writer, f"{pid} {own.start_ticks if own else 0}\n".encode())

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._writer, _DONE)
        os.close(self._writer)
        if self.pid > 0:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
