"""What the rules of speed are asked about: the steps of a job's ranks side by side, and its time budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import Unread, Why

from .budget import make_budget
from .device import align_devices
from .steps import MIN_STEPS, MIN_USABLE, align, largest_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.facts import Job, Rank
    from ddpdoctor.model.speed import Budget, Speed

    from .steps import JobSteps

ONE_IN = 20
"""On a GPU one step in so many is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedState:
    """A job whose speed is known."""

    job: Job
    ranks: tuple[Rank, ...]
    """The ranks that end their steps together. Each has a ``speed``."""
    steps: JobSteps
    budget: Budget
    longest: JobSteps | None = None
    """The same with the longest steps of the run, which stand for themselves only; None if ``steps`` has all steps."""
    total_ms: float = 0.0
    """The time of all steps of the run."""

    @property
    def frameworks(self) -> frozenset[str]:
        """The frameworks that train the model: lightning, transformers, accelerate."""
        known = (rank.speed.surroundings for rank in self.ranks if rank.speed is not None)
        return frozenset(name for one in known if one is not None for name in one.frameworks)

    def rank(self, number: int) -> Rank:
        """Return a rank by its number."""
        return next(rank for rank in self.ranks if rank.rank == number)

    def share(self, saved_ms: float) -> float:
        """Return what a saving in the mean step is as a share of the step."""
        return saved_ms / self.budget.wall_ms if self.budget.wall_ms else 0.0


def build_speed_state(job: Job) -> SpeedState | Unread:
    """Return what is known of a job's speed, or why nothing is."""
    speeds = largest_group(job.ranks)
    if not speeds:
        return Unread(why=Why.ABSENT, reason="no rank recorded the steps of a training loop")
    if any(speed.device is not None for speed in speeds.values()):
        return _on_devices(job, speeds)
    steps = align(speeds)
    if steps is None:
        return Unread(why=Why.ABSENT, reason=_too_few(max(speed.count for speed in speeds.values())))
    if not any(any(speed.kept.is_split) for speed in speeds.values()):
        return Unread(why=Why.ABSENT, reason="the time of gradient reduction was not measured")
    is_sample = any(speed.sample_bits for speed in speeds.values())
    return SpeedState(
        job=job,
        ranks=tuple(rank for rank in job.ranks if rank.rank in speeds),
        steps=steps,
        budget=make_budget(steps, speeds),
        longest=align(speeds, longest=True) if is_sample else None,
        total_ms=_total_ms(speeds),
    )


def _too_few(steps: int) -> str:
    if steps < MIN_STEPS:
        return f"{steps} steps are too few: at least {MIN_STEPS} are needed"
    return f"fewer than {MIN_USABLE} of {steps} steps are usable after dropping warm-up and ddpdoctor's own sampling"


def _on_devices(job: Job, speeds: Mapping[int, Speed]) -> SpeedState | Unread:
    steps = align_devices(speeds)
    if steps is None:
        reason = f"too few steps were measured on the GPUs: about {ONE_IN * MIN_USABLE} steps are needed"
        return Unread(why=Why.ABSENT, reason=reason)
    return SpeedState(
        job=job,
        ranks=tuple(rank for rank in job.ranks if rank.rank in speeds),
        steps=steps,
        budget=replace(make_budget(steps, speeds), is_device=True),
        total_ms=_total_ms(speeds),
    )


def _total_ms(speeds: Mapping[int, Speed]) -> float:
    return max((speed.totals["wall"].sum_ms for speed in speeds.values() if "wall" in speed.totals), default=0.0)
