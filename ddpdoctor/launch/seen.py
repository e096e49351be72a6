"""Keeps what was seen of processes and may be gone later: memory, work, lines, errors, and ranks without a recorder."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import proc
from ddpdoctor.collect.blocked import HostFacts, read_causes, read_lock_files, read_locks
from ddpdoctor.collect.connections import read_received, read_rows, read_sockets
from ddpdoctor.collect.launch import LOCAL_RANK_VARIABLES, RANK_VARIABLES
from ddpdoctor.collect.limits import MEMORY_READERS
from ddpdoctor.collect.recorded import FETCH_CELLS, errors_of_child, fetch_cells, owner_of
from ddpdoctor.collect.run_ranks import WORLD_SIZE_NAMES
from ddpdoctor.model.codec import encode
from ddpdoctor.model.facts import Memory, ProcessCauses, Receiving, Space, Work, WorkingChild
from ddpdoctor.recorder.storage import ring_reading

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ddpdoctor.collect.proc import Process
    from ddpdoctor.launch.evidence import Followed

EVERY_NS = 2_000_000_000  # our choice: over shorter times the kernel's ticks of 10 ms are too coarse
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOST_CHILDREN = 3
WORKING_CORES = 0.1
WORKING_BYTES_S = 64 * 1024  # our choice: a process below both limits is not worth reporting
MOST_NAME = 60
# The kernel's names of forked Python processes, whose command line is the same as the rank's.
PYTHON_NAMES = ("python", "pt_data_worker")
HOST_EVERY_NS = 1_000_000_000  # How often the host's memory is read. Our choice: a job takes seconds to fill it.
MOST_LINES = 64
SHOWN_LINES = 2
KEPT_ERRORS = 8  # Errors kept for the children of one rank: the first ones, and the last one. Our choice.
KEPT_LINES = 64  # The number of most frequent lines kept for the children of one rank. Our choice: two are shown.
# By then a forked child has executed its program. Our choice: fork and exec take milliseconds. On a machine with five
# processes per core, a shell took over two seconds to become a Python.
SETTLED_S = 10.0
_KEEP_OUT = frozenset("IES")
_WITH_VALUE = frozenset("cmWX")  # Python's one-letter options that take a value
_NAMES = (*RANK_VARIABLES, *LOCAL_RANK_VARIABLES, *WORLD_SIZE_NAMES)
Key = tuple[int, int]
# A process's totals since its start: CPU ticks, nanoseconds for which it wanted a core, bytes.
Sample = tuple[int, int | None, proc.IoBytes | None]


@dataclass(slots=True)
class WorkSeen:
    """The work of each rank and its descendants between the last two samples."""

    # By a rank's pid and a process's pid; empty before the second sample.
    work: dict[int, dict[int, Work]] = field(default_factory=dict)
    # By a rank's pid, the time of the last samples, and the samples of the rank and its descendants.
    _samples: dict[int, tuple[int | None, dict[int, Sample]]] = field(default_factory=dict)

    def follow(self, rank: proc.Process, below: tuple[proc.Process, ...], now_ns: int) -> None:
        then_ns, before = self._samples.get(rank.pid, (None, {}))
        if then_ns is not None and now_ns - then_ns < EVERY_NS:
            return
        now = {p.pid: (p.cpu_ticks, proc.read_wanted_ns(p.pid), proc.read_io(p.pid)) for p in (rank, *below)}
        self._samples[rank.pid] = now_ns, now
        if then_ns is None:
            return
        over_s, self.work[rank.pid] = (now_ns - then_ns) / 1e9, {}
        for pid in (pid for pid in now if pid in before):
            (old_ticks, old_wanted_ns, old), (ticks, now_wanted_ns, new) = before[pid], now[pid]
            wanted = read_s = written_s = None
            if old_wanted_ns is not None and now_wanted_ns is not None:
                wanted = min(1.0, max(0.0, (now_wanted_ns - old_wanted_ns) / 1e9 / over_s))
            if old is not None and new is not None:
                read_s = max(new.read - old.read, new.fetched - old.fetched) / over_s
                written_s = (new.written - old.written) / over_s
            cores = max(0.0, (ticks - old_ticks) / TICKS_PER_S / over_s)
            self.work[rank.pid][pid] = Work(
                over_s=over_s, cores=cores, wanted=wanted, read_bytes_s=read_s, written_bytes_s=written_s
            )

    def of_children(self, pid: int, below: tuple[proc.Process, ...]) -> tuple[WorkingChild, ...]:
        work = self.work.get(pid, {})
        found: list[tuple[proc.Process, Work]] = []
        for child in (child for child in below if child.pid in work):
            done = work[child.pid]
            moved_s = max(done.read_bytes_s or 0.0, done.written_bytes_s or 0.0)
            if max(done.cores, done.wanted or 0.0) >= WORKING_CORES or moved_s >= WORKING_BYTES_S:
                found.append((child, done))
        found.sort(key=lambda pair: -pair[1].cores)
        named = []
        for child, done in found[:MOST_CHILDREN]:
            command = "" if child.name.startswith(PYTHON_NAMES) else proc.read_command(child.pid)
            named.append(WorkingChild(pid=child.pid, name=(command or child.name)[:MOST_NAME], work=done))
        return tuple(named)


class Receptions:
    """The bytes that connections receive between the creation of this object and a call of ``of``."""

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()
        self._before = {sock.inode: sock.size_bytes for sock in read_received()}

    def of(self, families: dict[int, Iterable[int]]) -> dict[int, Receiving]:
        """Return by pid over which connection a rank receives most, except from other ranks, which wait themselves."""
        over_s = (time.monotonic_ns() - self._began_ns) / 1e9
        now = read_received()
        moved = [sock for sock in now if sock.size_bytes > self._before.get(sock.inode, sock.size_bytes)]
        if not moved or over_s <= 0:
            return {}
        pairs = families.items()
        sockets = {rank: frozenset().union(*(read_sockets(pid) or () for pid in pids)) for rank, pids in pairs}
        own = frozenset().union(*sockets.values())
        own_ports = {str(sock.local_port) for sock in now if sock.inode in own}
        found: dict[int, Receiving] = {}
        for rank, inodes in sockets.items():
            mine = [sock for sock in moved if sock.inode in inodes and sock.remote.rpartition(":")[2] not in own_ports]
            rates = [(row.size_bytes - self._before[row.inode], row.remote) for row in mine]
            if rates:
                grown, remote = max(rates, key=lambda rate: rate[0])
                found[rank] = Receiving(remote=remote, bytes_s=grown / over_s)
        return found


@dataclass(slots=True)
class CausesSeen:
    """The causes of each rank, and the most memory that the host had in use."""

    # The highest use of the host's memory, the cgroup's memory and /dev/shm.
    host: dict[str, Space] = field(default_factory=dict)
    _host_ns: int = 0
    _seen: dict[Key, ProcessCauses] = field(default_factory=dict)
    _work: WorkSeen = field(default_factory=WorkSeen)

    def follow(self, rank: Process, below: tuple[Process, ...], now_ns: int) -> None:
        self._work.follow(rank, below, now_ns)
        work = self._work.work.get(rank.pid)
        key = (rank.pid, rank.start_ticks)
        old = self._seen.get(key, ProcessCauses())
        used = sum(child.rss_bytes for child in below)
        more = old.children_memory is None or used >= old.children_memory.most_bytes
        self._seen[key] = replace(
            old,
            memory=_add(old.memory, rank.rss_bytes),
            children_memory=_add(old.children_memory, used) if below or old.children_memory else None,
            children_count=len(below) if more else old.children_count,
            busy_cores=None if work is None else sum(done.cores for done in work.values()),
        )

    def follow_host(self, now_ns: int) -> None:
        if now_ns - self._host_ns < HOST_EVERY_NS:
            return
        self._host_ns = now_ns
        for name, read in MEMORY_READERS.items():
            now, old = read(), self.host.get(name)
            if now is not None and (old is None or now.used_bytes >= old.used_bytes):
                self.host[name] = now

    def read_causes(
        self,
        alive: dict[tuple[int, int], tuple[Process, ...]],
        family: Iterable[int],
        answers: Mapping[int, dict[str, Any]],
        receptions: Receptions,
    ) -> None:
        """Read what live ranks (pid, start ticks) are blocked in, with their answers and ``receptions`` since then."""
        spaces: set[str] = set()
        with contextlib.suppress(OSError):
            spaces = {str(Path(f"/proc/{pid}/ns/net").readlink()) for pid, _ in alive}
        # Read once if all ranks share one network namespace, as they do outside of containers
        shared = read_rows(next(iter(alive))[0]) if len(spaces) == 1 else ()
        locks = read_locks()
        files = read_lock_files(answers, locks)
        host = HostFacts(family=frozenset(family), locks=locks, connections=shared, lock_files=files)
        receiving = receptions.of({pid: (pid, *(c.pid for c in below)) for (pid, _), below in alive.items()})
        for (pid, ticks), below in alive.items():
            old = self._seen.get((pid, ticks), ProcessCauses())
            found = read_causes(pid, below, host)
            self._seen[pid, ticks] = replace(
                found, memory=old.memory, children_memory=old.children_memory, children_count=old.children_count,
                busy_cores=old.busy_cores, work=self._work.work.get(pid, {}).get(pid),
                working_children=self._work.of_children(pid, below), receiving=receiving.get(pid),
            )  # fmt: skip

    def row(self, pid: int, ticks: int) -> dict[str, Any] | None:
        seen = self._seen.get((pid, ticks))
        return None if seen is None else dict(encode(seen))


def _add(old: Memory | None, used: int) -> Memory:
    """Return the current memory and the most so far. A process that is just ending reads 0, which is ignored."""
    if old is None:
        return Memory(used_bytes=used, most_bytes=used)
    return Memory(used_bytes=used or old.used_bytes, most_bytes=max(used, old.most_bytes))


@dataclass(slots=True)
class _Stretch:
    """The time from one call that needs others to the next."""

    # How often the main thread was sampled at each of the user's lines.
    lines: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    # Whether ``init_process_group`` had returned. The call may be shorter than the time between two samples.
    begun: int = 0
    until_ns: int = 0  # when the next call began, or 0 if none did


@dataclass(slots=True)
class HoldUps:
    """Each process's own work before the last call and since."""

    _before: dict[Key, _Stretch] = field(default_factory=dict)
    _since: dict[Key, _Stretch] = field(default_factory=dict)

    def follow(self, ranks: Iterable[Followed]) -> None:
        """Record the current line of each live rank that is in no call that needs others."""
        for rank in ranks:
            key = (rank.pid, rank.ticks)
            if rank.ended_ns is not None:
                continue
            if rank.waits_since_ns:
                if key in self._since:
                    self._before[key] = self._since.pop(key)
                    self._before[key].until_ns = rank.waits_since_ns
                continue
            begun = rank.cells.get("initialized", 0)
            if key not in self._since or self._since[key].begun != begun:
                self._since[key] = _Stretch(begun=begun)
            lines = self._since[key].lines
            place = ring_reading.read_place(rank.ring)  # type: ignore[arg-type]  # an mmap reads like bytes
            if place is not None and (place in lines or len(lines) < MOST_LINES):
                lines[place] += 1

    def row(self, pid: int, ticks: int) -> dict[str, Any] | None:
        """Return where a rank was before its last call, in the format of watch.json.

        A call that fails at once falls between two samples, so it is in the same stretch as the work before it.
        """
        stretches = [found for kept in (self._before, self._since) if (found := kept.get((pid, ticks))) is not None]
        seen = max(stretches, key=lambda stretch: stretch.lines.total(), default=None)
        if seen is None:
            return None
        return {"until_ns": seen.until_ns, "lines": [list(line) for line, _ in seen.lines.most_common(SHOWN_LINES)]}


