"""Measures one case: the first call, a warm-up, then as many timed calls as the first rank has time for."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Measurement, Mode
from ddpdoctor.probes.bandwidth.buffers import make_sets, push_out
from ddpdoctor.probes.bandwidth.collectives import bus_factor, make_call
from ddpdoctor.probes.bandwidth.spans import time_batches, time_calls
from ddpdoctor.probes.bandwidth.spread import coefficient_of_variation, median_interval, quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.buffers import Buffers
    from ddpdoctor.probes.bandwidth.collectives import Call
    from ddpdoctor.probes.bandwidth.group import RankGroup
    from ddpdoctor.probes.bandwidth.spans import Spans

LEAST_CALLS = 5
"""Our choice: the least number of timed calls per case in latency mode, even without time for them. With five, the
range is a 94 % confidence interval of the median."""
MOST_CALLS = 400
"""Our choice: with 400 calls the median lies between the 180th and the 221st. Other sizes need the time more."""
LEAST_BATCHES = 3
MOST_BATCHES = 30
"""Our choice: the most batches per case in throughput mode. More time makes longer batches instead of more."""
LEAST_BATCH_S = 0.005
MOST_BATCH_CALLS = 100
"""Our choice: a batch lasts ``LEAST_BATCH_S`` or has this many calls. Then waking up tens of us late hardly shows."""
MOST_WARMUP = 5
WARMUP_SHARE = 0.1
SLOW_CALL_S = 0.1
"""Our choice: warm-up takes up to ``WARMUP_SHARE`` of a case's time and at least one call. Calls slower than
``SLOW_CALL_S`` may go without, because the extra work of their first call does not matter."""
FIRST_SHARE = 0.25
"""Our choice: this share of the planned calls is timed first, to find out how many calls there is really time for."""
CLOCKS_DIFFER = 0.1
SPAN_OVERHEAD_US = 100.0
"""Our choice: host clock and events may differ by a tenth, plus the time to launch a kernel and to notice its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure. If time decides, only the first rank's value counts."""

    warmup: int | None = None
    iterations: int | None = None
    """The number of timed calls, or None for as many as ``seconds`` allow."""
    seconds: float = 0.5
    """Time for the timed calls, including barriers. A few are made even if they take longer."""
    cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """The measurement of a case, the same on every rank."""

    measurement: Measurement
    waits_us: tuple[tuple[float, ...], ...]
    """The waits of ``Spans`` after ``even_out``: one row per rank, one value per call. Empty in throughput mode, which
    has no barrier before each call."""
    timed_s: float
    """How long all timed calls took on this rank, including barriers."""
    note: str = ""
    """What is unusual about the measurement, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPlan:
    """The number of batches, and of calls per batch. In latency mode every batch is one call."""

    batches: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """The times of all ranks, one row per rank."""

    first_us: tuple[float, ...]
    times_us: tuple[tuple[float, ...], ...]
    host_us: tuple[tuple[float, ...], ...]
    waits_us: tuple[tuple[float, ...], ...]


def measure(group: RankGroup, case: Case, effort: Effort, sets: Sequence[Buffers] = ()) -> TimedCase:
    """Measure a case. All ranks of the group call this at once and get the same result.

    ``sets`` are buffers for the case if they exist already. torch's errors propagate.
    """
    calls = cycle([make_call(group, case, one) for one in sets or make_sets(group, case, most_calls(effort))])
    if effort.cold:
        push_out(group.device)
    first = _run(group, case, calls, 1, 1)
    plan = plan_calls(case.mode, effort, _warm_up(group, case, calls, effort, first.host_us[0] / 1e6))
    plan = TimingPlan(batches=_agree(group, plan.batches), calls=_agree(group, plan.calls))
    began_s = time.monotonic()
    spans = _run_within(group, case, calls, effort, plan)
    timed_s = time.monotonic() - began_s
    timed = _gather(group, first, spans)
    measurement = summarize(case, timed.first_us, timed.times_us, plan.calls, group.size, warm=not effort.cold)
    return TimedCase(
        measurement=measurement,
        waits_us=even_out(timed.waits_us, timed.host_us) if case.mode is Mode.LATENCY else (),
        timed_s=timed_s,
        note=_compare_clocks(timed),
    )


def even_out(waits_us: Sequence[Sequence[float]], calls_us: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Add to each wait the time of the rank's previous call. One row per rank.

    A rank whose call ended early waits in the next barrier although the others are not late: over a slow link, data
    arrives a while after it was sent. What remains is the difference in what each rank does between calls.
    """
    return tuple(
        tuple(wait + before for wait, before in zip(waits, (0.0, *calls), strict=False))
        for waits, calls in zip(waits_us, calls_us, strict=True)
    )


def most_calls(effort: Effort) -> int:
    """Return how many buffers the calls need at most: one per call if buffers must be cold, else one."""
    if not effort.cold:
        return 1
    timed = effort.iterations or MOST_BATCHES * MOST_BATCH_CALLS
    return 1 + (MOST_WARMUP if effort.warmup is None else effort.warmup) + timed + MOST_BATCHES


