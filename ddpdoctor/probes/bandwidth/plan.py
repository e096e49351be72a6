"""The cases of a bench by nccl-tests' conventions, and the time each may take of the budget. Pure, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, product
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Case, Collective, LeftOut, Mode
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.bandwidth import BenchSettings

    Curve = tuple[Collective, str]

# Bytes per element, by torch's name. Gloo and NCCL can both send and reduce these, in torch 2.6 and 2.13. They cannot
# do so for int16, float8 and wider unsigned types. Sums of bool and of complex numbers are a different operation.
DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
FLOATS = ("float64", "float32", "float16", "bfloat16")
EXACT_REDOPS = ("sum", "prod", "min", "max")
REDOPS = (*EXACT_REDOPS, "avg")
BACKENDS = ("gloo", "nccl")
# https://github.com/pytorch/pytorch/pull/149781; torch 2.6 says "Cannot use ReduceOp.AVG with Gloo".
GLOO_AVERAGES_SINCE = (2, 8)
# Each rank's share of a buffer is a multiple of this, as in nccl-tests (its ``-(16/eltSize)`` masks).
ALIGNMENT_BYTES = 16
# Collectives whose buffer is divided among the ranks.
SHARED = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL})
# torch.distributed uses one buffer for these, as input and output.
ALWAYS_IN_PLACE = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE})
# nccl-tests does not check these in place either: it prints N/A.
NEVER_IN_PLACE = frozenset({Collective.ALL_TO_ALL, Collective.SEND_RECV})
# Our choice: the least number of timed calls per case in latency mode, even without time for them. With five, the range
# is a 94 % confidence interval of the median.
LEAST_CALLS = 5
# Our choice: with 400 calls the median lies between the 180th and the 221st. Other sizes need the time more.
MOST_CALLS = 400
LEAST_BATCHES = 3
# Our choice: the most batches per case in throughput mode. More time makes longer batches instead of more.
MOST_BATCHES = 30
LEAST_BATCH_S = 0.005
# Our choice: a batch lasts ``LEAST_BATCH_S`` or has this many calls. Then waking up tens of us late hardly shows.
MOST_BATCH_CALLS = 100
# Our choice: predictions are multiplied by this, because calls slow down when buffers no longer fit a cache.
CAUTION = 1.25
# Our choice: the algorithm bandwidth assumed until times grow with the size. Gloo's is that of two ranks on two shared
# cores, NCCL's is less than one fast network card gives.
FIRST_GUESS_GB_S = {"gloo": 1.0, "nccl": 5.0}
REST_CALLS = 8  # our choice: the rest of a step (memory, check, first calls, warm-up) takes as long as this many calls
GROWN = 2.0
# Our choice: times count as growing with the size once they are ``GROWN`` times that of the smallest size, or longer
# than ``LATENCY_S`` per call. On a busy machine, waking a thread takes some milliseconds.
LATENCY_S = 0.01
MULTIPLES = (4, 2, 1)  # all sizes get the first of these multiples of the least number of calls that fits the budget


def list_cases(settings: BenchSettings, world_size: int) -> tuple[Case, ...]:
    """Return the cases to measure, each once, small sizes first. Sizes are rounded for equal shares of the ranks.

    The settings must satisfy 0 < ``min_size_bytes`` <= ``max_size_bytes`` and have a factor above 1.
    """
    sizes = list_sizes(settings.min_size_bytes, settings.max_size_bytes, settings.factor)
    wanted = product(sizes, settings.collectives, settings.dtypes, settings.modes)
    cases = (
        Case(
            collective=collective, dtype=dtype, redop=settings.redop if collective.reduces else None, mode=mode,
            in_place=is_in_place(collective, asked=settings.in_place),
            size_bytes=(rounded := round_size(collective, size, DTYPES[dtype], world_size)),
            count=rounded // DTYPES[dtype],
        )
        for size, collective, dtype, mode in wanted
        if _has_partner(collective, world_size)
    )  # fmt: skip
    return tuple(dict.fromkeys(cases))


def list_impossible(settings: BenchSettings, world_size: int) -> tuple[LeftOut, ...]:
    sizes = tuple(list_sizes(settings.min_size_bytes, settings.max_size_bytes, settings.factor))
    reason = "it needs two ranks, but there is one"
    return tuple(
        LeftOut(collective=collective, dtype=dtype, mode=None, sizes_bytes=sizes, reason=reason)
        for collective, dtype in product(settings.collectives, settings.dtypes)
        if not _has_partner(collective, world_size)
    )


def _has_partner(collective: Collective, world_size: int) -> bool:
    # Gloo refuses to send to its own rank.
    return collective is not Collective.SEND_RECV or world_size > 1


def list_sizes(min_bytes: int, max_bytes: int, factor: int) -> Iterator[int]:
    """Yield ``min_bytes``, ``factor`` times that, and so on, and always ``max_bytes``."""
    size = min_bytes
    while size < max_bytes:
        yield size
        size *= factor
    yield max_bytes


def round_size(collective: Collective, size_bytes: int, element_bytes: int, world_size: int) -> int:
    """Return the size really used, rounded down to whole elements or equal aligned shares, but never to 0."""
    if collective not in SHARED:
        return max(element_bytes, size_bytes - size_bytes % element_bytes)
    share = size_bytes // world_size
    return max(ALIGNMENT_BYTES, share - share % ALIGNMENT_BYTES) * world_size


def is_in_place(collective: Collective, *, asked: bool) -> bool:
    """Return whether input and output share memory. torch.distributed has only one form of some collectives."""
    return collective in ALWAYS_IN_PLACE or (asked and collective not in NEVER_IN_PLACE)


def check_possible(settings: BenchSettings) -> None:
    """Raise ``UserError`` if the backend cannot reduce a dtype with the operator."""
    backend, redop = settings.backend, settings.redop
    for dtype in settings.dtypes if any(collective.reduces for collective in settings.collectives) else ():
        if not reducible(backend, dtype, redop):
            raise UserError(f"{backend} cannot reduce {dtype} with {redop}", help=possible(backend))


def reducible(backend: str, dtype: str, redop: str, torch: str | None = None) -> bool:
    """Return whether the backend can reduce this. ``torch`` is torch's version, None for the installed one."""
    # Whole numbers cannot be averaged: Gloo refuses, and NCCL cuts off the fraction.
    known = backend in BACKENDS and dtype in DTYPES and redop in REDOPS
    return known and (redop != "avg" or (dtype in FLOATS and _averages(backend, torch)))


