"""DD502: buffers differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.consistency.problems import DriftCause, problems_of
from ddpdoctor.rules.consistency.survey import ruling, survey
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer
    from ddpdoctor.rules.consistency.replicas import Sighting

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of BatchNorm."""


@rule("DD502", "buffer-drift", Severity.WARNING, "Buffers differ between ranks")
def check_buffers(job: Job) -> Answer:
    """Report buffers that differ between ranks after DDP sent them, or because DDP is set not to send them."""
    seen = survey(job, What.BUFFER, _why)
    return ruling(job, seen, problems_of(job, seen.found, "buffers"), "buffers that DDP sends")


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
