"""Finds which processes of a run are ranks, whichever launcher started them, and how they ended."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch import LOCAL_RANK_VARIABLES, RANK_VARIABLES
from ddpdoctor.collect.recorded import find_note
from ddpdoctor.collect.run_files import UNSEEN, End, WatchedJob, WorkerStart, read_text
from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage import ring_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.recorder.storage.ring_reading import RingContent

# Slurm's is not here: a batch script that starts a single process also has the number of tasks in its environment.
WORLD_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_SIZE_NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
MAX_ANCESTORS = 20
SHELL_SIGNAL = 128  # a shell adds this to the signal's number when a signal ended its command
LAST_SIGNAL = 64
SIGTERM = 15
ASKED_TOGETHER_NS = 30_000_000  # our choice: a rank takes 16 ms to write its stack
SAME_SIGNAL_NS = 1_000_000_000  # of ranks before ``wrap``; our choice
# Faulthandler's names for the signals on which it dumps.
_FATAL = {
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Floating-point exception": 8,
    "Illegal instruction": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A process that is a rank."""

    pid: int
    rank: int
    local_rank: int | None
    world_size: int | None
    # The pid of the shell that the agent knows instead; the shell exits with the same status, or 128 + the signal.
    stands_for: int | None = None


def find_ranks(
    started: Mapping[int, WorkerStart],
    contents: Mapping[int, RingContent],
    watch: WatchedJob,
    until_ns: int | None = None,
) -> list[Source]:
    """Return the processes that are ranks.

    ``started`` is what torch's elastic agent started in this attempt, by pid, and ``until_ns`` is when it began the
    next one. If it is empty, another launcher started the processes that have a rank number or joined a group.

    The processes of a rank are a tree, and the rank is the one that the launcher started. It hands over to processes
    below it only if it joined no group itself: it runs the training as its child, or it starts a world of ranks
    (mp.spawn). What a rank starts beside its training, such as an evaluation that makes a group, is not a rank.
    """
    if started:
        return _of_agent(started, contents, until_ns)
    sources = _numbered(contents, watch)
    for pid, row in watch.processes.items():  # ranks without a recorder
        env = row.unrecorded
        rank = _env_number(env, RANK_VARIABLES) if env is not None else None
        if env is not None and rank is not None and pid not in contents:
            local, world = _env_number(env, LOCAL_RANK_VARIABLES), _env_number(env, WORLD_SIZE_NAMES)
            sources.append(Source(pid=pid, rank=rank, local_rank=local, world_size=world))
    return sources


def is_on_one_host(contents: Iterable[RingContent]) -> bool:
    """Return whether all ranks are on this host, by the launcher's environment variables."""
    for content in contents:
        env = _process_env(content)
        local, world = _env_number(env, LOCAL_SIZE_NAMES), _env_number(env, WORLD_SIZE_NAMES)
        if (local is not None and local == world) or (env.get("SLURM_NNODES") == "1" and "SLURM_PROCID" in env):
            return True
    return False


def _of_agent(
    started: Mapping[int, WorkerStart], contents: Mapping[int, RingContent], until_ns: int | None
) -> list[Source]:
    begun_ns = min(start.at for start in started.values())
    of_attempt = {pid: c for pid, c in contents.items() if until_ns is None or _began(c) < until_ns}
    later = {pid: c for pid, c in of_attempt.items() if pid not in started and begun_ns <= _began(c)}
    above = {pid: set(_ancestors(c, contents)) for pid, c in later.items()}
    outside = [c for c in later.values() if not _is_helper(c, contents)]
    worlds = [c for c in outside if _made_world(c)]
    sources: list[Source] = []
    spawned: dict[int, RingContent] = {}
    for pid, start in started.items():
        own = contents.get(pid)
        if own is None:
            # The Python process that a shell runs as this rank: one that joined a group, else the latest. Of processes
            # below each other, it is the outermost.
            ranks = (c for c in outside if c.role == ring_layout.ROLE_RANK)
            mine = [c for c in ranks if _env_number(_process_env(c), RANK_VARIABLES) == start.rank]
            outermost = [c for c in mine if above[c.pid].isdisjoint(ring.pid for ring in mine)]
            own = max(outermost, key=lambda c: (_made_world(c), _began(c)), default=None)
        top = pid if own is None else own.pid
        below = [c for c in worlds if top in above[c.pid]]
        instead = _hands_over(own, start.rank, start.world_size, below, alone=len(started) == 1) if own else []
        if len(instead) > 1 or (instead and _rank_of(instead[0]) != start.rank):
            spawned |= {c.pid: c for c in instead}
            continue
        content = instead[0] if instead else own
        joined = _joined_as(content) if content is not None else None
        own_pid, number = pid if content is None else content.pid, start.rank if joined is None else joined
        known = Source(pid=own_pid, rank=number, local_rank=start.local_rank, world_size=start.world_size)
        sources.append(known if own_pid == pid else replace(known, stands_for=pid))
    for position, content in enumerate(sorted(spawned.values(), key=lambda c: c.pid)):
        joined = _joined_as(content)
        rank = position if joined is None else joined
        sources.append(Source(pid=content.pid, rank=rank, local_rank=rank, world_size=None))
    return sources


