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
    """Report buffers that differ between ranks after DDP sent them, or because DDP is set not to send them.

    ## What it means

    By default DDP sends rank 0's buffers before each forward in training. In between, each rank has its own BatchNorm
    statistics, which is normal and no alarm. With `broadcast_buffers=False` nothing makes them equal: ranks then
    evaluate different models, and the checkpoint holds the statistics of one rank's data.

    ## How it is recognized

    Each rank writes 16 bytes per buffer right after DDP has sent them, or after a step with `broadcast_buffers=False`,
    as for parameters. The parent process compares those of the same step by name.

    ## How sure

    High if a majority is equal. Otherwise all ranks are named: low.

    ## What to do

    Leave `broadcast_buffers=True`, or convert the model with `SyncBatchNorm.convert_sync_batchnorm` before wrapping it.
    If ranks should have their own statistics, pass `--allow-different '*running_*'`.

    ## Example

        buffers differ between ranks 0 and 1 after step 1: with broadcast_buffers=False, each rank keeps the statistics
        of its own data
    """
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
