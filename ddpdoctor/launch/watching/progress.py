"""Follows each process's progress from outside: the cells of its ring, its I/O bytes, its children."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.collect import proc
from ddpdoctor.recorder.storage import ring_reading
from ddpdoctor.recorder.storage.files import open_plain

IO_BYTES_PER_S = 64 * 1024
"""I/O above this counts as work. Our choice: a loop that logs a line or polls a small file stays below it, and any
checkpoint is above it."""
FAMILIAR_PATIENCE = 3
"""Some processes only move between known functions (a poll loop, or an export part by part), or start one program after
another (a poll by a shell command). They count as moving for this many hang timeouts. Our choice: an export of twice
the time limit passes, and a poll is reported after four."""

MOST_CHILDREN = 32
"""Descendants whose waits for a core are read. Our choice: a rank has its loader workers, and few others."""

PROGRESS_CELLS = ("calls_done", "slots_claimed", "steps", "batches", "epochs", "initialized", "main_ended_ns")


@dataclass(slots=True)
class Followed:
    """One recorded process and its last known state."""

    pid: int
    ticks: int
    role: int
    ring: mmap.mmap
    cells: dict[str, int] = field(default_factory=dict)
    io_bytes: int | None = None
    children: frozenset[int] = frozenset()
    last_progress_ns: int = 0
    """Time that it waited for a core is added: a process that gets no core does not stand still by itself."""
    last_new_ns: int = 0
    advanced_ns: int = 0
    """Time of the last progress itself."""
    cpu_since: tuple[int, int] = (0, 0)
    """Time and CPU ticks at the last progress."""
    heartbeat_changed_ns: int = 0
    frozen_since_ns: int | None = None
    """Since when it was in the stopped state at every check. If the watcher itself was stopped, this starts again."""
    run_delays: dict[int, int] = field(default_factory=dict)
    """By thread, of this process and its descendants, at the last check without progress."""
    starved_ns: int = 0
    """How long it had made no progress and waited for a core, in all."""
    uses_nccl: bool | None = None
    """Whether it uses NCCL, so that it may wait for its device anywhere; None until its process group exists."""
    ended_ns: int | None = None
    exit_code: int | None = None
    """The exit code, a negative signal number, or None if the kernel did not report it."""

    @property
    def waits_since_ns(self) -> int:
        """Since when the main thread is in a call that needs other ranks, or 0 if it is in none."""
        return self.cells.get("wait_since_ns", 0)


def open_rings(folder: Path, known: dict[int, Followed], now_ns: int) -> None:
    """Add new rings to ``known``, by pid. A ring that was recreated replaces the old one."""
    for path in folder.glob("*.ring"):
        pid = int(path.stem.split("-")[0])
        old = known.get(pid)
        try:
            if old is not None and old.ticks == int(path.stem.split("-")[1]) and _same_size(old, path):
                continue
            with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
                ring = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            role, _, pid, ticks = ring_reading.read_identity(ring)
        except (OSError, ValueError):
            continue
        known[pid] = Followed(
            pid=pid, ticks=ticks, role=role, ring=ring, last_progress_ns=now_ns, last_new_ns=now_ns, advanced_ns=now_ns,
            heartbeat_changed_ns=now_ns,
        )  # fmt: skip


def _same_size(old: Followed, path: Path) -> bool:
    return len(old.ring) == path.stat().st_size


def follow(process: Followed, now_ns: int, interval_s: float, hang_timeout_s: float, below: frozenset[int]) -> None:
    """Update one process. ``below`` are the pids of its descendants."""
    cells = ring_reading.read_cells(process.ring)
    old, process.cells = process.cells, cells
    if process.uses_nccl is None and cells["initialized"]:
        process.uses_nccl = ring_reading.uses_nccl(process.ring)
    if not old or cells["heartbeat_ns"] != old["heartbeat_ns"]:
        process.heartbeat_changed_ns = now_ns
    has_new_child = bool(below - process.children)
    process.children = below
    if _has_advanced(process, old, cells, interval_s):
        process.last_progress_ns = process.last_new_ns = process.advanced_ns = now_ns
        return
    patient = now_ns - process.last_new_ns < FAMILIAR_PATIENCE * hang_timeout_s * 1e9
    if patient and (has_new_child or cells["function_changes"] != old["function_changes"]):
        process.last_progress_ns = process.advanced_ns = now_ns


def discount_starving(process: Followed, now_ns: int, below: frozenset[int], folder: Path = Path("/proc")) -> None:
    """Move the last progress of a process by the time for which it, or one it started, waited for a core since.

    Beside many busy processes a rank may get a tenth of a core, and its loader workers less. The longest wait of any
    thread counts, because a single starved thread holds up the rank.
    """
    if process.last_progress_ns == now_ns:
        process.run_delays = {}  # a healthy job pays nothing more
        return
    delays: dict[int, int] = {}
    for pid in (process.pid, *sorted(below)[:MOST_CHILDREN]):
        delays.update(proc.read_run_delays(pid, folder))
    waited = (delay - process.run_delays[thread] for thread, delay in delays.items() if thread in process.run_delays)
    most_ns = min(max(waited, default=0), now_ns - process.last_progress_ns)
    process.run_delays = delays
    process.starved_ns += most_ns
    process.last_progress_ns += most_ns
    process.last_new_ns += most_ns


def _has_advanced(process: Followed, old: dict[str, int], cells: dict[str, int], interval_s: float) -> bool:
    io = proc.read_io(process.pid)
    io_bytes = None if io is None else io.read + io.written + io.fetched
    moved = (io_bytes or 0) - (process.io_bytes if process.io_bytes is not None else io_bytes or 0)
    process.io_bytes = io_bytes
    return (
        not old
        or any(cells[name] != old[name] for name in PROGRESS_CELLS)
        or cells["new_functions"] != old["new_functions"]
        or moved > IO_BYTES_PER_S * interval_s
    )
