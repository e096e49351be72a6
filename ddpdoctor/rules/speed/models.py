"""The DDP models of a job, each with what its ranks recorded of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    from ddpdoctor.model.facts import ModelSeen
    from ddpdoctor.model.gradient_times import GradientTimes

    from .state import SpeedState

    Value = TypeVar("Value")

FRAMEWORKS = ("lightning", "transformers", "accelerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedModel:
    """One DDP model on the ranks that reduce it together."""

    group: str
    times: Mapping[int, GradientTimes]
    """By rank."""


def reduced_models(state: SpeedState) -> list[ReducedModel]:
    """Return the models by group, in the order of their first reductions."""
    found: dict[tuple[str, int], dict[int, GradientTimes]] = {}
    for rank in state.ranks:
        for times in rank.gradient_times:
            found.setdefault((times.group, times.number), {})[rank.rank] = times
    return [ReducedModel(group=group, times=times) for (group, _), times in sorted(found.items())]


def built_at(state: SpeedState, model: ReducedModel) -> tuple[Place, ...]:
    """Return where each rank built the model, if it built only one in that group."""
    sites = {rank: [seen for seen in state.rank(rank).models if seen.group == model.group] for rank in model.times}
    return tuple(place for rank, seen in sites.items() if len(seen) == 1 for place in _place(rank, seen[0]))


def _place(rank: int, seen: ModelSeen) -> tuple[Place, ...]:
    site = seen.site
    return () if site is None else (Place(rank=rank, file=site.file, line=site.line, function=site.function),)


def knob(state: SpeedState, knobs: Mapping[str, str]) -> str:
    """Return the setting of the framework in use; ``knobs`` has one by framework, and DDP's own under ""."""
    loaded = {name for rank in state.ranks if rank.speed and rank.speed.surroundings
              for name in rank.speed.surroundings.frameworks}  # fmt: skip
    return next((knobs[name] for name in FRAMEWORKS if name in loaded and name in knobs), knobs[""])
