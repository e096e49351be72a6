"""The data of a job's pictures for its report: ``timeline``, ``waits`` and ``source``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run import runfolder
from ddpdoctor.collect.run.source_lines import keep_excerpt, load_excerpt, read_excerpt
from ddpdoctor.diagnose.attempts import wall_time
from ddpdoctor.diagnose.pictures.classes import blamed_ranks, rows_by_rank
from ddpdoctor.diagnose.pictures.faults import began_ns
from ddpdoctor.diagnose.pictures.timeline import make_timeline
from ddpdoctor.diagnose.pictures.waits import fold_waits
from ddpdoctor.diagnose.rows import rank_row
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Check, JobStatus, Outcome
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.wait_links import find_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpdoctor.collect.run.nodes import SavedRun
    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Finding, RankRow
    from ddpdoctor.model.pictures import SourceExcerpt
    from ddpdoctor.model.run import Run
    from ddpdoctor.model.timeline import Timeline

CHECK_ID = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureData:
    """What a report gets: entries of its data, and a crashed check if they could not be made."""

    data: dict[str, Any]
    checks: tuple[Check, ...] = ()


def picture_data(
    job: Job,
    saved: SavedRun,
    rows: Iterable[RankRow],
    verdict: Finding | None,
    status: JobStatus,
    *,
    reads_source: bool,
) -> PictureData:
    """Return the data of a job's pictures. A failure here costs the pictures and not the report.

    With ``reads_source``, the lines at the verdict are read from the user's file and kept in the run folder; without,
    only lines that were kept are shown.
    """

    def make() -> dict[str, Any]:
        pictures = _make(job, saved.own.run, rows_by_rank(rows), verdict, status)
        excerpt = _excerpt(saved, verdict, reads_source=reads_source)
        return {**pictures, "source": None if excerpt is None else encode(excerpt)}

    return walled(make)


def walled(make: Callable[[], dict[str, Any]]) -> PictureData:
    """Return the data that a function makes, or a crashed check if it raises."""
    try:
        return PictureData(data=make())
    except Exception as error:  # noqa: BLE001 - the wall around a rule: these are functions of untrusted facts, too
        reason = f"{type(error).__name__}: {error}"
        return PictureData(data={}, checks=(Check(id=CHECK_ID, outcome=Outcome.CRASHED, reason=reason),))


def _make(
    job: Job, run: Run, rows: Mapping[int, RankRow], verdict: Finding | None, status: JobStatus
) -> dict[str, Any]:  # fmt: skip
    state = build_job_state(job) if status is not JobStatus.FINISHED else None
    cause = verdict if state is not None else None
    timeline = make_timeline(
        job,
        rows,
        cause,
        waiters=frozenset(state.waits.waiters if state is not None else ()),
        started_at=wall_time(began_ns(job), job, run) or run.started_at or "",
        hung=status is JobStatus.HUNG,
    )
    waits = fold_waits(find_targets(state), rows, blamed_ranks(cause)) if state is not None else None
    return {
        "timeline": encode_timeline(timeline),
        "waits": None if waits is None else encode(waits),
    }


def encode_timeline(timeline: Timeline | None) -> Any:
    """Encode a timeline without what its spans lack, which is much of their text."""
    if timeline is None:
        return None
    plain = encode(timeline)
    for lane in plain["lanes"]:
        lane["coarse"] = list(map(_without_empty, lane["coarse"]))
        lane["detail"] = list(map(_without_empty, lane["detail"]))
    return plain


def _without_empty(span: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in span.items() if value not in ("", None) or name == "end_ms"}


def _excerpt(saved: SavedRun, verdict: Finding | None, *, reads_source: bool) -> SourceExcerpt | None:
    """Return the lines around the first line that the verdict names: from the file, or else those that were kept."""
    place = next(iter(verdict.where), None) if verdict is not None else None
    if place is None:
        return None
    kept = load_excerpt(saved.own.path, place.file, place.line)
    # Other nodes send their records: a file is read only if the records of this host say that a rank here ran it.
    if not reads_source or not any(_ran(rank_row(rank), place.file) for rank in runfolder.job_of(saved.own).ranks):
        return kept
    try:
        began_s = datetime.fromisoformat(saved.own.run.started_at or "").timestamp()
    except ValueError:
        return kept
    found = read_excerpt(place.file, place.line, began_s)
    if found is None:
        return kept
    keep_excerpt(saved.own.path, found)
    return found


def _ran(row: RankRow, file: str) -> bool:
    at = row.where is not None and row.where.file == file
    return at or any(frame.startswith(f"{file}:") for frame in row.stack)
