"""How far each rank has come, and whether the job may hang, so that evidence should be taken."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc
from ddpdoctor.recorder.storage import ring_reading
from ddpdoctor.recorder.storage.files import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


# I/O above this counts as work. Our choice: a loop that logs a line or polls a small file stays below it, and any
# checkpoint is above it.
IO_BYTES_PER_S = 64 * 1024
# Some processes only move between known functions (a poll loop, or an export part by part), or start one program after
# another (a poll by a shell command). They count as moving for this many hang timeouts. Our choice: an export of twice
# the time limit passes, and a poll is reported after four.
FAMILIAR_PATIENCE = 3

# Descendants whose waits for a core are read. Our choice: a rank has its loader workers, and few others.
MOST_CHILDREN = 32

PROGRESS_CELLS = ("calls_done", "slots_claimed", "steps", "batches", "epochs", "initialized", "main_ended_ns")

EARLY_EXIT_WAIT_S = 1.5  # how long others must have waited for a rank that ended with status 0 before evidence is taken


@dataclass(slots=True)
class Followed:
    """One recorded process and its last known state."""

    pid: int
    ticks: int
    role: int
    ring: mmap.mmap
    cells: dict[str, int] = field(default_factory=dict)
    io_bytes: int | None = None
    main_io_bytes: int | None = None  # what the main thread has read and written
    children: frozenset[int] = frozenset()
    # Time that it waited for a core is added: a process that gets no core does not stand still by itself.
    last_progress_ns: int = 0
    last_new_ns: int = 0
    # Time of the last progress itself, without that of other threads: at a group's limit torch's own threads read much,
    # to write what is pending, while the main thread sleeps on.
    advanced_ns: int = 0
    cpu_since: tuple[int, int] = (0, 0)  # time and CPU ticks at the last progress
    heartbeat_changed_ns: int = 0
    # Since when it was in the stopped state at every check. If the watcher itself was stopped, this starts again.
    frozen_since_ns: int | None = None
    # By thread, of this process and its descendants, at the last check without progress.
    run_delays: dict[int, int] = field(default_factory=dict)
    starved_ns: int = 0  # how long it had made no progress and waited for a core, in all
    # Whether it uses NCCL, so that it may wait for its device anywhere; None until its process group exists.
    uses_nccl: bool | None = None
    ended_ns: int | None = None
    exit_code: int | None = None  # the exit code, a negative signal number, or None if the kernel did not report it

    @property
    def waits_since_ns(self) -> int:
        """Since when the main thread is in a call that needs other ranks, or 0 if it is in none."""
        return self.cells.get("wait_since_ns", 0)

    def stands(self, now_ns: int, limit_s: float) -> bool:
        """Return whether it has made no progress for the limit, until now or its end, with or without a core."""
        return (self.ended_ns or now_ns) - self.advanced_ns > limit_s * 1e9


def open_rings(folder: Path, known: dict[int, Followed], now_ns: int) -> None:
    """Add new rings to ``known``, by pid. A ring that was recreated replaces the old one."""
    for path in folder.glob("*.ring"):
        pid = int(path.stem.split("-")[0])
        old = known.get(pid)
        try:
            if old is not None and old.ticks == int(path.stem.split("-")[1]) and (len(old.ring) == path.stat().st_size):
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
    read = [proc.read_io(process.pid), proc.read_io(process.pid, process.pid)]
    of_all, of_main = (None if io is None else io.read + io.written + io.fetched for io in read)
    moved = (of_all or 0) - (process.io_bytes if process.io_bytes is not None else of_all or 0)
    main_moved = (of_main or 0) - (process.main_io_bytes if process.main_io_bytes is not None else of_main or 0)
    process.io_bytes, process.main_io_bytes = of_all, of_main
    is_new = (
        not old
        or any(cells[name] != old[name] for name in PROGRESS_CELLS)
        or cells["new_functions"] != old["new_functions"]
        or main_moved > IO_BYTES_PER_S * interval_s
    )
    if is_new or moved > IO_BYTES_PER_S * interval_s:
        process.last_progress_ns = process.last_new_ns = now_ns
        process.advanced_ns = now_ns if is_new else process.advanced_ns
        return
    patient = now_ns - process.last_new_ns < FAMILIAR_PATIENCE * hang_timeout_s * 1e9
    if patient and (has_new_child or cells["function_changes"] != old["function_changes"]):
        process.last_progress_ns = process.advanced_ns = now_ns


def discount_starving(process: Followed, now_ns: int, below: frozenset[int]) -> None:
    """Move the last progress of a process by the time for which it, or one it started, waited for a core since.

    Beside many busy processes a rank may get a tenth of a core, and its loader workers less. The longest wait of any
    thread counts, because a single starved thread holds up the rank.
    """
    if process.last_progress_ns == now_ns:
        process.run_delays = {}  # a healthy job pays nothing more
        return
    delays: dict[int, int] = {}
    for pid in (process.pid, *sorted(below)[:MOST_CHILDREN]):
        delays.update(proc.read_run_delays(pid))
    waited = (delay - process.run_delays[thread] for thread, delay in delays.items() if thread in process.run_delays)
    most_ns = min(max(waited, default=0), now_ns - process.last_progress_ns)
    process.run_delays = delays
    process.starved_ns += most_ns
    process.last_progress_ns += most_ns
    process.last_new_ns += most_ns


class Suspicion(Enum):
    """How likely a hang is, before any evidence is taken."""

    NONE = 0
    WEAK = 1  # ranks have waited for long while others move, which are most likely just slow
    STRONG = 2  # others wait for a rank that makes no progress or has ended, or no rank makes progress


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """The progress of one node's ranks, as far as suspicion depends on it."""

    alive: int = 0
    starting: bool = False  # the launcher has no rank and was recently busy, for example loading torch
    # The launcher has no rank and has been idle for the hang timeout: it waits for other nodes, before the first start
    # or, after its ranks have failed, before a restart.
    never: bool = False
    begun: bool = False  # a live rank has initialized its process group
    # The longest time that a live rank has been in a call that needs others, or None if none is in one.
    waits_s: float | None = None
    stuck_s: float = 0.0  # the longest time that one of those ranks has made no progress in its call
    # The longest time that a live NCCL rank has made no progress, wherever it is, or None if there is no such rank.
    nccl_still_s: float | None = None
    # The number of live ranks without progress for the hang timeout. Time without a core does not count.
    still: int = 0
    # The same with that time, and with ranks that stood still when they ended: a rank that stood still has not moved by
    # getting no core, nor by being killed.
    stood: int = 0
    idle: bool = False  # one of those is in no call that needs others
    # Seconds since the last rank ended. None if none has ended, or if the launcher stops the rest: then the ranks of
    # other nodes notice the failure by themselves.
    ended_s: float | None = None
    # A rank's script ended longer ago than the hang timeout, and its process still runs without progress. An exit that
    # uploads a file makes progress, and time without a core does not count.
    lives_on: bool = False


