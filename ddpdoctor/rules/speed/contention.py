"""Whether the ranks have cores to spare for the threads that reduce gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Rank

MOST_QUEUED = 0.20
MOST_OF_CORES = 0.5
"""If the ranks compute on more of the cores, the threads that reduce take time from backward, and no prediction of the
reduction holds. Our choice."""


def contention(ranks: Iterable[Rank]) -> str:
    """Return why a prediction of the reduction would not hold, or "" if nothing is against it."""
    by_host: dict[str, float] = {}
    cores = 0
    is_known = False
    for rank in ranks:
        if rank.speed is None or rank.speed.core_time is None or not rank.speed.core_time.elapsed_ms:
            continue
        is_known = True
        time, around = rank.speed.core_time, rank.speed.surroundings
        if time.queued_ms > MOST_QUEUED * time.elapsed_ms:
            return f"rank {rank.rank} waited for a core for {time.queued_ms / time.elapsed_ms:.0%} of the time"
        if around is not None:
            cores = max(cores, around.cores)
            by_host[rank.host] = by_host.get(rank.host, 0.0) + around.threads * time.on_core_ms / time.elapsed_ms
    if cores and max(by_host.values(), default=0.0) > MOST_OF_CORES * cores:
        return "the ranks use most of the cores for computation, so the reduction takes cores from backward"
    return "" if is_known else "the job was too short to measure how many cores the ranks use"