@dataclass(slots=True)
class WorkersSeen:
    """The sampled lines and the batches of ended children by their parent, and their errors by their rank."""

    _counts: dict[int, Counter[tuple[str, int, str]]] = field(default_factory=dict)
    _fetches: dict[int, list[int]] = field(default_factory=dict)
    _errors: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def keep(self, ring: Path) -> None:
        content = _read_ring(ring)
        for rank, error in errors_of_child(content) if content is not None else ():
            known = self._errors.setdefault(rank, [])
            known[KEPT_ERRORS - 1 :] = [error]
        if content is None:
            return
        others = ring.parent.glob
        parent = owner_of(content, lambda pid: next(filter(None, map(_read_ring, others(f"{pid}-*.ring"))), None))
        if parent is None:
            return
        before = self._fetches.setdefault(parent, [0] * FETCH_CELLS)
        self._fetches[parent] = [old + new for old, new in zip(before, fetch_cells(content), strict=True)]
        counts = self._counts.setdefault(parent, Counter())
        for line in content.lines:
            counts[str(line.site.get("f")), int(line.site.get("l") or 0), str(line.site.get("n"))] += line.times
        if len(counts) > 2 * KEPT_LINES:
            self._counts[parent] = Counter(dict(counts.most_common(KEPT_LINES)))

    def row(self, pid: int) -> dict[str, Any]:
        """Return for watch.json the lines of ended children with counts, sums of ``fetch_cells``, and their errors."""
        lines = [[*line, times] for line, times in self._counts.get(pid, Counter()).most_common(KEPT_LINES)]
        fetches, errors = self._fetches.get(pid, []), self._errors.get(pid, [])
        return {"child_lines": lines, "child_fetches": fetches, "child_errors": errors}


