"""Follows the work of ranks and their descendants: CPU time, file bytes, network bytes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc
from ddpdoctor.collect.connections import read_received, read_sockets
from ddpdoctor.model.facts import Receiving, Work, WorkingChild

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.collect.connections import Received

EVERY_NS = 2_000_000_000
"""Our choice: over shorter times the kernel's ticks of 10 ms are too coarse."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOST_CHILDREN = 3
WORKING_CORES = 0.1
WORKING_BYTES_S = 64 * 1024
"""Our choice: a process below both limits is not worth reporting."""
MOST_NAME = 60
PYTHON_NAMES = ("python", "pt_data_worker")
"""The kernel's names of forked Python processes, whose command line is the same as the rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One process's totals since its start."""

    ticks: int
    wanted_ns: int | None
    io: proc.IoBytes | None


class WorkSeen:
    """The work of each rank and its descendants between the last two samples."""

    def __init__(self) -> None:
        """Start empty."""
        self._samples: dict[int, tuple[int | None, dict[int, _Sample]]] = {}
        """By a rank's pid, the time of the last samples, and the samples of the rank and its descendants."""
        self._work: dict[int, dict[int, Work]] = {}

    def follow(self, rank: proc.Process, below: tuple[proc.Process, ...], now_ns: int) -> None:
        """Take samples if the last ones are old enough."""
        then_ns, before = self._samples.get(rank.pid, (None, {}))
        if then_ns is not None and now_ns - then_ns < EVERY_NS:
            return
        now = {process.pid: _sample(process) for process in (rank, *below)}
        self._samples[rank.pid] = now_ns, now
        if then_ns is not None:
            over_s = (now_ns - then_ns) / 1e9
            self._work[rank.pid] = {pid: _rates(before[pid], now[pid], over_s) for pid in now if pid in before}

    def busy_cores(self, pid: int) -> float | None:
        """Return the CPU cores that a rank and its descendants used, or None before the second sample."""
        work = self._work.get(pid)
        return None if work is None else sum(one.cores for one in work.values())

    def of_rank(self, pid: int) -> Work | None:
        """Return the work of a rank's own process, or None before the second sample."""
        return self._work.get(pid, {}).get(pid)

    def of_children(self, pid: int, below: tuple[proc.Process, ...]) -> tuple[WorkingChild, ...]:
        """Return the descendants of a rank that used the most CPU."""
        work = self._work.get(pid, {})
        found = [(child, work[child.pid]) for child in below if child.pid in work and _is_working(work[child.pid])]
        found.sort(key=lambda pair: -pair[1].cores)
        return tuple(WorkingChild(pid=c.pid, name=_name(c), work=done) for c, done in found[:MOST_CHILDREN])


def _sample(process: proc.Process) -> _Sample:
    return _Sample(
        ticks=process.cpu_ticks, wanted_ns=proc.read_wanted_ns(process.pid), io=proc.read_io(process.pid)
    )  # fmt: skip


def _rates(before: _Sample, now: _Sample, over_s: float) -> Work:
    wanted_ns = None if before.wanted_ns is None or now.wanted_ns is None else now.wanted_ns - before.wanted_ns
    read = written = None
    if before.io is not None and now.io is not None:
        read = max(now.io.read - before.io.read, now.io.fetched - before.io.fetched)
        written = now.io.written - before.io.written
    return Work(
        over_s=over_s,
        cores=max(0.0, (now.ticks - before.ticks) / TICKS_PER_S / over_s),
        wanted=None if wanted_ns is None else min(1.0, max(0.0, wanted_ns / 1e9 / over_s)),
        read_bytes_s=None if read is None else read / over_s,
        written_bytes_s=None if written is None else written / over_s,
    )


def _is_working(work: Work) -> bool:
    moved = max(work.read_bytes_s or 0.0, work.written_bytes_s or 0.0)
    return max(work.cores, work.wanted or 0.0) >= WORKING_CORES or moved >= WORKING_BYTES_S


def _name(child: proc.Process) -> str:
    command = "" if child.name.startswith(PYTHON_NAMES) else proc.read_command(child.pid)
    return (command or child.name)[:MOST_NAME]


class Receptions:
    """The bytes that connections receive between the creation of this object and a call of ``of``."""

    def __init__(self) -> None:
        """Read the bytes that every connection has received so far."""
        self._began_ns = time.monotonic_ns()
        self._before = {one.inode: one.size_bytes for one in read_received()}

    def of(self, families: dict[int, Iterable[int]]) -> dict[int, Receiving]:
        """Return the connection over which each rank's processes received the most, by the rank's pid.

        Connections between ranks are left out, because their data comes from ranks that wait themselves.
        """
        over_s = (time.monotonic_ns() - self._began_ns) / 1e9
        now = read_received()
        moved = [one for one in now if one.size_bytes > self._before.get(one.inode, one.size_bytes)]
        if not moved or over_s <= 0:
            return {}
        sockets = {rank: _sockets_of(pids) for rank, pids in families.items()}
        own = frozenset().union(*sockets.values())
        own_ports = {str(one.local_port) for one in now if one.inode in own}
        found: dict[int, Receiving] = {}
        for rank, inodes in sockets.items():
            mine = [one for one in moved if one.inode in inodes and one.remote.rpartition(":")[2] not in own_ports]
            rates = [Receiving(remote=one.remote, bytes_s=self._rate(one, over_s)) for one in mine]
            best = max(rates, key=lambda one: one.bytes_s, default=None)
            if best is not None:
                found[rank] = best
        return found

    def _rate(self, now: Received, over_s: float) -> float:
        return (now.size_bytes - self._before[now.inode]) / over_s


def _sockets_of(pids: Iterable[int]) -> frozenset[int]:
    return frozenset(inode for pid in pids for inode in read_sockets(pid) or ())