def _hands_over(
    own: RingContent, number: int | None, world: int | None, below: list[RingContent], *, alone: bool
) -> list[RingContent]:
    """Return the processes that are ranks in place of the launcher's own, or none if it is the rank.

    ``below`` are the outermost processes below it that joined a group or have a number. One that joined under its
    parent's number is the rank, as the child of a wrapper. A process that is ``alone``, or whose children make a larger
    world than the launcher knows, starts the ranks.
    """
    if _made_world(own) or own.cells["steps"] or not below:
        return []
    joined = {_rank_of(c) for c in below}
    same = [c for c in below if world is None or _world_of(c) in {None, world}]
    if number is not None and joined == {number} and same:
        return [max(same, key=_began)]
    larger = any((_world_of(c) or 0) > (world or 0) for c in below)
    return below if alone or larger else []


def _is_helper(content: RingContent, contents: Mapping[int, RingContent]) -> bool:
    """Return whether a process belongs to a rank that joined a group and had not left it when the process began."""
    above = (contents.get(pid) for pid in _ancestors(content, contents))
    for rank in above:
        if rank is not None and _made_world(rank):
            left = [note.get("at") for note in rank.notes if note.get("k") == "destroyed"]
            if not any(isinstance(at, int) and at < _began(content) for at in left):
                return True
    return False


def _numbered(contents: Mapping[int, RingContent], watch: WatchedJob) -> list[Source]:
    all_ranks = sorted((c for c in contents.values() if c.role == ring_layout.ROLE_RANK), key=_began)
    ranks = {c.pid: c for c in all_ranks if not _is_helper(c, contents)}
    # A rank may start its peers before it joins them, as Lightning does. They join the same world under numbers that no
    # other rank has.
    peers = set()
    for content in all_ranks:
        above_it = _ancestors(content, contents) if content.pid not in ranks else []
        starters = [contents[pid] for pid in above_it if pid in ranks and _made_world(contents[pid])]
        is_same_world = any(_world_of(content) == _world_of(starter) for starter in starters)
        if is_same_world and _rank_of(content) not in {_rank_of(rank) for rank in ranks.values()}:
            ranks[content.pid] = content
            peers.add(content.pid)
    above = {pid: [a for a in _ancestors(c, contents) if a in ranks] for pid, c in ranks.items()}
    found = []
    for pid, own in ranks.items():
        if above[pid] and pid not in peers:
            continue
        env = _process_env(own)
        world = _env_number(env, WORLD_SIZE_NAMES)
        below = [c for c in ranks.values() if pid in above[c.pid]]
        number = _env_number(env, RANK_VARIABLES)
        found += _hands_over(own, number, world, below, alone=(world or 1) == 1) or [own]
    sources = []
    for number, same in sorted(grouped((_rank_of(c), c) for c in found).items()):
        # Helpers are dropped, and processes that ended before the last of the same rank began (a script that trains
        # twice). More than one process is left only if they really share a rank number.
        last = max(map(_began, same))
        ended = {c.pid: watch.processes.get(c.pid, UNSEEN).ended_ns for c in same}
        left = [c for c in same if _began(c) == last or (ended_ns := ended[c.pid]) is None or ended_ns >= last]
        for c in [c for c in left if _made_world(c)] or left:
            env = _process_env(c)
            local, world = _env_number(env, LOCAL_RANK_VARIABLES), _env_number(env, WORLD_SIZE_NAMES)
            sources.append(Source(pid=c.pid, rank=number, local_rank=local, world_size=world))
    return sources


def _rank_of(content: RingContent) -> int:
    joined = _joined_as(content)
    return joined if joined is not None else _env_number(_process_env(content), RANK_VARIABLES) or 0


def _joined_as(content: RingContent) -> int | None:
    for kind in ("initialized", "init"):
        for note in content.notes:
            if note.get("k") == kind and isinstance(note.get("rank"), int):
                return int(note["rank"])
    return None


def _made_world(content: RingContent) -> bool:
    return any(note.get("k") in ("init", "initialized") for note in content.notes)


def _world_of(content: RingContent) -> int | None:
    """Return the size of the world that a process joined or was told of, or None if it is unknown."""
    sizes = [note.get("world_size") for note in content.notes if note.get("k") in ("initialized", "init")]
    known = next((size for size in reversed(sizes) if isinstance(size, int)), None)
    return known if known is not None else _env_number(_process_env(content), WORLD_SIZE_NAMES)


def _began(content: RingContent) -> int:
    return content.cells["started_ns"]


