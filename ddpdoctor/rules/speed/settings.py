"""What the speed of a job depends on, as it was set: batch, threads, loader workers, and the options of DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.speed import SpeedSettings

from .models import reduced_models
from .steps import mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Rank

    from .state import SpeedState

    Value = TypeVar("Value")


def settings_of(state: SpeedState) -> SpeedSettings:
    """Return the settings of a job. Those of DDP are known if it has one DDP model."""
    models = reduced_models(state)
    ddp = list(models[0].times.values()) if len(models) == 1 else []
    around = [rank.speed.surroundings for rank in state.ranks if rank.speed and rank.speed.surroundings]
    rows = mean([mean(one.input_rows) for one in state.steps.ranks.values()])
    return SpeedSettings(
        rows=rows or None,
        reductions=_common(mean(one.reductions) for one in state.steps.ranks.values()),
        threads=_common(one.threads for one in around),
        cores=_common(one.cores for one in around),
        workers=_common(map(_workers, state.ranks)),
        gradient_bytes=_common(sum(one.bucket_bytes) for one in ddp),
        buckets=_common(len(one.bucket_bytes) for one in ddp),
        bucket_cap_bytes=_common(one.cap_bytes for one in ddp),
        finds_unused=_common(one.finds_unused for one in ddp),
        static_graph=_common(one.static_graph for one in ddp),
        bucket_view=_common(one.bucket_view for one in ddp),
        syncs_buffers=_common(one.syncs_buffers for one in ddp),
    )


def _workers(rank: Rank) -> int | None:
    """Return the workers of the loader that the rank trained with most."""
    loader = max(rank.loaders or (), key=lambda one: one.trained_batches, default=None)
    return None if loader is None else loader.workers


def _common(values: Iterable[Value | None]) -> Value | None:
    """Return the value that all ranks have, or None."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
