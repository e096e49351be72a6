"""The training steps that a rank recorded: the duration of their phases, the waits in them, and the lines seen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.stacks import Frame


class Phase(IntEnum):
    """The parts of a step, in their order."""

    BEFORE = 0
    """From the end of the previous step to forward: optimizer, data, host code."""
    FORWARD = 1
    BETWEEN = 2
    """From the end of forward to backward: the loss."""
    BACKWARD = 3
    """Backward, including the reduction of gradients if there is one."""


class StepEnd(str, Enum):
    """The event that ends a step."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    REDUCTION = "reduction of gradients"
    OPTIMIZER = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The last steps of a rank as columns, oldest first, in microseconds. Forward is recorded only for DDP models."""

    ends_with: StepEnd
    group: str
    """The group whose members end their steps together; empty for the group of all ranks."""
    numbers: Sequence[int]
    """From 1. Steps whose waiting time is unknown are left out."""
    phases_us: Sequence[Sequence[int]]
    """One column per phase."""
    waits_us: Sequence[Sequence[int]]
    """The time of each phase spent in collectives, one column per phase."""
    ended_ns: Sequence[int] = ()
    """When each step ended, by the clock of the recorded calls; empty if not known."""
    unknown: int = 0
    """How many steps were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSeen:
    """How often a rank's main thread was sampled at a user's line in a phase, outside collectives."""

    frame: Frame
    phase: Phase
    times: int
    in_child: bool
    """The sample is from a child process of the rank, such as a DataLoader worker."""
    calls_module: bool = False
    """It was not the innermost of the user's lines, but the one that called the model or library in which that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """The work of all loader workers of a rank together."""

    batches: int
    making_ms: float
    """Time they took to make batches, summed over the workers."""
    pauses_ms: float
    """Time they waited for work. A single pause counts at most as long as making the next batch."""
    cpu_ms: float = 0.0
    """Processor time of making batches."""
    workers: int | None = None
    """Workers that a loader has at a time; None if that is not known."""

    @property
    def busy_share(self) -> float:
        """The share of time that they worked. It is near 1 if they limit how fast the rank gets batches."""
        return self.making_ms / (self.making_ms + self.pauses_ms) if self.making_ms else 0.0

    @property
    def cpu_share(self) -> float:
        """The share of making a batch that takes a processor. The rest waits, as for files."""
        return min(1.0, self.cpu_ms / self.making_ms) if self.making_ms else 0.0

    @property
    def batch_ms(self) -> float:
        """The time that one worker takes to make a batch."""
        return self.making_ms / self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A rank's usual step: the medians over its steps, in milliseconds."""

    steps: int
    step_ms: float
    busy_ms: tuple[float, ...]
    """One value per phase, without waiting."""
    waited_ms: float


RECENT_STEPS = 20
"""How many of the last steps count for a rank's pace right now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentPace:
    """A rank's pace over its last steps."""

    number: int
    """Number of the last step."""
    ended_ns: int
    """When it ended."""
    step_ms: float
    """From the end of one step to the end of the next, on average."""
    waits_share: float
    """The share of these steps in which the rank waited for others: 0 to 1."""


def recent_pace(times: StepTimes) -> RecentPace | None:
    """Return a rank's pace over its last steps, or None if there is none whose end is known.

    Steps may be missing in between, so the time is divided by the difference of their numbers.
    """
    if not times.numbers or not times.ended_ns:
        return None
    numbers, ended_ns = times.numbers[-RECENT_STEPS:], times.ended_ns[-RECENT_STEPS:]
    totals, waits = step_totals(times)[-RECENT_STEPS:], wait_totals(times)[-RECENT_STEPS:]
    steps = numbers[-1] - numbers[0]
    step_ms = (ended_ns[-1] - ended_ns[0]) / steps / 1e6 if steps else totals[-1] / 1e3
    return RecentPace(
        number=numbers[-1],
        ended_ns=ended_ns[-1],
        step_ms=step_ms,
        waits_share=min(1.0, sum(waits) / sum(totals)) if sum(totals) else 0.0,
    )


def step_totals(times: StepTimes) -> tuple[int, ...]:
    """Return how long each step took, in microseconds."""
    return tuple(map(sum, zip(*times.phases_us, strict=True)))


def wait_totals(times: StepTimes) -> tuple[int, ...]:
    """Return how long the rank waited for others in each step, in microseconds."""
    return tuple(map(sum, zip(*times.waits_us, strict=True)))


def pace_of(times: StepTimes) -> Pace | None:
    """Return a rank's usual step, or None if it has no complete step."""
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
