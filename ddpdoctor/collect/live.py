"""Reads a job while it runs, without contacting it, and finds the earlier runs of a job."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc
from ddpdoctor.collect.recorded import read_first_step
from ddpdoctor.collect.run import SavedRun, job_of, read_run_folder
from ddpdoctor.collect.run_files import load
from ddpdoctor.model import facts
from ddpdoctor.model.consistency import Consistency
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.live import PassSeen, Start
from ddpdoctor.recorder.storage.files import is_file, is_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.collect.rank import RunFolder
    from ddpdoctor.model.data import LoaderSeen
    from ddpdoctor.recorder.storage.ring_reading import RingContent

RUN_MARK = "run.json"
NODES = "nodes"  # the subfolder of a run folder in which other members record, if they see the same folder
FROZEN = "Tt"  # States of a stopped process. Any other state says nothing about a single moment.
REPORT_MARK = "report.json"
LEVELS = 3  # How deep run folders may be below the folder that the user gives: ``runs/train/restart-1``. Our choice.
# Subfolders of a run folder that hold parts of that run.
PARTS = frozenset({"dumps", "evidence", "gathered", "nccl", "nodes", "prints", "rings", "tuning"})
MOST_RUNS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A job as it is now."""

    folder: Path  # where the record is: the run folder, or a local one while the job runs
    run: facts.Run
    job: facts.Job
    is_running: bool | None  # Whether `wrap` runs. None: it runs on another host, if it does.
    end: facts.JobEnd | None  # how the job ended, or its state when a hang was reported; None if neither happened
    members: facts.NodesSeen | None
    replicas: Consistency | None
    memory_bytes: dict[tuple[str, int], int]  # the resident memory of each process on this host, by its host and pid


def read_live(run_dir: Path, *, with_others: bool = True) -> LiveRun:
    """Read a job as it is now, or only the member that records in this folder; raises ``UserError``."""
    here = socket.gethostname()
    own_dir = _own_dir(run_dir, here)
    folder = find_record(own_dir, here)
    own = _for_now(read_run_folder(folder, kept=False))
    others = {}
    for path in _member_dirs(run_dir) if with_others else ():
        if path != own_dir:
            with suppress(UserError):
                others[int(path.name)] = _for_now(read_run_folder(find_record(path, here), kept=False))
    members = load(facts.NodesSeen, folder / facts.MEMBERS_NAME)
    if members is None and others:  # none has written yet what it knows of all
        number = int(own_dir.name) if own_dir.parent.name == NODES else 0
        hosts = {number: own.run.host, **{other: found.run.host for other, found in others.items()}}
        nodes = (
            facts.NodeSeen(number=node, host=host, presence=facts.Presence.HERE) for node, host in sorted(hosts.items())
        )
        members = facts.NodesSeen(expected=len(hosts), own=number, nodes=tuple(nodes))
    job = job_of(SavedRun(own=own, members=members, others=others))
    # The processes that recorded something, by host and pid
    owners = {
        (found.run.host or here, pid): content
        for found in (own, *others.values())
        for pid, content in found.contents.items()
    }
    beats_ns = [content.cells["heartbeat_ns"] for content in owners.values()]
    is_here = own.run.host in {here, ""}
    now_ns = time.monotonic_ns() if is_here else max(beats_ns, default=job.now_ns)
    processes = {key: proc.read_process(key[1]) for key in owners if key[0] == here}
    ranks = tuple(_as_now(rank, here, owners, processes) for rank in job.ranks)
    job = replace(job, now_ns=now_ns, ended=False, ranks=ranks)
    has_watcher = own.run.watcher_pid is not None
    alive = is_here and (is_watched(own.run) if has_watcher else any(rank.life is facts.Life.RUNNING for rank in ranks))
    return LiveRun(
        folder=folder, run=own.run, job=job, is_running=alive if is_here else None,
        end=load(facts.JobEnd, folder / facts.END_NAME), members=members,
        replicas=load(Consistency, folder / facts.REPLICAS_NAME),
        memory_bytes={key: process.rss_bytes for key, process in processes.items() if process is not None},
    )  # fmt: skip


def _own_dir(run_dir: Path, here: str) -> Path:
    if (run_dir / RUN_MARK).is_file() or (run_dir / facts.RECORD_NAME).is_file():
        return run_dir
    for path in _member_dirs(run_dir):
        run, place = load(facts.Run, path / RUN_MARK), load(facts.RecordPlace, path / facts.RECORD_NAME)
        if here in {run.host if run is not None else "", place.host if place is not None else ""}:
            return path
    return run_dir


def _member_dirs(run_dir: Path) -> list[Path]:
    found = [path for path in (run_dir / NODES).glob("*") if path.name.isascii() and path.name.isdecimal()]
    return sorted((path for path in found if is_folder(path)), key=lambda path: int(path.name))