def _read_ring(ring: Path) -> ring_reading.RingContent | None:
    try:
        return ring_reading.read_ring_file(ring)
    except (OSError, ring_reading.DamagedRingError):
        return None


@dataclass(slots=True)
class Stranger:
    """A rank without a recorder."""

    environment: dict[str, str]  # its variables from the launcher: rank, local rank, world size
    why: str
    state: str | None
    ended_ns: int | None = None


@dataclass(slots=True)
class Strangers:
    """The ranks without a recorder that were found so far. Each process is checked only while it is young."""

    found: dict[Key, Stranger] = field(default_factory=dict)
    _first_seen: dict[Key, float] = field(default_factory=dict)

    def follow(self, below: Iterable[proc.Process], recorded: Collection[int]) -> None:
        """Check the launcher's descendants. Those in ``recorded`` and their children are known to be no strangers."""
        now = time.monotonic()
        alive = {(p.pid, p.start_ticks): p for p in below if p.state not in "ZX"}
        of_ranks = set(recorded)
        for key, process in alive.items():  # parents come before their children
            if process.ppid in of_ranks or process.pid in of_ranks:
                of_ranks.add(process.pid)
            elif key in self.found:
                self.found[key].state = process.state
            elif now - self._first_seen.setdefault(key, now) < SETTLED_S:
                stranger = _look_at(process)
                if stranger is not None:
                    self.found[key] = stranger
        for key, stranger in self.found.items():
            if key not in alive and stranger.ended_ns is None:
                stranger.ended_ns, stranger.state = time.monotonic_ns(), None
        self._first_seen = {key: first for key, first in self._first_seen.items() if key in alive}

    def rows(self) -> dict[str, dict[str, Any]]:
        return {
            str(pid): {
                "ticks": ticks, "state": s.state, "ended_ns": s.ended_ns, "unrecorded": s.environment, "why": s.why,
            }
            for (pid, ticks), s in self.found.items()
        }  # fmt: skip