def read_progress(
    ranks: Sequence[Followed], now_ns: int, limit_s: float, idle_s: float | None, *, is_stopping: bool
) -> NodeProgress:
    """Return the progress of this node's ranks.

    ``idle_s`` is how long a live launcher without ranks has been idle, else None. ``is_stopping`` says whether the
    launcher has begun to stop its ranks.
    """
    alive = [rank for rank in ranks if rank.ended_ns is None]
    waiting = [rank for rank in alive if rank.waits_since_ns]
    still = [rank for rank in alive if now_ns - rank.last_progress_ns > limit_s * 1e9]
    ended = [rank.ended_ns for rank in ranks if rank.ended_ns is not None]
    ends = [(rank.cells.get("main_ended_ns", 0), rank.last_progress_ns) for rank in alive]
    return NodeProgress(
        alive=len(alive),
        starting=idle_s is not None and idle_s <= limit_s,
        never=idle_s is not None and idle_s > limit_s,
        begun=any(rank.cells.get("initialized") for rank in alive),
        waits_s=max(((now_ns - rank.waits_since_ns) / 1e9 for rank in waiting), default=None),
        stuck_s=max(((now_ns - max(r.waits_since_ns, r.last_progress_ns)) / 1e9 for r in waiting), default=0.0),
        nccl_still_s=max(((now_ns - r.last_progress_ns) / 1e9 for r in alive if r.uses_nccl), default=None),
        still=len(still),
        stood=sum(rank.stands(now_ns, limit_s) for rank in ranks),
        idle=any(not rank.waits_since_ns for rank in still),
        ended_s=(now_ns - max(ended)) / 1e9 if ended and not is_stopping else None,
        lives_on=any(end and now_ns - max(end, moved) > limit_s * 1e9 for end, moved in ends),
    )


def suspicion_of(progress: Iterable[NodeProgress], limit_s: float) -> Suspicion:
    """Return whether the job may hang, so that evidence should be taken. This is a cheap check; the rules decide.

    A rank without progress is not suspicious until another one has waited longer than the limit.
    """
    found = list(progress)
    alive = sum(node.alive for node in found)
    ended = [node.ended_s for node in found if node.ended_s is not None]
    if not alive:
        stands = any(node.never for node in found) and not any(node.starting for node in found)
        return Suspicion.STRONG if stands else Suspicion.NONE
    waits_for_the_gone = bool(ended) and min(*ended, max(node.stuck_s for node in found)) > EARLY_EXIT_WAIT_S
    if any(node.lives_on for node in found) or waits_for_the_gone:
        return Suspicion.STRONG
    waited_s = max((node.waits_s for node in found if node.waits_s is not None), default=None)
    if waited_s is None and not any(node.begun for node in found):
        # The ranks prepare, or all wait for something outside of the job, such as a stale lock.
        return Suspicion.WEAK if sum(node.still for node in found) == alive else Suspicion.NONE
    still = sum(node.still for node in found) if waited_s is None or waited_s > limit_s else 0
    if still == alive or (still and waited_s is not None and any(node.idle for node in found)):
        return Suspicion.STRONG
    # If a rank ended and an NCCL rank makes no progress, that one may wait for its device, or export a model.
    on_device = [node.nccl_still_s for node in found if node.nccl_still_s is not None]
    may_wait = bool(ended and on_device) and min(*ended, max(on_device)) > EARLY_EXIT_WAIT_S
    return Suspicion.WEAK if may_wait or (still and waited_s is not None) else Suspicion.NONE
