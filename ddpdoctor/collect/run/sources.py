"""Finds which processes are ranks, whichever launcher started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.launch.this_process import LOCAL_RANK_VARIABLES, RANK_VARIABLES
from ddpdoctor.model.sides import grouped
from ddpdoctor.recorder.storage import ring_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.run.agent_log import WorkerStart
    from ddpdoctor.collect.run.watched import WatchedJob, WatchedRank
    from ddpdoctor.recorder.storage.ring_reading import RingContent

WORLD_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Slurm's is not here: a batch script that starts a single process also has the number of tasks in its environment."""
LOCAL_SIZE_NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
MAX_ANCESTORS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A process that is a rank."""

    pid: int
    rank: int
    local_rank: int | None
    world_size: int | None
    stands_for: int | None = None
    """The pid of the shell that the agent knows instead; the shell exits with the same status, or 128 + the signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraces:
    """The evidence by which we find the ranks."""

    started: Mapping[int, WorkerStart]
    """What torch's elastic agent started in this attempt, by pid; empty if another launcher starts the ranks."""
    contents: Mapping[int, RingContent]
    watch: WatchedJob
    """What the watcher saw."""

    until_ns: int | None = None
    """When the agent began the next attempt."""

    @property
    def begun_ns(self) -> int:
        """When the agent began this attempt."""
        return min((start.at for start in self.started.values()), default=0)

    def covers(self, time_ns: int) -> bool:
        """Return whether a time is within this attempt."""
        return self.begun_ns <= time_ns and (self.until_ns is None or time_ns < self.until_ns)


def find_ranks(seen: RankTraces) -> list[Source]:
    """Return the processes that are ranks.

    With torch's elastic agent, these are its children. If a child started ranks itself (mp.spawn) and joined no
    group, it is a launcher, and the processes that it started are the ranks. With any other launcher, ranks are the
    processes that have a rank number or joined a group, with or without a recorder.
    """
    return _of_agent(seen) if seen.started else [*_numbered(seen), *_unrecorded(seen)]


def is_on_one_host(contents: Iterable[RingContent]) -> bool:
    """Return whether the launcher's environment variables say that all ranks are on this host."""
    for content in contents:
        env = _environment(content)
        local, world = _number(env, LOCAL_SIZE_NAMES), _number(env, WORLD_SIZE_NAMES)
        if (local is not None and local == world) or (env.get("SLURM_NNODES") == "1" and "SLURM_PROCID" in env):
            return True
    return False


def process_note(content: RingContent) -> dict[str, Any]:
    """Return what a process noted about itself at its start."""
    return next((note for note in content.notes if note.get("k") == "process"), {})


def _of_agent(seen: RankTraces) -> list[Source]:
    contents, started = seen.contents, seen.started
    later = {pid: c for pid, c in contents.items() if pid not in started and seen.covers(_began(c))}
    spawned = {pid: c for pid, c in later.items() if _made_world(c)}
    launchers = {ancestor for content in spawned.values() for ancestor in _ancestors(content, contents)}
    candidates = [c for pid, c in later.items() if c.role == ring_layout.ROLE_RANK and pid not in launchers]
    sources = []
    for pid, start in started.items():
        behind = None if pid in contents else _behind_shell(start.rank, candidates)
        if behind is not None:
            spawned.pop(behind.pid, None)
        elif pid in launchers and not (pid in contents and _made_world(contents[pid])):
            continue
        content = behind or contents.get(pid)
        joined = _joined_as(content) if content is not None else None
        sources.append(
            Source(
                pid=pid if behind is None else behind.pid,
                rank=start.rank if joined is None else joined,
                local_rank=start.local_rank,
                world_size=start.world_size,
                stands_for=pid if behind is not None else None,
            )
        )
    return [*sources, *_spawned(spawned.values())]


def _spawned(contents: Iterable[RingContent]) -> list[Source]:
    sources = []
    for position, content in enumerate(sorted(contents, key=lambda c: c.pid)):
        joined = _joined_as(content)
        rank = position if joined is None else joined
        sources.append(Source(pid=content.pid, rank=rank, local_rank=rank, world_size=None))
    return sources


def _behind_shell(number: int, candidates: Iterable[RingContent]) -> RingContent | None:
    """Return the Python process that a shell runs as this rank: one that joined a group, else the latest."""
    mine = [c for c in candidates if _number(_environment(c), RANK_VARIABLES) == number]
    return max(mine, key=lambda c: (_made_world(c), _began(c)), default=None)


def _numbered(seen: RankTraces) -> list[Source]:
    """Return the ranks of a launcher that is not torch's elastic agent."""
    ranks = [c for c in seen.contents.values() if c.role == ring_layout.ROLE_RANK]
    launchers = {ancestor for content in ranks for ancestor in _ancestors(content, seen.contents)}
    by_rank = grouped((_rank_of(c), c) for c in ranks if c.pid not in launchers or _made_world(c))
    return [_source(c) for number in sorted(by_rank) for c in _of_last_job(by_rank[number], seen.watch)]


def _of_last_job(same: list[RingContent], watch: WatchedJob) -> list[RingContent]:
    """Drop helpers, and processes that ended before the last of the same rank began (a script that trains twice).

    More than one process is left only if they really share a rank number.
    """
    last = max(map(_began, same))
    left = [c for c in same if _began(c) == last or not _ended_before(last, watch.of(c.pid))]
    return [c for c in left if _made_world(c)] or left


def _ended_before(time_ns: int, row: WatchedRank) -> bool:
    return row.ended_ns is not None and row.ended_ns < time_ns


def _source(content: RingContent) -> Source:
    env = _environment(content)
    return Source(
        pid=content.pid,
        rank=_rank_of(content),
        local_rank=_number(env, LOCAL_RANK_VARIABLES),
        world_size=_number(env, WORLD_SIZE_NAMES),
    )


def _unrecorded(seen: RankTraces) -> list[Source]:
    """Return the ranks without a recorder that the watcher saw."""
    sources = []
    for pid, row in seen.watch.processes.items():
        env = row.unrecorded
        rank = _number(env, RANK_VARIABLES) if env is not None else None
        if env is not None and rank is not None and pid not in seen.contents:
            local, world = _number(env, LOCAL_RANK_VARIABLES), _number(env, WORLD_SIZE_NAMES)
            sources.append(Source(pid=pid, rank=rank, local_rank=local, world_size=world))
    return sources


def _rank_of(content: RingContent) -> int:
    joined = _joined_as(content)
    return joined if joined is not None else _number(_environment(content), RANK_VARIABLES) or 0


def _joined_as(content: RingContent) -> int | None:
    """Return the rank number with which a process joined its process group, or None if it has not."""
    for kind in ("initialized", "init"):
        for note in content.notes:
            if note.get("k") == kind and isinstance(note.get("rank"), int):
                return int(note["rank"])
    return None


def _made_world(content: RingContent) -> bool:
    return any(note.get("k") in ("init", "initialized") for note in content.notes)


def _began(content: RingContent) -> int:
    return content.cells["started_ns"]


def _ancestors(content: RingContent, contents: Mapping[int, RingContent]) -> list[int]:
    found: list[int] = []
    step: RingContent | None = content
    while step is not None and len(found) < MAX_ANCESTORS:
        ppid = process_note(step).get("ppid")
        if not isinstance(ppid, int) or ppid in found:
            break
        found.append(ppid)
        step = contents.get(ppid)
    return found


def _environment(content: RingContent) -> dict[str, str]:
    env = process_note(content).get("env")
    return env if isinstance(env, dict) else {}


def _number(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((int(env[name]) for name in names if str(env.get(name, "")).isdecimal()), None)
