"""The training steps that a rank recorded: how long their phases took, how much was waiting, and at which lines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


class Phase(IntEnum):
    """The parts of a step, in their order."""

    BEFORE = 0
    """Since the end of the step before: optimizer, data, host code."""
    FORWARD = 1
    BETWEEN = 2
    """From the end of forward to backward: the loss."""
    BACKWARD = 3
    """Backward, with the reduction of gradients where there is one."""


class StepEnd(str, Enum):
    """What ended the steps."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    REDUCTION = "reduction of gradients"
    OPTIMIZER = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The last steps of a rank as columns, oldest first, in microseconds. Forward is only seen of DDP models."""

    ends_with: StepEnd
    group: str
    """The group whose members end their steps together; empty for that of all ranks."""
    numbers: tuple[int, ...]
    """From 1. Steps of which it is not known how much was waiting are left out."""
    phases_us: tuple[tuple[int, ...], ...]
    """A column a phase."""
    waits_us: tuple[tuple[int, ...], ...]
    """How much of each phase was spent in collectives, a column a phase."""
    unknown: int = 0
    """How many steps were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSeen:
    """How often a rank's main thread was met at a line of the user's in a phase, outside collectives."""

    frame: Frame
    phase: Phase
    times: int
    in_child: bool
    """It was a child process of the rank, such as a DataLoader worker, whatever the rank itself did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """What the loader workers of a rank have done, all of them together."""

    batches: int
    making_ms: float
    """How long they were at it, summed over the workers."""
    pauses_ms: float
    """How long they waited for something to do. A single pause counts for no more than the batch after it took."""

    @property
    def busy_share(self) -> float:
        """How much of the time they were at work: near 1 where the rank gets batches no faster than they make them."""
        return self.making_ms / (self.making_ms + self.pauses_ms) if self.making_ms else 0.0

    @property
    def batch_ms(self) -> float:
        """How long one of them takes to make a batch."""
        return self.making_ms / self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A rank's usual step, in milliseconds: medians of what its steps took."""

    steps: int
    step_ms: float
    busy_ms: tuple[float, ...]
    """By phase, without waiting."""
    waited_ms: float


def step_totals(times: StepTimes) -> tuple[int, ...]:
    """Return how long each step took, in microseconds."""
    return tuple(map(sum, zip(*times.phases_us, strict=True)))


def wait_totals(times: StepTimes) -> tuple[int, ...]:
    """Return how long the rank waited for others in each step, in microseconds."""
    return tuple(map(sum, zip(*times.waits_us, strict=True)))


def pace_of(times: StepTimes) -> Pace | None:
    """Return a rank's usual step; None where it has no whole step."""
    if not times.numbers:
        return None
    busy = [
        median(max(0, spent - waited) for spent, waited in zip(*columns, strict=True))
        for columns in zip(times.phases_us, times.waits_us, strict=True)
    ]
    return Pace(
        steps=len(times.numbers),
        step_ms=median(step_totals(times)) / 1e3,
        busy_ms=tuple(value / 1e3 for value in busy),
        waited_ms=median(wait_totals(times)) / 1e3,
    )
