"""Shares out the time: what each size will take, which sizes there is time for, how long each case may be timed. Pure.

Sizes are measured from small to large, and each predicts those to come. Ranks that are handed the same figures come to
the same decisions.
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
"""What is predicted is taken to be so much longer: ours; calls get slower than in proportion where a cache ends."""
FIRST_GUESS_GB_S = {"gloo": 1.0, "nccl": 5.0}
"""Algorithm bandwidth that is reckoned with as long as times do not grow with the size: ours; what two ranks on two
shared cores have, and less than one fast network card gives."""
REST_CALLS = 8
"""All else at a size, that is memory, the check, first calls and warm-up, takes as long as so many calls: ours."""
GROWN = 2.0
LATENCY_S = 0.01
"""Times grow with the size once they are so many times those of the smallest size, or too long to be latency alone:
ours; a thread that is woken on a busy machine takes some milliseconds."""
MULTIPLES = (4, 2, 1)
"""All sizes get so many times the least number of calls, where there is time for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective, dtype and size: checked once, then measured in each mode."""

    cases: tuple[Case, ...]

    @property
    def curve(self) -> Curve:
        """What it has in common with the steps of other sizes."""
        return self.cases[0].collective, self.cases[0].dtype

    @property
    def size_bytes(self) -> int:
        """Of the buffer."""
        return self.cases[0].size_bytes


@dataclass(slots=True)
class Growth:
    """How a time grows with the size, from what was seen at the smallest size and at the last."""

    calls: int
    """How many calls it is the time of."""
    guess_gb_s: float
    first_s: float | None = None
    last_s: float = 0.0
    last_bytes: int = 0

    def see(self, size_bytes: int, seconds: float) -> None:
        """Take in what a size took; sizes come in ascending order."""
        self.first_s = seconds if self.first_s is None else self.first_s
        self.last_s, self.last_bytes = seconds, size_bytes

    def predict(self, size_bytes: int) -> float:
        """Return what a larger size will take at most; 0 where nothing was seen yet."""
        if self.first_s is None:
            return 0.0
        slope = self.last_s / self.last_bytes
        if self.last_s < min(GROWN * self.first_s, LATENCY_S * self.calls):
            slope = min(slope, self.calls / (self.guess_gb_s * 1e9))
        return CAUTION * (self.last_s + slope * (size_bytes - self.last_bytes))


class Forecast:
    """What was seen of all curves, and what it says of steps to come."""

    def __init__(self, backend: str, iterations: int | None) -> None:
        """Know nothing yet; ``iterations`` are the timed calls a case that the user wants, if any."""
        self.iterations = iterations
        guess = FIRST_GUESS_GB_S[backend]
        self._calls: dict[tuple[Curve, Mode], Growth] = defaultdict(lambda: Growth(1, guess))
        self._rests: dict[Curve, Growth] = defaultdict(lambda: Growth(REST_CALLS, guess))

    def see_call(self, step: Step, mode: Mode, seconds: float) -> None:
        """Take in what a timed call took, its barrier included."""
        self._calls[step.curve, mode].see(step.size_bytes, seconds)

    def see_rest(self, step: Step, seconds: float) -> None:
        """Take in what all else of a step took: memory, check, first calls, warm-up."""
        self._rests[step.curve].see(step.size_bytes, seconds)

    def knows(self, step: Step) -> bool:
        """Say whether a smaller size of the curve was seen."""
        return step.curve in self._rests

    def call_s(self, step: Step, mode: Mode) -> float:
        """Return what a timed call will take; 0 before anything is known."""
        return self._calls[step.curve, mode].predict(step.size_bytes)

    def rest_s(self, step: Step) -> float:
        """Return what all else will take."""
        return self._rests[step.curve].predict(step.size_bytes) if self.knows(step) else 0.0

    def timed_s(self, step: Step, mode: Mode, multiple: int) -> float:
        """Return what the least number of timed calls will take, or a multiple of it."""
        call_s = self.call_s(step, mode)
        if self.iterations is not None:
            return self.iterations * call_s
        if mode is Mode.LATENCY:
            return multiple * LEAST_CALLS * call_s
        return multiple * LEAST_BATCHES * max(LEAST_BATCH_S, call_s)

    def least_s(self, step: Step, multiple: int) -> float:
        """Return what a step will take with so many calls."""
        return self.rest_s(step) + sum(self.timed_s(step, case.mode, multiple) for case in step.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What the step to come may take."""

    seconds: dict[Mode, float]
    """For the timed calls of each mode."""
    left_s: float | None
    """What it and all later steps are expected to take; None where that is not known."""


def share_out(steps: Sequence[Step], forecast: Forecast, left_s: float) -> Slot | None:
    """Return what the first of the steps may take, of all that are left, or None where there is no time for it.

    Smaller sizes have the first claim to the least number of calls. What remains is shared equally.
    """
    multiple, fitting = _fit(steps, forecast, left_s)
    if not fitting:
        return None
    needed_s = sum(forecast.least_s(step, multiple) for step in fitting)
    cases = [(step, case.mode) for step in fitting for case in step.cases]
    extra_s = 0.0 if forecast.iterations is not None else (left_s - needed_s) / len(cases)
    first = fitting[0]
    taken_s = needed_s + sum(min(extra_s, MOST_CALLS * forecast.call_s(step, mode)) for step, mode in cases)
    return Slot(
        seconds={case.mode: forecast.timed_s(first, case.mode, multiple) + extra_s for case in first.cases},
        left_s=taken_s if all(map(forecast.knows, fitting)) else None,
    )


def _fit(steps: Sequence[Step], forecast: Forecast, left_s: float) -> tuple[int, Sequence[Step]]:
    """Return the multiple of the least number of calls that there is time for, and the steps that it is for."""
    for multiple in MULTIPLES:
        if sum(forecast.least_s(step, multiple) for step in steps) <= left_s:
            return multiple, steps
    needed_s = 0.0
    for place, step in enumerate(steps):
        needed_s += forecast.least_s(step, 1)
        if needed_s > left_s:
            return 1, steps[:place]
    return 1, steps