def find_record(run_dir: Path, here: str) -> Path:
    """Return where a job's record is; a local one must name the run folder, since that may name any folder."""
    place = load(facts.RecordPlace, run_dir / facts.RECORD_NAME)
    if place is None or place.host != here or not is_folder(Path(place.folder)):
        return run_dir
    record = load(facts.Run, Path(place.folder) / RUN_MARK)
    with suppress(OSError):
        if record is not None and record.run_dir and Path(record.run_dir).samefile(run_dir):
            return Path(place.folder)
    return run_dir


def is_watched(run: facts.Run) -> bool:
    """Return whether the process of `wrap` that started a job on this host still runs; True if it is not known."""
    if run.watcher_pid is None:
        return True
    found = proc.read_process(run.watcher_pid)
    return found is not None and found.start_ticks == run.watcher_ticks and found.state not in "ZX"


def _for_now(folder: RunFolder) -> RunFolder:
    """Return a run folder without what is slow to read and not current: comparisons of replicas, older steps."""
    contents = {pid: content._replace(kept=[], totals=[]) for pid, content in folder.contents.items()}
    return replace(folder, run=replace(folder.run, check_every=None), contents=contents)


def _as_now(
    rank: facts.Rank,
    here: str,
    owners: dict[tuple[str, int], RingContent],
    processes: dict[tuple[str, int], proc.Process | None],
) -> facts.Rank:
    """Return a rank with the current state in /proc instead of what the watcher saw at its last evidence."""
    key = (rank.host, rank.pid or 0)
    rank = replace(rank, proc_state=None, cpu_share=None, frozen_since_ns=None)
    if rank.life is not facts.Life.RUNNING or rank.host != here or key not in owners:
        return rank
    found = processes.get(key)
    if found is None or found.start_ticks != owners[key].start_ticks or found.state in "ZX":
        return replace(rank, life=facts.Life.GONE, ended_ns=owners[key].cells["heartbeat_ns"])
    return replace(rank, proc_state=found.state if found.state in FROZEN else None)


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder, without those of further members of a run that is there too."""
    found = sorted(set(_marked(folder, LEVELS)))[:MOST_RUNS]
    runs = [load(facts.Run, path / RUN_MARK) for path in found]
    first = [path for path, run in zip(found, runs, strict=True) if run is None or not run.node_rank]
    return first or found


def _marked(folder: Path, levels: int) -> Iterable[Path]:
    if is_file(folder / RUN_MARK) or is_file(folder / REPORT_MARK):
        yield folder
    if levels == 0:
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if path.name not in PARTS and is_folder(path):
            yield from _marked(path, levels - 1)


def with_past(start: Start, saved: SavedRun, launched: datetime | None, *, is_last: bool) -> Start:
    """Return a start with how far its attempt came, by the time at which its run was launched; raises ``UserError``."""
    job = job_of(saved, None if is_last else start.attempt)

    def wall(time_ns: int | None) -> datetime | None:
        if launched is None or time_ns is None:
            return None
        return launched + timedelta(microseconds=(time_ns - job.launched_ns) / 1000)

    contents = [saved.own.contents.get(rank.pid or 0) for rank in job.ranks if rank.host == job.host]
    first = [at for content in contents if content is not None and (at := read_first_step(content)) is not None]
    last = [times.ended_ns[-1] for rank in job.ranks if (times := rank.step_times) is not None and times.ended_ns]
    passes: tuple[PassSeen, ...] = ()
    first_epoch = None
    for rank in job.ranks:  # of the lowest rank over the loader that it trained from
        loader = max(rank.loaders or (), key=lambda seen: seen.trained_batches, default=None)
        if loader is not None and loader.trained_batches:
            passes, first_epoch = _passes_of(loader, _steps_of(rank))
            break
    began_ns = min((rank.started_ns for rank in job.ranks if rank.started_ns), default=None)
    return replace(
        start, began_at=start.began_at or wall(began_ns) or launched, first_step_at=wall(min(first, default=None)),
        last_progress_at=wall(max(last, default=None)), steps=max(start.steps, *map(_steps_of, job.ranks), 0),
        saved_step=max((ring.cells["saved_steps"] for ring in contents if ring and ring.cells["saves"]), default=None),
        passes=passes, first_epoch=first_epoch,
    )  # fmt: skip


def _steps_of(rank: facts.Rank) -> int:
    times = rank.step_times
    return rank.steps or (times.numbers[-1] if times is not None and times.numbers else 0)


def _passes_of(loader: LoaderSeen, steps: int) -> tuple[tuple[PassSeen, ...], int | None]:
    """Return the last passes that follow each other, and the first one's epoch: the record has first and last ones."""
    trained = [epoch for epoch in loader.epochs if epoch.trained and epoch.set_epoch is not None]
    share = min(1.0, steps / loader.trained_batches)
    gaps = [at for at, (epoch, later) in enumerate(pairwise(trained), 1) if later.number != epoch.number + 1]
    passes = tuple(
        PassSeen(epoch=epoch.set_epoch or 0, steps=round((epoch.backwards or epoch.batches) * share))
        for epoch in trained[gaps[-1] if gaps else 0 :]
    )
    sets_epochs = len({epoch.set_epoch for epoch in trained}) > 1 or any(epoch.set_epoch for epoch in trained)
    return passes, trained[0].set_epoch if sets_epochs else None
