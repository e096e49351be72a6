"""How much of the reduction of gradients backward hides."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from .models import reduced_models
from .simulation import gather, networks_of

if TYPE_CHECKING:
    from .state import SpeedState


def overlap_of(state: SpeedState) -> float | None:
    """Return the share of the reduction that runs while backward computes, 0 to 1; None if it cannot be told.

    The run says how long the reduction outlasts backward. How long it takes in all follows from the network with which
    a simulation of DDP's buckets gives the backward that was seen. There is none where backward hides all of it. The
    medians of a run stand for its steps, so the result is about right and no more. DDP's own counter of overlap is not
    used: it is the time from the first bucket to the end of backward, also while nothing is sent.
    """
    models = reduced_models(state)
    gradients = gather(list(models[0].times.values())) if len(models) == 1 else None
    if gradients is None:
        return None
    exposed_ms = gradients.exposed_ms
    sums_ms = [sum(map(network.time_ms, gradients.bucket_bytes)) for network in networks_of(gradients)]
    shares = [1 - exposed_ms / whole_ms for whole_ms in sums_ms if whole_ms]
    return min(1.0, max(0.0, median(shares))) if shares else None
