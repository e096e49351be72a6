"""Keeps the last known memory use and blocking cause of each rank, because ranks may die at any time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.blocked import HostFacts, read_causes, read_lock_files, read_locks
from ddpdoctor.collect.connections import Socket, read_rows
from ddpdoctor.collect.limits import MEMORY_READERS
from ddpdoctor.launch.watching.work import WorkSeen
from ddpdoctor.model.codec import encode
from ddpdoctor.model.facts import HostCauses, Memory, ProcessCauses, Space

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.proc import Process
    from ddpdoctor.launch.watching.work import Receptions

HOST_EVERY_NS = 1_000_000_000
"""How often the host's memory is read. Our choice: a job takes seconds to fill it."""


class CausesSeen:
    """The causes of each rank, and the most memory that the host had in use."""

    def __init__(self) -> None:
        """Start empty."""
        self._seen: dict[tuple[int, int], ProcessCauses] = {}
        self._host: dict[str, Space] = {}
        self._host_ns = 0
        self._work = WorkSeen()

    def follow(self, rank: Process, below: tuple[Process, ...], now_ns: int) -> None:
        """Record the memory and work of a rank and its descendants."""
        self._work.follow(rank, below, now_ns)
        key = (rank.pid, rank.start_ticks)
        old = self._seen.get(key, ProcessCauses())
        used = sum(child.rss_bytes for child in below)
        more = old.children_memory is None or used >= old.children_memory.most_bytes
        self._seen[key] = replace(
            old,
            memory=_add(old.memory, rank.rss_bytes),
            children_memory=_add(old.children_memory, used) if below or old.children_memory else None,
            children_count=len(below) if more else old.children_count,
            busy_cores=self._work.busy_cores(rank.pid),
        )

    def follow_host(self, now_ns: int) -> None:
        """Record the highest use of the host's memory, the cgroup's memory and /dev/shm."""
        if now_ns - self._host_ns < HOST_EVERY_NS:
            return
        self._host_ns = now_ns
        for name, read in MEMORY_READERS.items():
            now, old = read(), self._host.get(name)
            if now is not None and (old is None or now.used_bytes >= old.used_bytes):
                self._host[name] = now

    def read_causes(
        self,
        alive: dict[tuple[int, int], tuple[Process, ...]],
        family: Iterable[int],
        answers: Mapping[int, dict[str, Any]],
        receptions: Receptions,
    ) -> None:
        """Read what live ranks are blocked in, from their processes and their answers.

        ``alive`` maps a rank's pid and start ticks to its descendants. ``answers`` are by pid. ``receptions`` was
        created when the check began.
        """
        shared = _network(pid for pid, _ in alive)
        locks = read_locks()
        host = HostFacts(
            family=frozenset(family), locks=locks, connections=shared, lock_files=read_lock_files(answers, locks)
        )
        receiving = receptions.of({pid: (pid, *(c.pid for c in below)) for (pid, _), below in alive.items()})
        for (pid, ticks), below in alive.items():
            old = self._seen.get((pid, ticks), ProcessCauses())
            found = read_causes(pid, below, host)
            self._seen[pid, ticks] = replace(
                found,
                memory=old.memory,
                children_memory=old.children_memory,
                children_count=old.children_count,
                busy_cores=old.busy_cores,
                work=self._work.of_rank(pid),
                working_children=self._work.of_children(pid, below),
                receiving=receiving.get(pid),
            )

    def row(self, pid: int, ticks: int) -> dict[str, Any] | None:
        """Return a rank's causes in the format of watch.json."""
        seen = self._seen.get((pid, ticks))
        return None if seen is None else dict(encode(seen))

    def host_row(self) -> dict[str, Any]:
        """Return the host's causes in the format of watch.json."""
        return dict(encode(HostCauses(**self._host)))


def _add(old: Memory | None, used: int) -> Memory:
    """Return the current memory and the most so far. A process that is just ending reads 0, which is ignored."""
    if old is None:
        return Memory(used_bytes=used, most_bytes=used)
    return Memory(used_bytes=used or old.used_bytes, most_bytes=max(used, old.most_bytes))


def _network(pids: Iterable[int]) -> tuple[Socket, ...]:
    """Read the connections once if all ranks share one network namespace, as they do outside of containers."""
    pids = list(pids)
    spaces = {_namespace(pid) for pid in pids}
    return read_rows(pids[0]) if len(spaces) == 1 and "" not in spaces else ()


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""
