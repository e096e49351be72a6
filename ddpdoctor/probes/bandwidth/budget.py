"""Divides the time budget: predicts what each size takes, which sizes fit, and how long each case is timed. Pure.

Sizes are measured from small to large, and each predicts the later ones. Ranks with the same input decide the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Mode
from ddpdoctor.probes.bandwidth.timing import LEAST_BATCH_S, LEAST_BATCHES, LEAST_CALLS, MOST_CALLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Case, Collective

    Curve = tuple[Collective, str]

CAUTION = 1.25
"""Our choice: predictions are multiplied by this, because calls slow down when buffers no longer fit a cache."""
FIRST_GUESS_GB_S = {"gloo": 1.0, "nccl": 5.0}
"""Our choice: the algorithm bandwidth assumed until times grow with the size. Gloo's is that of two ranks on two shared
cores, NCCL's is less than one fast network card gives."""
REST_CALLS = 8
"""Our choice: the rest of a step (memory, check, first calls, warm-up) takes as long as this many calls."""
GROWN = 2.0
LATENCY_S = 0.01
"""Our choice: times count as growing with the size once they are ``GROWN`` times that of the smallest size, or longer
than ``LATENCY_S`` per call. On a busy machine, waking a thread takes some milliseconds."""
MULTIPLES = (4, 2, 1)
"""All sizes get the first of these multiples of the least number of calls that fits the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective, dtype and size. It is checked once, then measured in each mode."""

    cases: tuple[Case, ...]

    @property
    def curve(self) -> Curve:
        """The collective and dtype, which steps of other sizes share."""
        return self.cases[0].collective, self.cases[0].dtype

    @property
    def size_bytes(self) -> int:
        """The size of the buffer."""
        return self.cases[0].size_bytes


@dataclass(slots=True)
class Growth:
    """Predicts how a time grows with the size, from the smallest size and the last one measured."""

    calls: int
    """How many calls the time covers."""
    guess_gb_s: float
    first_s: float | None = None
    last_s: float = 0.0
    last_bytes: int = 0

    def see(self, size_bytes: int, seconds: float) -> None:
        """Record the time of a size. Sizes must come in ascending order."""
        self.first_s = seconds if self.first_s is None else self.first_s
        self.last_s, self.last_bytes = seconds, size_bytes

    def predict(self, size_bytes: int) -> float:
        """Return the longest time a larger size should take, or 0 before any measurement."""
        if self.first_s is None:
            return 0.0
        slope = self.last_s / self.last_bytes
        if self.last_s < min(GROWN * self.first_s, LATENCY_S * self.calls):
            slope = min(slope, self.calls / (self.guess_gb_s * 1e9))
        return CAUTION * (self.last_s + slope * (size_bytes - self.last_bytes))


class Forecast:
    """The measured times of all curves, and predictions for later steps."""

    def __init__(self, backend: str, iterations: int | None) -> None:
        """Start without measurements. ``iterations`` is the user's number of timed calls per case, if any."""
        self.iterations = iterations
        guess = FIRST_GUESS_GB_S[backend]
        self._calls: dict[tuple[Curve, Mode], Growth] = defaultdict(lambda: Growth(1, guess))
        self._rests: dict[Curve, Growth] = defaultdict(lambda: Growth(REST_CALLS, guess))

    def see_call(self, step: Step, mode: Mode, seconds: float) -> None:
        """Record the time of a timed call, including its barrier."""
        self._calls[step.curve, mode].see(step.size_bytes, seconds)

    def see_rest(self, step: Step, seconds: float) -> None:
        """Record the time of the rest of a step: memory, check, first calls, warm-up."""
        self._rests[step.curve].see(step.size_bytes, seconds)

    def knows(self, step: Step) -> bool:
        """Return whether a smaller size of the curve was measured."""
        return step.curve in self._rests

    def call_s(self, step: Step, mode: Mode) -> float:
        """Predict the time of a timed call; 0 before any measurement."""
        return self._calls[step.curve, mode].predict(step.size_bytes)

    def rest_s(self, step: Step) -> float:
        """Predict the time of the rest of a step; 0 before any measurement."""
        return self._rests[step.curve].predict(step.size_bytes) if self.knows(step) else 0.0

    def timed_s(self, step: Step, mode: Mode, multiple: int) -> float:
        """Predict the time of ``multiple`` times the least number of timed calls."""
        call_s = self.call_s(step, mode)
        if self.iterations is not None:
            return self.iterations * call_s
        if mode is Mode.LATENCY:
            return multiple * LEAST_CALLS * call_s
        return multiple * LEAST_BATCHES * max(LEAST_BATCH_S, call_s)

    def least_s(self, step: Step, multiple: int) -> float:
        """Predict the time of a whole step with ``multiple`` times the least number of calls."""
        return self.rest_s(step) + sum(self.timed_s(step, case.mode, multiple) for case in step.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlot:
    """The time that the next step may take."""

    seconds: dict[Mode, float]
    """Time for the timed calls of each mode."""
    left_s: float | None
    """The expected time of this and all later steps, or None if unknown."""


def share_out(steps: Sequence[Step], forecast: Forecast, left_s: float) -> TimeSlot | None:
    """Return what the first of the remaining steps may take, or None if there is no time for it.

    Smaller sizes get the least number of calls first. The remaining time is divided equally.
    """
    multiple, fitting = _fit(steps, forecast, left_s)
    if not fitting:
        return None
    needed_s = sum(forecast.least_s(step, multiple) for step in fitting)
    cases = [(step, case.mode) for step in fitting for case in step.cases]
    extra_s = 0.0 if forecast.iterations is not None else (left_s - needed_s) / len(cases)
    first = fitting[0]
    taken_s = needed_s + sum(min(extra_s, MOST_CALLS * forecast.call_s(step, mode)) for step, mode in cases)
    return TimeSlot(
        seconds={case.mode: forecast.timed_s(first, case.mode, multiple) + extra_s for case in first.cases},
        left_s=taken_s if all(map(forecast.knows, fitting)) else None,
    )


def _fit(steps: Sequence[Step], forecast: Forecast, left_s: float) -> tuple[int, Sequence[Step]]:
    """Return which multiple of the least number of calls fits, and for which steps."""
    for multiple in MULTIPLES:
        if sum(forecast.least_s(step, multiple) for step in steps) <= left_s:
            return multiple, steps
    needed_s = 0.0
    for place, step in enumerate(steps):
        needed_s += forecast.least_s(step, 1)
        if needed_s > left_s:
            return 1, steps[:place]
    return 1, steps