def possible(backend: str, torch: str | None = None) -> str:
    if backend not in BACKENDS:
        return f"Backends are {_name_list(BACKENDS)}."
    text = f"{backend} can reduce {_name_list(tuple(DTYPES))} by {_name_list(EXACT_REDOPS)}"
    if _averages(backend, torch):
        return f"{text}, and {_name_list(FLOATS)} by avg."
    return f"{text}; by avg from torch {'.'.join(map(str, GLOO_AVERAGES_SINCE))} on."


def _averages(backend: str, torch: str | None) -> bool:
    if backend != "gloo":
        return True
    try:
        found = re.match(r"(\d+)\.(\d+)", torch or version("torch"))  # an import would take seconds
    except PackageNotFoundError:
        return True
    return found is None or (int(found[1]), int(found[2])) >= GLOO_AVERAGES_SINCE


def _name_list(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


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
        return self.cases[0].size_bytes


@dataclass(slots=True)
class Growth:
    """Predicts how a time grows with the size, from the smallest size and the last one measured."""

    calls: int  # how many calls the time covers
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
        self.iterations = iterations
        self._guess_gb_s = FIRST_GUESS_GB_S[backend]
        self._times: dict[tuple[Curve, Mode | None], Growth] = {}

    def see(self, step: Step, mode: Mode | None, seconds: float) -> None:
        """Record the time of a call with its barrier; without a mode of memory, check, first calls and warm-up."""
        growth = Growth(REST_CALLS if mode is None else 1, self._guess_gb_s)
        self._times.setdefault((step.curve, mode), growth).see(step.size_bytes, seconds)

    def knows(self, step: Step) -> bool:
        return (step.curve, None) in self._times

    def predict(self, step: Step, mode: Mode | None = None) -> float:
        """Predict what ``see`` records; 0 before any measurement."""
        growth = self._times.get((step.curve, mode))
        return 0.0 if growth is None else growth.predict(step.size_bytes)

    def timed_s(self, step: Step, mode: Mode, multiple: int) -> float:
        """Predict the time of ``multiple`` times the least number of timed calls."""
        call_s = self.predict(step, mode)
        if self.iterations is not None:
            return self.iterations * call_s
        if mode is Mode.LATENCY:
            return multiple * LEAST_CALLS * call_s
        return multiple * LEAST_BATCHES * max(LEAST_BATCH_S, call_s)

    def least_s(self, step: Step, multiple: int) -> float:
        """Predict the time of a whole step with ``multiple`` times the least number of calls."""
        return self.predict(step) + sum(self.timed_s(step, case.mode, multiple) for case in step.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlot:
    """The time that the next step may take."""

    seconds: dict[Mode, float]  # time for the timed calls of each mode
    left_s: float | None  # the expected time of this and all later steps, or None if unknown


def share_out(steps: Sequence[Step], forecast: Forecast, left_s: float) -> TimeSlot | None:
    """Return the time for the first of the remaining steps, or None if not enough is left."""
    # Smaller sizes get the least number of calls first. The remaining time is divided equally.
    fits = (multiple for multiple in MULTIPLES if sum(forecast.least_s(step, multiple) for step in steps) <= left_s)
    multiple, fitting = next(fits, 0), steps
    if not multiple:
        multiple = 1
        until = accumulate(forecast.least_s(step, 1) for step in steps)
        fitting = steps[: next((place for place, needed_s in enumerate(until) if needed_s > left_s), len(steps))]
    if not fitting:
        return None
    needed_s = sum(forecast.least_s(step, multiple) for step in fitting)
    cases = [(step, case.mode) for step in fitting for case in step.cases]
    extra_s = 0.0 if forecast.iterations is not None else (left_s - needed_s) / len(cases)
    first = fitting[0]
    taken_s = needed_s + sum(min(extra_s, MOST_CALLS * forecast.predict(step, mode)) for step, mode in cases)
    return TimeSlot(
        seconds={case.mode: forecast.timed_s(first, case.mode, multiple) + extra_s for case in first.cases},
        left_s=taken_s if all(map(forecast.knows, fitting)) else None,
    )