def _ancestors(content: RingContent, contents: Mapping[int, RingContent]) -> list[int]:
    """Return the processes above one: its parents, and the rank that started it, even if a shell is in between."""
    found: list[int] = []
    steps = [content]
    for step in steps:
        note = find_note(step.notes, "process")
        for pid in (note.get("ppid"), note.get("rank_pid")):
            if isinstance(pid, int) and pid not in {content.pid, 0, *found} and len(found) < MAX_ANCESTORS:
                found.append(pid)
                if pid in contents:
                    steps.append(contents[pid])
    return found


def _process_env(content: RingContent) -> dict[str, str]:
    env = find_note(content.notes, "process").get("env")
    return env if isinstance(env, dict) else {}


def _env_number(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((int(env[name]) for name in names if str(env.get(name, "")).isdecimal()), None)


def find_ends(
    sources: Iterable[Source],
    contents: Mapping[int, RingContent],
    folder: Path,
    watch: WatchedJob,
    known: Mapping[int, End],
) -> dict[int, End]:
    """Return how processes ended, by pid; ``known`` comes from their parents, and the rest is inferred."""
    ends = dict(known)
    unexplained = []
    for source in sources:
        row = watch.processes.get(source.pid, UNSEEN)
        shell = known.get(source.stands_for or 0)
        gone_ns = row.ended_ns or (shell.at if shell else None)
        if source.pid in ends or gone_ns is None:
            continue
        code = row.code if row.code is not None else _code_of(contents.get(source.pid), folder, shell)
        if code is None:
            unexplained.append((source.pid, gone_ns))
        else:
            ends[source.pid] = End(pid=source.pid, code=code, at=gone_ns)
    signal = _signal_in(watch.launcher_status)
    if len(unexplained) == 1 and signal is not None:
        pid, gone_ns = unexplained[0]
        ends[pid] = End(pid=pid, code=-signal, at=gone_ns)
    return ends


def stop_of_others(sources: Iterable[Source], ends: Mapping[int, End], watch: WatchedJob) -> int | None:
    """Return when another launcher began to stop the ranks: if none has ended before, one SIGTERM is a kill."""
    terminated, others = [], []
    for source in sources:
        end = ends.get(source.pid)
        if end is not None and end.code == -SIGTERM:
            terminated.append(watch.processes.get(source.pid, UNSEEN).asked_to_end_ns or end.at)
        elif end is not None and end.code != 0:
            others.append(end.at)
    terminated.sort()
    if not terminated:
        return None
    if others and min(others) < terminated[0]:
        return terminated[0]
    if len(terminated) == 1:
        return None
    return terminated[1] if terminated[1] - terminated[0] > ASKED_TOGETHER_NS else terminated[0]


def interruption_ns(sources: Iterable[Source], ends: Mapping[int, End], watch: WatchedJob) -> int | None:
    """Return when a user interrupted the job: Ctrl-C and ``scancel`` may reach ranks before ``wrap``."""
    noted = watch.interrupted_ns
    if not noted:
        return None
    times_ns = [noted]
    for source in sources:
        end, row = ends.get(source.pid), watch.processes.get(source.pid, UNSEEN)
        if end is not None and end.code == -SIGTERM:
            times_ns.append(min(filter(None, (row.asked_to_end_ns, row.ended_ns, end.at))))
    return min(time_ns for time_ns in times_ns if time_ns > noted - SAME_SIGNAL_NS)


def _code_of(content: RingContent | None, folder: Path, shell: End | None) -> int | None:
    """Return the exit status or signal from what the process left behind, or from the shell that waited for it."""
    if content is None:
        return _of_shell(shell)
    name = f"{content.pid}-{content.start_ticks}"
    fatal = re.search(r"^Fatal Python error: (.*)$", read_text(folder / "evidence" / f"{name}.dump"), re.MULTILINE)
    if fatal is not None and fatal.group(1) in _FATAL:
        return -_FATAL[fatal.group(1)]
    if read_text(folder / "evidence" / f"{name}.term"):
        return -SIGTERM
    # The exit status of a process that raised, called exit, or reached the end of its script
    if any(n.get("k") == "raised" and n.get("uncaught") and n.get("main") for n in content.notes):
        left: int | None = 1
    else:
        leaving = find_note(reversed(content.notes), "exit")
        if leaving:
            asked = str(leaving.get("status"))
            left = int(asked) if asked.isdecimal() else int(asked not in ("None", "False"))
        else:
            left = 0 if content.cells["main_ended_ns"] or content.cells["exited_ns"] else None
    return left if left is not None else _of_shell(shell)


def _of_shell(shell: End | None) -> int | None:
    if shell is None:
        return None
    signal = _signal_in(shell.code)
    return -signal if signal is not None else shell.code


def _signal_in(status: int | None) -> int | None:
    """Return the signal that a shell's or a process's status stands for, or None."""
    if status is None or status == 0:
        return None
    if status < 0:
        return -status
    return status - SHELL_SIGNAL if SHELL_SIGNAL < status <= SHELL_SIGNAL + LAST_SIGNAL else None