def _look_at(process: proc.Process) -> Stranger | None:
    folder = Path(f"/proc/{process.pid}")
    try:
        program = (folder / "exe").readlink().name
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        environment = {name: value for name, _, value in (entry.partition("=") for entry in entries)}
    except OSError:
        return None
    variables = {name: environment[name] for name in _NAMES if name in environment}
    why = why_unrecorded(words, environment)
    if not program.startswith("python") or not any(name in variables for name in RANK_VARIABLES) or not why:
        return None
    return Stranger(environment=variables, why=why, state=process.state)


def why_unrecorded(words: list[str], environment: dict[str, str]) -> str:
    """Return why a Python with this command line and environment loads no recorder, or "" if it does."""
    if (kept_out := _keeps_out(words[1:])) is not None:
        return f"Python was started with -{kept_out}, which turns off start-up hooks"
    if "DDPDOCTOR_RUN" not in environment:
        return "it was started without the variable DDPDOCTOR_RUN"
    if "/recorder/bootstrap" not in environment.get("PYTHONPATH", ""):
        return "its PYTHONPATH lacks the folder that loads the recorder"
    return ""


def _keeps_out(words: list[str]) -> str | None:
    """Return the Python option before the script that disables start-up hooks, or None."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            return None
        if word.startswith("--"):
            continue
        letters = word[1:]
        end = next((i for i, letter in enumerate(letters) if letter in _WITH_VALUE), len(letters))
        if found := sorted(_KEEP_OUT.intersection(letters[:end])):
            return found[0]
        if letters[end : end + 1] in ("c", "m"):
            return None
        if end == len(letters) - 1:
            next(rest, "")
    return None
