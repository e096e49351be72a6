"""Follows how far each process has come, from outside: cells of its ring, bytes, children."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.collect.process import proc
from ddpdoctor.recorder.storage import ring_reading
from ddpdoctor.recorder.storage.files import open_plain

if TYPE_CHECKING:
    from pathlib import Path

IO_BYTES_PER_S = 64 * 1024
"""I/O above this is work. Ours: a loop that logs a line or polls a small file stays below, any checkpoint above."""
FAMILIAR_PATIENCE = 3
"""A process that only moves between functions it was seen in before (a poll loop, or an export part by part), or
starts one program after another (a poll by a shell command), counts as moving for this many hang timeouts. Ours: an
export of twice the time limit passes, and a poll is reported after four."""

PROGRESS_CELLS = ("calls_done", "slots_claimed", "steps", "batches", "epochs", "initialized", "main_ended_ns")


@dataclass(slots=True)
class Followed:
    """One recorded process and what was last seen of it."""

    pid: int
    ticks: int
    role: int
    ring: mmap.mmap
    cells: dict[str, int] = field(default_factory=dict)
    io_bytes: int | None = None
    children: frozenset[int] = frozenset()
    last_progress_ns: int = 0
    last_new_ns: int = 0
    cpu_since: tuple[int, int] = (0, 0)
    """Time and CPU ticks at the last progress."""
    heartbeat_changed_ns: int = 0
    frozen_since_ns: int | None = None
    """Since when it was stopped at every look; a watcher that was stopped itself begins anew."""
    uses_nccl: bool | None = None
    """Its host may wait anywhere for what a device has not completed; None while its group is not made."""
    ended_ns: int | None = None
    exit_code: int | None = None
    """A signal's number below zero; None where the kernel did not say."""

    @property
    def waits_since_ns(self) -> int:
        """Since when the main thread is in a call that needs other ranks; 0 where it is not."""
        return self.cells.get("wait_since_ns", 0)


def open_rings(folder: Path, known: dict[int, Followed], now_ns: int) -> None:
    """Add the rings that have appeared to ``known``, by pid; a ring that was replaced replaces."""
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
            pid=pid, ticks=ticks, role=role, ring=ring, last_progress_ns=now_ns, last_new_ns=now_ns,
            heartbeat_changed_ns=now_ns,
        )  # fmt: skip


def _same_size(old: Followed, path: Path) -> bool:
    return len(old.ring) == path.stat().st_size


def follow(process: Followed, now_ns: int, interval_s: float, hang_timeout_s: float, below: frozenset[int]) -> None:
    """Look at one process again. ``below`` are the pids of its descendants."""
    cells = ring_reading.read_cells(process.ring)
    old, process.cells = process.cells, cells
    if process.uses_nccl is None and cells["initialized"]:
        process.uses_nccl = ring_reading.uses_nccl(process.ring)
    if not old or cells["heartbeat_ns"] != old["heartbeat_ns"]:
        process.heartbeat_changed_ns = now_ns
    has_new_child = bool(below - process.children)
    process.children = below
    if _has_advanced(process, old, cells, interval_s):
        process.last_progress_ns = process.last_new_ns = now_ns
        return
    patient = now_ns - process.last_new_ns < FAMILIAR_PATIENCE * hang_timeout_s * 1e9
    if patient and (has_new_child or cells["function_changes"] != old["function_changes"]):
        process.last_progress_ns = now_ns


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