def _warm_up(group: RankGroup, case: Case, calls: Iterator[Call], effort: Effort, first_s: float) -> float:
    """Make uncounted calls like the timed ones. Return the seconds per call, including its barrier if it has one."""
    count = effort.warmup
    if count is None:
        affordable = math.floor(WARMUP_SHARE * effort.seconds / max(first_s, 1e-9))
        count = max(first_s < SLOW_CALL_S, min(MOST_WARMUP, affordable))
    count = _agree(group, count)
    if count == 0:
        return first_s
    began_s = time.monotonic()
    if case.mode is Mode.LATENCY:
        _run(group, case, calls, count, 1)
        return (time.monotonic() - began_s) / count
    return _run(group, case, calls, 1, count).host_us[0] / count / 1e6


def plan_calls(mode: Mode, effort: Effort, each_s: float) -> TimingPlan:
    """Return how many calls to time if one takes ``each_s``. In throughput mode the number is rounded up."""
    each_s = max(each_s, 1e-9)
    affordable = math.floor(effort.seconds / each_s)
    if mode is Mode.LATENCY:
        return TimingPlan(batches=effort.iterations or max(LEAST_CALLS, min(MOST_CALLS, affordable)), calls=1)
    if effort.iterations is not None:
        calls = math.ceil(effort.iterations / MOST_BATCHES)
        return TimingPlan(batches=math.ceil(effort.iterations / calls), calls=calls)
    longest = max(math.ceil(LEAST_BATCH_S / each_s), min(affordable, MOST_CALLS) // MOST_BATCHES)
    calls = max(1, min(MOST_BATCH_CALLS, longest))
    return TimingPlan(batches=max(LEAST_BATCHES, min(MOST_BATCHES, affordable // calls)), calls=calls)


def _run_within(group: RankGroup, case: Case, calls: Iterator[Call], effort: Effort, plan: TimingPlan) -> Spans:
    """Time the calls of the plan. If time decides, time some first, then as many more as there is time for."""
    if effort.iterations is not None:
        return _run(group, case, calls, plan.batches, plan.calls)
    least, most = (LEAST_CALLS, MOST_CALLS) if case.mode is Mode.LATENCY else (LEAST_BATCHES, MOST_BATCHES)
    began_s = time.monotonic()
    count = max(least, math.ceil(FIRST_SHARE * plan.batches))
    spans = _run(group, case, calls, count, plan.calls)
    took_s = time.monotonic() - began_s
    affordable = math.floor((effort.seconds - took_s) / took_s * count)
    more = _agree(group, max(0, min(most - count, affordable)))
    return spans + _run(group, case, calls, more, plan.calls) if more else spans


def _run(group: RankGroup, case: Case, calls: Iterator[Call], batches: int, count: int) -> Spans:
    if case.mode is Mode.LATENCY:
        return time_calls(group, case.collective.value, calls, batches)
    return time_batches(group, case.collective.value, calls, batches, count)


def _agree(group: RankGroup, count: int) -> int:
    """Return the first rank's number. A rank that made another number of calls would wait forever."""
    return int(group.agree(count))


def _gather(group: RankGroup, first: Spans, spans: Spans) -> _Timed:
    count = len(spans.times_us)
    rows = group.gather([first.times_us[0], *spans.times_us, *spans.host_us, *spans.waits_us])
    return _Timed(
        first_us=tuple(row[0] for row in rows),
        times_us=tuple(tuple(row[1 : count + 1]) for row in rows),
        host_us=tuple(tuple(row[count + 1 : 2 * count + 1]) for row in rows),
        waits_us=tuple(tuple(row[2 * count + 1 :]) for row in rows),
    )


def summarize(
    case: Case,
    first_us: Sequence[float],
    times_us: Sequence[Sequence[float]],
    calls: int,
    size: int,
    *,
    warm: bool,
) -> Measurement:
    """Take the slowest rank of each iteration, then reduce over iterations. ``times_us`` has one row per rank."""
    slowest = [max(column) / calls for column in zip(*times_us, strict=True)]
    p50_us = statistics.median(slowest)
    low_us, high_us = median_interval(slowest)
    algbw_gb_s = case.size_bytes / p50_us / 1e3
    factor = bus_factor(case.collective, size)
    return Measurement(
        collective=case.collective,
        dtype=case.dtype,
        redop=case.redop,
        mode=case.mode,
        in_place=case.in_place,
        size_bytes=case.size_bytes,
        count=case.count,
        iterations=len(slowest) * calls,
        first_us=max(first_us),
        min_us=min(slowest),
        p50_us=p50_us,
        p95_us=quantile(slowest, 0.95),
        p50_low_us=low_us,
        p50_high_us=high_us,
        cv=coefficient_of_variation(slowest),
        algbw_gb_s=algbw_gb_s,
        busbw_gb_s=None if factor is None else algbw_gb_s * factor,
        warm=warm,
        wrong=None,
    )


def _compare_clocks(timed: _Timed) -> str:
    """Return a note if the device's clock and the host's disagree over all calls, which means one of them is wrong."""
    device_us = max(map(sum, timed.times_us))
    host_us = max(map(sum, timed.host_us))
    allowed_us = CLOCKS_DIFFER * host_us + SPAN_OVERHEAD_US * len(timed.times_us[0])
    if abs(host_us - device_us) <= allowed_us:
        return ""
    return f"the device's clock counted {device_us / 1e3:.3g} ms for all timed calls, the host's {host_us / 1e3:.3g} ms"
