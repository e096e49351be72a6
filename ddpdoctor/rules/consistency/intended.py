"""Differences that are intended, and times at which replicas cannot be compared, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.rank_words import rank_list

from .replicas import all_values, is_aligned

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job

    from .blame import DriftCause
    from .replicas import Replica, Sighting

_LOCAL_SGD = "ocalSGD"
"""Part of the names of torch's hook and optimizer, ``post_localSGD_hook`` and ``PostLocalSGDOptimizer``."""
_SHARDED = "ZeroRedundancyOptimizer"


def excuse_of_model(replica: Replica, what: What) -> str:
    """Return why tensors of a kind may differ in a model at any time, or "" if they may not."""
    values = all_values(replica.streams)
    if any(_LOCAL_SGD in name for each in values for name in (each.hook, each.optimizer)):
        return "local SGD: ranks differ by design until their parameters are averaged"
    if what is What.STATE and any(_SHARDED in each.optimizer for each in values):
        return f"{_SHARDED}: each rank holds the state of its own share"
    if what is not What.PARAMETER and _joins(replica):
        return "ranks may step unequally inside DDP's join: only the end is compared"
    return ""


def excuse_of_sighting(sighting: Sighting) -> str:
    """Return why one difference does not count, or "" if it does."""
    if sighting.stream.clock is not StreamClock.END and _joins(sighting.replica):
        return "ranks may step unequally inside DDP's join: only the end is compared"
    if not is_aligned(sighting.values):
        return _uneven_words(sighting)
    if _came_after_training(sighting):
        return f"parameters were equal after the last step, {sighting.step}, and changed only afterwards"
    return ""


def excuse_of_job(job: Job, sighting: Sighting) -> str:
    """Return why a difference results from what ended the job, or "" if it is a fault of its own."""
    raised = any(error.reducer is not None for rank in job.ranks for error in rank.raised if error.uncaught)
    if raised and any(each.unfinished for each in sighting.values):
        return "DDP had not finished its reduction, for which it raised an error at the next forward"
    return ""


def excuse_of_cause(sighting: Sighting, cause: DriftCause) -> str:
    """Return why gradients may stay unreduced, because the script makes parameters equal itself, or ""."""
    if cause.unsynchronised and _ends_equal(sighting.replica):
        return "local SGD: gradients were not reduced, and the parameters were equal at the end"
    return ""


def _joins(replica: Replica) -> bool:
    return any(each.join for each in all_values(replica.streams))


def _ends_equal(replica: Replica) -> bool:
    ends = [stream for stream in replica.streams if stream.clock is StreamClock.END and stream.compared]
    return bool(ends) and not any(one.what is What.PARAMETER for stream in ends for one in stream.differences)


def _came_after_training(sighting: Sighting) -> bool:
    """Return whether all was equal after the last step: what a rank loads to evaluate does not harm training."""
    if sighting.stream.clock is not StreamClock.END:
        return False
    steps = [
        stream.last_number
        for stream in sighting.replica.streams
        if stream.clock is StreamClock.STEP
        and What.PARAMETER in stream.kinds
        and not any(one.what is What.PARAMETER for one in stream.differences)
    ]
    return sighting.step in steps


def _uneven_words(sighting: Sighting) -> str:
    least = min(each.reductions for each in sighting.values)
    behind = [each.rank for each in sighting.values if each.reductions == least]
    return (
        f"ranks had not come equally far at step {sighting.step} of the optimizer: fewer backwards were reduced on "
        f"{rank_list(behind)}"
    )
