"""Reads a job while it runs, from its records and from /proc. The job is asked nothing and sent nothing."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.collect.run.nodes import SavedRun, job_of
from ddpdoctor.collect.run.runfolder import RunFolder, read_run_folder
from ddpdoctor.model.consistency import Consistency
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import (
    END_NAME,
    MEMBERS_NAME,
    RECORD_NAME,
    REPLICAS_NAME,
    JobEnd,
    Life,
    NodeSeen,
    NodesSeen,
    Presence,
    RecordPlace,
    Run,
)
from ddpdoctor.recorder.storage.files import is_folder

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job, Rank

RUN_MARK = "run.json"
NODES = "nodes"
"""The subfolder of a run folder in which other members record, if they see the same folder."""
FROZEN = "Tt"
"""States of a stopped process. Any other state says nothing about a single moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A job as it is now."""

    folder: Path
    """Where the record is: the run folder, or a local one while the job runs."""
    run: Run
    job: Job
    is_running: bool | None
    """Whether `wrap` runs. None: it runs on another host, if it does."""
    end: JobEnd | None
    """How the job ended, or its state when a hang was reported; None if neither happened."""
    members: NodesSeen | None
    replicas: Consistency | None
    memory_bytes: dict[tuple[str, int], int]
    """The resident memory of each process on this host, by its host and pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """A process that recorded something."""

    ticks: int
    beat_ns: int
    """When its recorder last wrote the time."""


def read_live(run_dir: Path, *, with_others: bool = True) -> LiveRun:
    """Read a job as it is now. Without others, only the member that records in this folder is read.

    Raises:
        UserError: the folder is not a run folder, or is damaged.
    """
    here = socket.gethostname()
    own_dir = _own_dir(run_dir, here)
    folder = find_record(own_dir, here)
    own = _for_now(read_run_folder(folder, kept=False))
    others = _read_others(run_dir, own_dir, here) if with_others else {}
    members = load(NodesSeen, folder / MEMBERS_NAME) or _members_of(own_dir, own, others)
    job = job_of(SavedRun(own=own, members=members, others=others))
    owners = _owners((own, *others.values()), here)
    is_here = own.run.host in {here, ""}
    now_ns = time.monotonic_ns() if is_here else max((one.beat_ns for one in owners.values()), default=job.now_ns)
    processes = {key: proc.read_process(key[1]) for key in owners if key[0] == here}
    ranks = tuple(_as_now(rank, here, owners, processes) for rank in job.ranks)
    job = replace(job, now_ns=now_ns, ended=False, ranks=ranks)
    return LiveRun(
        folder=folder,
        run=own.run,
        job=job,
        is_running=_lives(own.run, ranks) if is_here else None,
        end=load(JobEnd, folder / END_NAME),
        members=members,
        replicas=load(Consistency, folder / REPLICAS_NAME),
        memory_bytes={key: found.rss_bytes for key, found in processes.items() if found is not None},
    )


def _own_dir(run_dir: Path, here: str) -> Path:
    """Return the folder of the member whose view is shown: the first one, or if it is elsewhere, one of this host."""
    if (run_dir / RUN_MARK).is_file() or (run_dir / RECORD_NAME).is_file():
        return run_dir
    for path in _member_dirs(run_dir):
        run, place = load(Run, path / RUN_MARK), load(RecordPlace, path / RECORD_NAME)
        if here in {run.host if run is not None else "", place.host if place is not None else ""}:
            return path
    return run_dir


def _member_dirs(run_dir: Path) -> list[Path]:
    """Return the folders of further members, by number."""
    found = [path for path in (run_dir / NODES).glob("*") if path.name.isascii() and path.name.isdecimal()]
    return sorted((path for path in found if is_folder(path)), key=lambda path: int(path.name))


def find_record(run_dir: Path, here: str) -> Path:
    """Return where a job's record is: in its run folder, or in a local one of this host while it runs.

    A run folder from elsewhere may name any folder of this host, so the record must name the run folder, too.
    """
    place = load(RecordPlace, run_dir / RECORD_NAME)
    if place is None or place.host != here or not is_folder(Path(place.folder)):
        return run_dir
    record = load(Run, Path(place.folder) / RUN_MARK)
    with suppress(OSError):
        if record is not None and record.run_dir and Path(record.run_dir).samefile(run_dir):
            return Path(place.folder)
    return run_dir


def is_watched(run: Run) -> bool:
    """Return whether the process of `wrap` that started a job on this host still runs; True if it is not known."""
    if run.watcher_pid is None:
        return True
    found = proc.read_process(run.watcher_pid)
    return found is not None and found.start_ticks == run.watcher_ticks and found.state not in "ZX"


def _lives(run: Run, ranks: tuple[Rank, ...]) -> bool:
    if run.watcher_pid is not None:
        return is_watched(run)
    return any(rank.life is Life.RUNNING for rank in ranks)


def _for_now(folder: RunFolder) -> RunFolder:
    """Return a run folder without what costs time to read and says nothing of now: comparing replicas, older steps."""
    contents = {pid: content._replace(kept=[], totals=[]) for pid, content in folder.rings.contents.items()}
    return replace(
        folder, run=replace(folder.run, check_every=None), rings=replace(folder.rings, contents=contents)
    )  # fmt: skip


def _read_others(run_dir: Path, own_dir: Path, here: str) -> dict[int, RunFolder]:
    """Return the run folders of other members that record in the same place, by number."""
    found = {}
    for path in _member_dirs(run_dir):
        if path != own_dir:
            with suppress(UserError):
                found[int(path.name)] = _for_now(read_run_folder(find_record(path, here), kept=False))
    return found


def _members_of(own_dir: Path, own: RunFolder, others: dict[int, RunFolder]) -> NodesSeen | None:
    """Return the members whose records were read, where none of them has written yet what it knows of all."""
    if not others:
        return None
    number = int(own_dir.name) if own_dir.parent.name == NODES else 0
    hosts = {number: own.run.host, **{other: folder.run.host for other, folder in others.items()}}
    nodes = (NodeSeen(number=one, host=host, presence=Presence.HERE) for one, host in sorted(hosts.items()))
    return NodesSeen(expected=len(hosts), own=number, nodes=tuple(nodes))


def _owners(folders: tuple[RunFolder, ...], here: str) -> dict[tuple[str, int], _Owner]:
    """Return the processes that recorded something, by host and pid."""
    return {
        (folder.run.host or here, pid): _Owner(ticks=content.start_ticks, beat_ns=content.cells["heartbeat_ns"])
        for folder in folders
        for pid, content in folder.rings.contents.items()
    }


def _as_now(
    rank: Rank,
    here: str,
    owners: dict[tuple[str, int], _Owner],
    processes: dict[tuple[str, int], proc.Process | None],
) -> Rank:
    """Return a rank with what /proc says now in the place of what the watcher saw when it last took evidence."""
    key = (rank.host, rank.pid or 0)
    rank = replace(rank, proc_state=None, cpu_share=None, frozen_since_ns=None)
    if rank.life is not Life.RUNNING or rank.host != here or key not in owners:
        return rank
    found = processes.get(key)
    if found is None or found.start_ticks != owners[key].ticks or found.state in "ZX":
        return replace(rank, life=Life.GONE, ended_ns=owners[key].beat_ns)
    return replace(rank, proc_state=found.state if found.state in FROZEN else None)
