"""Finds the runs of a job below a folder, and reads how far each of its starts came and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.rank.steps import read_first_step
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.collect.run.nodes import job_of
from ddpdoctor.model.facts import Run
from ddpdoctor.model.live import PassSeen
from ddpdoctor.recorder.storage.files import is_file, is_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.collect.run.nodes import SavedRun
    from ddpdoctor.model.data import EpochSeen, LoaderSeen
    from ddpdoctor.model.facts import Job, Rank

RUN_MARK, REPORT_MARK = "run.json", "report.json"
LEVELS = 3
"""How deep run folders may be below the folder that the user gives: ``runs/train/restart-1``. Our choice."""
PARTS = frozenset({"dumps", "evidence", "gathered", "nccl", "nodes", "prints", "rings", "tuning"})
"""Subfolders of a run folder that hold parts of that run."""
MOST_RUNS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """How far one start of a job came. Times are CLOCK_MONOTONIC of the reporting host; None: not known."""

    launched_ns: int
    """When the run was launched."""
    began_ns: int | None
    first_step_ns: int | None
    last_progress_ns: int | None
    """When the last step ended."""
    steps: int
    saved_step: int | None = None
    """The step at which a rank last saved something with torch.save; None if none did."""
    passes: tuple[PassSeen, ...] = ()
    """The passes over the data of one rank, without a gap from the last one backwards."""
    first_epoch: int | None = None
    """The epoch of the first pass, or None if the script gives its sampler no epochs."""


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder, without those of further members of a run that is there too."""
    found = sorted(set(_marked(folder, LEVELS)))[:MOST_RUNS]
    first = [path for path in found if not _is_further_member(path)]
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


def _is_further_member(path: Path) -> bool:
    run = load(Run, path / RUN_MARK)
    return run is not None and bool(run.node_rank)


def read_past(saved: SavedRun, attempt: int, *, is_last: bool) -> Past:
    """Return how far one attempt of a run came.

    Raises:
        UserError: the run folder is damaged.
    """
    job = job_of(saved, None if is_last else attempt)
    contents = [saved.own.rings.contents.get(rank.pid or 0) for rank in job.ranks if rank.host == job.host]
    first = [at for content in contents if content is not None and (at := read_first_step(content)) is not None]
    passes, first_epoch = _read_passes(job)
    return Past(
        launched_ns=job.launched_ns,
        began_ns=min((rank.started_ns for rank in job.ranks if rank.started_ns), default=None),
        first_step_ns=min(first, default=None),
        last_progress_ns=max((at for rank in job.ranks if (at := _last_step_ns(rank))), default=None),
        steps=max((_steps_of(rank) for rank in job.ranks), default=0),
        saved_step=max((one.cells["saved_steps"] for one in contents if one and one.cells["saves"]), default=None),
        passes=passes,
        first_epoch=first_epoch,
    )


def _steps_of(rank: Rank) -> int:
    times = rank.step_times
    return rank.steps or (times.numbers[-1] if times is not None and times.numbers else 0)


def _last_step_ns(rank: Rank) -> int | None:
    times = rank.step_times
    return times.ended_ns[-1] if times is not None and times.ended_ns else None


def _read_passes(job: Job) -> tuple[tuple[PassSeen, ...], int | None]:
    """Return the passes of the lowest rank over the loader that it trained from, and the epoch of the first."""
    for rank in job.ranks:
        loader = max(rank.loaders or (), key=lambda one: one.trained_batches, default=None)
        if loader is not None and loader.trained_batches:
            return _passes_of(loader, _steps_of(rank))
    return (), None


def _passes_of(loader: LoaderSeen, steps: int) -> tuple[tuple[PassSeen, ...], int | None]:
    trained = [one for one in loader.epochs if one.trained and one.set_epoch is not None]
    share = min(1.0, steps / loader.trained_batches)
    passes = tuple(
        PassSeen(epoch=one.set_epoch or 0, steps=round((one.backwards or one.batches) * share))
        for one in _without_gap(trained)
    )
    sets_epochs = len({one.set_epoch for one in trained}) > 1 or any(one.set_epoch for one in trained)
    return passes, trained[0].set_epoch if sets_epochs else None


def _without_gap(passes: list[EpochSeen]) -> list[EpochSeen]:
    """Return the last passes that follow each other. Of many passes the record has the first and the last ones."""
    for at in range(len(passes) - 1, 0, -1):
        if passes[at].number != passes[at - 1].number + 1:
            return passes[at:]
    return passes
