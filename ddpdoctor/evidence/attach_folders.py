"""Chooses among folders of ``attach``: those of another job, and older ones of the same ranks, are left out by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.attached import AskedNodes, AttachedJob
from ddpdoctor.model.rank_words import count_of, rank_list
from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.attached import JobIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """A folder that ``attach`` saved on one node."""

    path: str
    """The path with a slash at its end. Empty for the current folder."""
    job: AttachedJob

    @property
    def key(self) -> tuple[JobIdentity, int]:
        """Equal on all nodes of one start of a job. Its name may differ: a node may have several jobs of one name."""
        return replace(self.job.job, name=""), max((one.restart_count or 0 for one in self.job.ranks), default=0)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(one.rank for one in self.job.ranks if one.rank is not None)


def leave_out_folders(records: Mapping[str, AttachedJob | AskedNodes], sources: Iterable[str]) -> dict[str, str]:
    """Return why files are left out, by their names: all of a folder, if it is of another job or older.

    ``records`` are the jobs and nodes that were read, by the names of their files; ``sources`` are all files.
    """
    jobs = {_above(source): record for source, record in records.items() if isinstance(record, AttachedJob)}
    folders = [_Folder(path=path, job=job) for path, job in jobs.items()]
    reasons = _other_jobs(folders)
    reasons |= _older([one for one in folders if one.path not in reasons])
    for source in (source for source, record in records.items() if isinstance(record, AskedNodes)):
        inside = [one.path for one in folders if one.path.startswith(_above(source))]
        if inside and all(path in reasons for path in inside):
            reasons[_above(source)] = reasons[inside[0]]
    return {source: why for source in sources for path, why in reasons.items() if path and source.startswith(path)}


def _above(source: str) -> str:
    return source[: source.rfind("/") + 1]


def _other_jobs(folders: list[_Folder]) -> dict[str, str]:
    """Return the folders of jobs other than the one that ``attach`` read last."""
    jobs = grouped((one.key, one) for one in folders)
    last = max(jobs.values(), key=lambda those: max(one.job.wall_ns for one in those), default=[])
    return {one.path: _other_words(one, last[0]) for those in jobs.values() if those is not last for one in those}


def _other_words(one: _Folder, kept: _Folder) -> str:
    if one.key[0] == kept.key[0]:
        return "left out: of an earlier start of the job"
    of = f", of {one.job.world_size} ranks" if one.job.world_size is not None else ""
    return f"left out: of another job, {one.job.job.name}{of}; the one looked at last is {kept.job.job.name}"


def _older(folders: list[_Folder]) -> dict[str, str]:
    """Return the folders of ranks that ``attach`` read again later."""
    found: dict[str, str] = {}
    newest_first = sorted(folders, key=lambda one: one.job.wall_ns, reverse=True)
    for place, one in enumerate(newest_first):
        again = next((later for later in newest_first[:place] if later.ranks & one.ranks), None)
        if again is not None:
            age = count_of(round((again.job.wall_ns - one.job.wall_ns) / 60e9), "minute")
            found[one.path] = f"left out: {rank_list(again.ranks & one.ranks)} were looked at again {age} later"
    return found
