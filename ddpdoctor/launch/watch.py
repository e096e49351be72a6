"""Watches a running job from outside: which processes live, how far each has come, and whether it may hang."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import proc
from ddpdoctor.collect.kernel import read_kernel_oom_pids
from ddpdoctor.collect.limits import read_oom_kills
from ddpdoctor.collect.run_files import AgentLog, attempt_name, find_answers, log_of, read_answer, read_entries
from ddpdoctor.launch.evidence import ANSWER_LIMIT_S, EvidenceTaker, Followed, describe
from ddpdoctor.launch.node_messages import NodeProgress
from ddpdoctor.launch.seen import CausesSeen, HoldUps, Receptions, Strangers, WorkersSeen
from ddpdoctor.model.codec import encode
from ddpdoctor.model.facts import HostCauses
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.files import open_plain, remove

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.launch.replica_exchange import LiveComparison

FOLLOW_EVERY_S = 0.5
# The fraction of a core that checking all processes may use. On a host with thousands of them, checks become rarer.
FOLLOW_SHARE = 0.02
# Our choice: after a longer pause between two checks, the watcher itself was probably stopped by a batch system.
NOT_WATCHED_S = 10.0
# Fraction of a core: a launcher that uses more is about to start ranks. Our choice: one that waits for a rendezvous
# uses a fifth of this, and one that loads torch far more.
BUSY_SHARE = 0.05
# Fraction of the time: a launcher that was runnable for longer is at work, even if a crowded host rarely runs it. Our
# choice: a waiting launcher is runnable for a hundredth of the time, or 0.1 to 0.2 with a load of twenty per core.
WANTED_SHARE = 0.3
# Our choice: over a shorter time, a single tick, or its answer to the watcher, would be a large share of a core.
LAUNCHER_WINDOW_S = 1.0
# I/O above this counts as work. Our choice: a loop that logs a line or polls a small file stays below it, and any
# checkpoint is above it.
IO_BYTES_PER_S = 64 * 1024
# Some processes only move between known functions (a poll loop, or an export part by part), or start one program after
# another (a poll by a shell command). They count as moving for this many hang timeouts. Our choice: an export of twice
# the time limit passes, and a poll is reported after four.
FAMILIAR_PATIENCE = 3
# Descendants whose waits for a core are read. Our choice: a rank has its loader workers, and few others.
MOST_CHILDREN = 32
Below = tuple[proc.Process, ...]  # all that a process has started, nearest first
PROGRESS_CELLS = ("calls_done", "slots_claimed", "steps", "batches", "epochs", "initialized", "main_ended_ns")
EARLY_EXIT_WAIT_S = 1.5  # how long others must have waited for a rank that ended with status 0 before evidence is taken


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


def note_progress(
    process: Followed, now_ns: int, interval_s: float, hang_timeout_s: float, below: frozenset[int]
) -> None:
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


class Suspicion(Enum):
    """How likely a hang is, before any evidence is taken."""

    NONE = 0
    WEAK = 1  # ranks have waited for long while others move, which are most likely just slow
    STRONG = 2  # others wait for a rank that makes no progress or has ended, or no rank makes progress


def suspicion_of(progress: Iterable[NodeProgress], limit_s: float) -> Suspicion:
    """Say cheaply if the job may hang; the rules decide. Who stands still counts once another has waited too long."""
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


class JobWatch:
    """The watcher's knowledge of one job. Times are CLOCK_MONOTONIC."""

    def __init__(
        self, evidence: EvidenceTaker, hang_timeout_s: float, launched_ns: int, replicas: LiveComparison,
        launcher_pid: int | None = None,
    ) -> None:  # fmt: skip
        self.folder = evidence.folder
        self.replicas = replicas
        self.hang_timeout_s = hang_timeout_s
        self.evidence = evidence
        self.followed: dict[int, Followed] = {}
        self.agent = AgentLog()
        self.stopping_since_ns: int | None = None
        self.interrupted_by: str | None = None
        self.interrupted_ns: int | None = None
        # How long the launcher may wait beyond the hang timeout before it starts its ranks again.
        self.restart_patience_s = 0.0
        self.below: dict[int, Below] = {}
        self._poller = select.poll()
        self._pidfds: dict[int, int] = {}
        self._followed_ns = 0
        self._follow_every_s = FOLLOW_EVERY_S
        self._oom_kills = read_oom_kills()
        self._children_seen: dict[int, list[dict[str, Any]]] = {}
        self._causes = CausesSeen()
        self._holdups = HoldUps()
        self._strangers = Strangers()
        self._workers = WorkersSeen()
        self.launcher_pid = launcher_pid
        self._launcher_lives = True
        self._launcher_busy_ns = launched_ns
        self._launcher_was = launched_ns, 0, 0  # at the last look: when, its ticks, and how long it wanted a core

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, and record the end of a rank at once."""
        for fd, _ in self._poller.poll(seconds * 1000):
            pid = next(pid for pid, known in self._pidfds.items() if known == fd)
            self._ended(pid)

    def follow(self, *, at_once: bool = False) -> None:
        now_ns = time.monotonic_ns()
        if not at_once and now_ns - self._followed_ns < self._follow_every_s * 1e9:
            return
        interval_s = (now_ns - self._followed_ns) / 1e9 if self._followed_ns else FOLLOW_EVERY_S
        self._followed_ns = now_ns
        self.agent = log_of(read_entries(self.folder / "agent.jsonl"))
        open_rings(self.folder / "rings", self.followed, now_ns)
        processes = proc.read_processes()
        alive = [process for process in self.followed.values() if process.ended_ns is None]
        children = proc.by_parent(processes)
        for process in alive:
            below = proc.below(process.pid, children)
            self._follow_one(process, processes.get(process.pid), below, now_ns, interval_s)
        for process in alive:
            recorded = [self.followed[c.pid] for c in self.below.get(process.pid, ()) if c.pid in self.followed]
            if any(child.last_progress_ns == now_ns and child.role == ring_layout.ROLE_CHILD for child in recorded):
                process.last_progress_ns = process.advanced_ns = now_ns
        self._sweep()
        # When the launcher was last busy: one that waits for other nodes uses almost no CPU.
        launcher = processes.get(self.launcher_pid or 0)
        self._launcher_lives = launcher is not None and launcher.state not in "ZX"
        looked_ns, ticks, wanted_ns = self._launcher_was
        looked_s = (now_ns - looked_ns) / 1e9
        if launcher is not None and looked_s >= LAUNCHER_WINDOW_S:
            self._launcher_was = now_ns, launcher.cpu_ticks, proc.read_wanted_ns(launcher.pid) or 0
            is_at_work = launcher.cpu_ticks - ticks > BUSY_SHARE * looked_s * os.sysconf("SC_CLK_TCK")
            if is_at_work or self._launcher_was[2] - wanted_ns > WANTED_SHARE * looked_s * 1e9:
                self._launcher_busy_ns = now_ns
        if self.launcher_pid is not None and not self.agent.started:  # else torch's agent lists its ranks in its log
            self._strangers.follow(proc.below(self.launcher_pid, children), self.followed)
        self._holdups.follow(self.ranks())
        self._causes.follow_host(now_ns)
        self.replicas.follow(self.agent.attempt, self.ranks(), self.agent.meeting)
        cost_s = (time.monotonic_ns() - now_ns) / 1e9
        self._follow_every_s = min(max(FOLLOW_EVERY_S, cost_s / FOLLOW_SHARE), 2.0)

    def _follow_one(
        self, process: Followed, there: proc.Process | None, below: Below, now_ns: int, interval_s: float
    ) -> None:
        if there is None or there.start_ticks != process.ticks or there.state in "ZX":
            self._ended(process.pid)
            return
        if process.is_rank and process.pid not in self._pidfds:
            self._pidfds[process.pid] = -1
            with contextlib.suppress(OSError, AttributeError):
                self._pidfds[process.pid] = os.pidfd_open(process.pid)
                self._poller.register(self._pidfds[process.pid], select.POLLIN)
        self.below[process.pid] = below
        if there.state not in "Tt":
            process.frozen_since_ns = None
        elif process.frozen_since_ns is None or interval_s > NOT_WATCHED_S:
            process.frozen_since_ns = now_ns
        if process.is_rank:
            self._causes.follow(there, below, now_ns)
        pids = frozenset(child.pid for child in below)
        note_progress(process, now_ns, interval_s, self.hang_timeout_s, pids)
        if process.last_progress_ns == now_ns:
            process.cpu_since = (now_ns, there.cpu_ticks)
        if not process.is_rank:
            return
        if process.last_progress_ns == now_ns:
            process.run_delays = {}  # a healthy job pays nothing more
            return
        # Time for which it, or one that it started, waited for a core is no time without progress: beside many busy
        # processes a rank may get a tenth of a core, and its loader workers less. The longest wait of any thread
        # counts, because a single starved thread holds up the rank.
        delays: dict[int, int] = {}
        for pid in (process.pid, *sorted(pids)[:MOST_CHILDREN]):
            delays.update(proc.read_run_delays(pid))
        waited = (delay - process.run_delays[tid] for tid, delay in delays.items() if tid in process.run_delays)
        most_ns = min(max(waited, default=0), now_ns - process.last_progress_ns)
        process.run_delays = delays
        process.starved_ns += most_ns
        process.last_progress_ns += most_ns
        process.last_new_ns += most_ns

    def _ended(self, pid: int) -> None:
        process = self.followed.get(pid)
        fd = self._pidfds.get(pid, -1)
        if process is not None and process.ended_ns is None:
            process.ended_ns = time.monotonic_ns()
            process.exit_code = proc.read_exit_code(pid, process.ticks, fd if fd >= 0 else None)
        if fd >= 0:
            self._poller.unregister(fd)
            os.close(fd)
            self._pidfds[pid] = -1

    def _sweep(self) -> None:
        """Remove the files of ended children, so that a job with many workers keeps its folder small."""
        children = (process for process in self.followed.values() if process.role == ring_layout.ROLE_CHILD)
        ended = [child for child in children if child.ended_ns is not None]
        names = [f"{process.pid}-{process.ticks}" for process in ended]
        # All are read before one is removed: the ring of a fork server says for whom its children work.
        for name in names:
            self._workers.keep(self.folder / "rings" / f"{name}.ring")
        for process, name in zip(ended, names, strict=True):
            process.ring.close()
            del self.followed[process.pid]
            self.below.pop(process.pid, None)
            remove(self.folder / "rings" / f"{name}.ring")
            for path in (self.folder / "evidence").glob(f"{name}[-.]*"):
                remove(path)

    def ranks(self) -> list[Followed]:
        begun = self.agent.begun_ns or 0
        ranks, started = (process for process in self.followed.values() if process.is_rank), self.agent.started
        return [rank for rank in ranks if rank.pid in started or rank.cells.get("started_ns", 0) >= begun]

    def rank_range(self) -> tuple[int, int] | None:
        numbers = [start.rank for start in self.agent.started.values()]
        return (min(numbers), max(numbers)) if numbers else None

    def own_progress(self) -> NodeProgress:
        """Return the progress of this node's ranks."""
        now_ns, limit_s, ranks = time.monotonic_ns(), self.hang_timeout_s, self.ranks()
        # How long a live launcher without ranks has been idle. It waits for other nodes if it has none yet or, with
        # torch's agent, none any more.
        idle_s = None
        if self._launcher_lives and not ranks and not self.agent.started:
            idle_s = (now_ns - self._launcher_busy_ns) / 1e9
        elif self._launcher_lives and ranks and self.agent.started and all(rank.ended_ns is not None for rank in ranks):
            # While ranks ran, it had nothing to do. Once they have ended, it may take some time to restart them.
            since_ns = max(self._launcher_busy_ns, *(rank.ended_ns or 0 for rank in ranks))
            idle_s = max(0.0, (now_ns - since_ns) / 1e9 - self.restart_patience_s)
        begun_ns = self.agent.begun_ns
        is_stopping = begun_ns is not None and self.evidence.read_control(ring_layout.CONTROL_CLOSING) > begun_ns
        alive = [rank for rank in ranks if rank.ended_ns is None]
        waiting = [rank for rank in alive if rank.waits_since_ns]
        still = [rank for rank in alive if now_ns - rank.last_progress_ns > limit_s * 1e9]
        ended = [rank.ended_ns for rank in ranks if rank.ended_ns is not None]
        ends = [(rank.cells.get("main_ended_ns", 0), rank.last_progress_ns) for rank in alive]
        return NodeProgress(
            alive=len(alive), starting=idle_s is not None and idle_s <= limit_s,
            never=idle_s is not None and idle_s > limit_s, begun=any(rank.cells.get("initialized") for rank in alive),
            waits_s=max(((now_ns - rank.waits_since_ns) / 1e9 for rank in waiting), default=None),
            stuck_s=max(((now_ns - max(r.waits_since_ns, r.last_progress_ns)) / 1e9 for r in waiting), default=0.0),
            nccl_still_s=max(((now_ns - r.last_progress_ns) / 1e9 for r in alive if r.uses_nccl), default=None),
            still=len(still), stood=sum(rank.stands(now_ns, limit_s) for rank in ranks),
            idle=any(not rank.waits_since_ns for rank in still),
            ended_s=(now_ns - max(ended)) / 1e9 if ended and not is_stopping else None,
            lives_on=any(end and now_ns - max(end, moved) > limit_s * 1e9 for end, moved in ends),
        )  # fmt: skip

    def take_evidence(self, *, keep_rings: bool = False, limit_s: float = ANSWER_LIMIT_S) -> None:
        """Ask the ranks for evidence, check the processes, and save everything (see ``EvidenceTaker.take``)."""
        receptions = Receptions()
        self.evidence.take(self.followed, lambda: self.follow(at_once=True), keep_rings=keep_rings, limit_s=limit_s)
        # Read what live ranks are blocked in. Those that have ended keep their last causes.
        alive = [process for process in self.followed.values() if process.is_rank and process.ended_ns is None]
        below = {(rank.pid, rank.ticks): self.below.get(rank.pid, ()) for rank in alive}
        children = (child.pid for children in below.values() for child in children)
        found = find_answers(self.evidence.folder / "evidence")
        answers = {rank.pid: read_answer(found, rank.pid, rank.ticks) for rank in alive}
        self._causes.read_causes(below, {*(rank.pid for rank in alive), *children}, answers, receptions)
        self.replicas.save()
        self.save(ended=False, launcher_status=None)

    def has_moved_since(self, time_ns: int) -> bool:
        """Return whether a rank has made progress by itself since then, so that its evidence is out of date."""
        if not self.evidence.dumps:
            self.follow(at_once=True)
        return any(rank.last_progress_ns > time_ns for rank in self.ranks() if rank.ended_ns is None)

    def all_stand(self, numbers: Iterable[int]) -> bool:
        """Return whether torch's agent has started all these ranks here, and none has made progress for the limit."""
        now_ns, pids = time.monotonic_ns(), {start.rank: pid for pid, start in self.agent.started.items()}
        there = [self.followed.get(pids.get(number, 0)) for number in numbers]
        return bool(there) and all(rank is not None and rank.stands(now_ns, self.hang_timeout_s) for rank in there)

    def save(self, *, ended: bool, launcher_status: int | None, attempt: int | None = None) -> None:
        """Write watch.json, the watcher's own facts. A finished ``attempt`` gets its own file."""
        kernel, now_kills = read_kernel_oom_pids(), read_oom_kills()
        kills = now_kills - self._oom_kills if now_kills is not None and self._oom_kills is not None else None
        processes = self._strangers.rows()
        for pid, process in self.followed.items():
            if not process.is_rank:
                continue
            is_named = None if kernel is None else pid in kernel
            by_memory = is_named or (kills > 0 if kills is not None else is_named)
            oom = None if process.ended_ns is None else by_memory
            row = describe(process, self.below.get(pid, ()), self.evidence.dumps, oom=oom)
            if process.ended_ns is None:
                self._children_seen[pid] = row["children"]
            row["children"] = self._children_seen.get(pid, [])
            row["told_ns"] = self.evidence.asked_to_end_ns(process)
            row |= self._workers.row(pid)
            row["before_call"] = self._holdups.row(pid, process.ticks)
            row["causes"] = self._causes.row(pid, process.ticks)
            processes[str(pid)] = row
        facts = {
            "now_ns": time.monotonic_ns(), "ended": ended, "launcher_pid": self.launcher_pid,
            "launcher_status": launcher_status, "stopping_since_ns": self.stopping_since_ns,
            "interrupted_by": self.interrupted_by, "interrupted_ns": self.interrupted_ns, "processes": processes,
            "host_causes": dict(encode(HostCauses(**self._causes.host))),
        }  # fmt: skip
        self.evidence.save(facts, attempt_name("watch", attempt))
