"""DD502: buffers differ between ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import first_names, majority_of, rank_list
from ddpdoctor.rules.answers import skipped
from ddpdoctor.rules.consistency.problems import (
    DriftBlame,
    DriftCause,
    FoundDifference,
    Ground,
    blame_of,
    problems_of,
)
from ddpdoctor.rules.consistency.survey import ruling, survey
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import TensorRow, TensorSplit
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer
    from ddpdoctor.rules.consistency.replicas import Sighting

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of BatchNorm."""
_OWN = ("rank", "seed", "rng", "expert", "shard", "local", "offset")
"""Parts of the names of tensors that ranks may have for themselves. Our choice."""
_SCRATCH = re.compile(r"(^|[._])(k|v|kv|key|value)_?cache|cache_?(k|v|kv)s?$|scratch|workspace", re.IGNORECASE)
"""Names of memory that is written before it is read, such as a cache for generation, which training does not use."""
_BY_DESIGN = "constant tensors differ between ranks of a mesh, but each rank may have its own by design"


@rule("DD502", "buffer-drift", Severity.WARNING, "Buffers differ between ranks")
def check_buffers(job: Job) -> Answer:
    """Report buffers that differ between ranks after DDP sent them, or because DDP is set not to send them."""
    seen = survey(job, What.BUFFER, _why)
    found = [one for one in seen.found if not one.sighting.replica.mesh_dims]
    differing = [one for one in seen.found if one.sighting.replica.mesh_dims]
    constants = [one for each in differing if (one := _constants(each)) is not None]
    if differing and not constants and not found:
        return skipped("; ".join((*seen.excuses, _BY_DESIGN)))
    problems = problems_of(job, found, "buffers") + problems_of(job, constants, "constant tensors")
    return ruling(job, seen, problems, "buffers that DDP sends")


def _constants(found: FoundDifference) -> FoundDifference | None:
    """Return a difference with only those constants that should be equal, or None without any."""
    sighting, all_splits = found.sighting, found.sighting.difference.splits
    splits = [split for split in all_splits if not _SCRATCH.search(split.row.name)]
    unwritten = {(each.rank, name) for each in sighting.values for name in each.unwritten}
    empty_on = {split: _empty_on(split, unwritten) for split in splits}
    kept = [split for split in splits if empty_on[split]]
    ranks = tuple(sorted({rank for split in kept for rank in empty_on[split]}))
    members = {rank for split in kept for side in split.sides for rank in side}
    blame = DriftBlame(ranks=ranks, ground=Ground.SEEN) if len(ranks) < len(members) else blame_of(kept)
    if not kept:
        kept = [split for split in splits if majority_of(split.sides) and not _is_own(split.row)]
        blame = blame_of(kept)
        members = {rank for split in kept for side in split.sides for rank in side}
        if blame.ranks == (min(members, default=0),):
            blame = DriftBlame(ranks=tuple(sorted(members)), ground=Ground.NONE)
    if not kept:
        return None
    difference = sighting.difference
    left = difference.differing - len(all_splits) + len(kept)
    names = first_names(list(dict.fromkeys(split.row.name for split in kept)), count=left)
    if ranks:
        words = "after to_empty(), which leaves whatever was in memory, nothing was seen to write to "
        words += f"{names} on {rank_list(ranks)}"
    else:
        words = f"no wrapper of the model makes {names} equal, so ranks have initialized or loaded them differently"
    fix = (
        "after to_empty(), give every buffer its value on all ranks (reset_parameters(), or the code that computed it; "
        "non-persistent ones are in no checkpoint), load with strict=True, or broadcast it from a rank that is right; "
        f"if ranks should have their own, pass --allow-different '{kept[0].row.name}'"
    )
    return replace(
        found,
        sighting=replace(sighting, difference=replace(difference, splits=tuple(kept), differing=left)),
        cause=DriftCause(name="uninitialized" if ranks else "set apart", words=words, fix=fix, blame=blame),
    )


def _empty_on(split: TensorSplit, unwritten: set[tuple[int, str]]) -> list[int]:
    """Return the ranks on which a tensor is as ``to_empty`` made it."""
    name = re.sub(r"\d+", "*", split.row.name)[:120]
    return [rank for side in split.sides for rank in side if (rank, name) in unwritten]


def _is_own(row: TensorRow) -> bool:
    """Return whether a tensor may be a rank's own: by its name, or because it is a number or flag."""
    is_number = row.shape in {(), (1,)} and "float" not in row.dtype
    return is_number or any(word in row.name.lower() for word in _OWN)


def _why(sighting: Sighting) -> DriftCause:
    if sighting.stream.clock is StreamClock.SYNC:
        return DriftCause(
            name="not sent",
            words="DDP broadcast rank 0's buffers without these: they were replaced or registered after wrapping",
            fix=(
                "register buffers before you wrap the model, and change them in place (copy_) instead of assigning "
                "new ones"
            ),
        )
    names = {split.row.name.rpartition(".")[2] for split in sighting.difference.splits}
    what = "the statistics of its own data" if names & set(_STATISTICS) else "its own values"
    return DriftCause(
        name="kept apart",
        words=f"with broadcast_buffers=False, each rank keeps {what}",
        fix=(
            "keep broadcast_buffers=True, or use SyncBatchNorm; if this is intended, pass --allow-different "
            "'*running_*'"
        ),
    )
