"""Measures one case: the first call, a warm-up, then as many timed calls as the first rank has time for."""

from __future__ import annotations

import math
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpdoctor.model.bandwidth import Arrival, Bench, Measurement, Mode
from ddpdoctor.model.reading import no_collection
from ddpdoctor.probes.bandwidth import plan
from ddpdoctor.probes.bandwidth.collectives import COLD_FACTOR, RankGroup, bus_factor, cache_bytes, make_call, make_sets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.bandwidth import BenchSettings, Case, LeftOut, Member, NcclLog, NodeResult, Pair, Stop, Wrong
    from ddpdoctor.probes.bandwidth.collectives import Buffers, Call

MOST_WARMUP = 5
WARMUP_SHARE = 0.1
# Our choice: warm-up takes up to ``WARMUP_SHARE`` of a case's time and at least one call. Calls slower than
# ``SLOW_CALL_S`` may go without, because the extra work of their first call does not matter.
SLOW_CALL_S = 0.1
# Our choice: this share of the planned calls is timed first, to find out how many calls there is really time for.
FIRST_SHARE = 0.25
CLOCKS_DIFFER = 0.1
# Our choice: host clock and events may differ by a tenth, plus the time to launch a kernel and to notice its end.
SPAN_OVERHEAD_US = 100.0
MOST_KEPT = 200  # Our choice: calls kept per case. Enough for a median, and small even with a thousand ranks.
Z = 1.96  # 95 % of a normal distribution lie within this many standard deviations


@dataclass(slots=True)
class ResultLog:
    """The results on one rank. All ranks keep them, because any rank may have to report. Unseen parts are empty."""

    # Each append or assignment is atomic, so a snapshot may lack the last change but is never corrupt.

    settings: BenchSettings
    members: tuple[Member, ...]
    results: list[Measurement] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    arrivals: tuple[Arrival, ...] = ()
    pairs: list[Pair] = field(default_factory=list)
    nodes: list[NodeResult] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    nccl_logs: tuple[NcclLog, ...] = ()
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def hosts(self) -> list[str]:
        return [member.host for member in self.members]

    def note(self, text: str) -> None:
        """Add a note for the reader, unless it is there already."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def bench(self, stop: Stop | None = None) -> Bench:
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "_lock"}
        parts |= {name: tuple(part) for name, part in parts.items() if isinstance(part, list)}
        return Bench(**parts, stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure. If time decides, only the first rank's value counts."""

    warmup: int | None = None
    iterations: int | None = None  # the number of timed calls, or None for as many as ``seconds`` allow
    seconds: float = 0.5  # Time for the timed calls, including barriers. A few are made even if they take longer.
    cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """The measurement of a case, the same on every rank."""

    measurement: Measurement
    # The waits of ``Spans`` after ``even_out``: one row per rank, one value per call. Empty in throughput mode, which
    # has no barrier before each call.
    waits_us: tuple[tuple[float, ...], ...]
    timed_s: float  # how long all timed calls took on this rank, including barriers
    note: str = ""  # what is unusual about the measurement, as a clause


def measure(group: RankGroup, case: Case, effort: Effort, sets: Sequence[Buffers] = ()) -> TimedCase:
    """Measure a case on all ranks together, with one result. ``sets`` are its buffers if they already exist."""
    made = cycle([make_call(group, case, buffers) for buffers in sets or make_sets(group, case, most_calls(effort))])
    if effort.cold:  # evict the buffers, by writing more than the cache holds
        torch.empty(COLD_FACTOR * cache_bytes(group.device), dtype=torch.uint8, device=group.device).fill_(1)
    first = _run_case(group, case, made, 1, 1)
    planned = plan_calls(case.mode, effort, _warm_up(group, case, made, effort, first.host_us[0] / 1e6))
    # A rank that made another number of calls than the first one would wait forever.
    batches, calls = (int(group.agree(number)) for number in planned)
    is_latency, began_s = case.mode is Mode.LATENCY, time.monotonic()
    if effort.iterations is not None:
        spans = _run_case(group, case, made, batches, calls)
    else:  # time some first, then as many more as there is time for
        least, most = (plan.LEAST_CALLS, plan.MOST_CALLS) if is_latency else (plan.LEAST_BATCHES, plan.MOST_BATCHES)
        count = max(least, math.ceil(FIRST_SHARE * batches))
        spans = _run_case(group, case, made, count, calls)
        took_s = time.monotonic() - began_s
        affordable = math.floor((effort.seconds - took_s) / took_s * count)
        if more := int(group.agree(max(0, min(most - count, affordable)))):
            spans += _run_case(group, case, made, more, calls)
    timed_s = time.monotonic() - began_s
    count = len(spans.times_us)
    rows = group.gather([first.times_us[0], *spans.times_us, *spans.host_us, *spans.waits_us])
    times_us = [row[1 : count + 1] for row in rows]
    host_us = [row[count + 1 : 2 * count + 1] for row in rows]
    # If the device's clock and the host's disagree over all calls, one of them is wrong.
    on_device_us, on_host_us, note = max(map(sum, times_us)), max(map(sum, host_us)), ""
    if abs(on_host_us - on_device_us) > CLOCKS_DIFFER * on_host_us + SPAN_OVERHEAD_US * count:
        counted, told = (f"{time_us / 1e3:.3g} ms" for time_us in (on_device_us, on_host_us))
        note = f"the device's clock counted {counted} for all timed calls, the host's {told}"
    return TimedCase(
        measurement=summarize(case, [row[0] for row in rows], times_us, calls, group.size, warm=not effort.cold),
        waits_us=even_out([row[2 * count + 1 :] for row in rows], host_us) if is_latency else (),
        timed_s=timed_s,
        note=note,
    )


def even_out(waits_us: Sequence[Sequence[float]], calls_us: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Add to each wait the time of the rank's previous call. One row per rank."""
    # A rank whose call ended early waits in the next barrier although the others are not late: over a slow link, data
    # arrives a while after it was sent. What remains is the difference in what each rank does between calls.
    return tuple(
        tuple(wait + before for wait, before in zip(waits, (0.0, *calls), strict=False))
        for waits, calls in zip(waits_us, calls_us, strict=True)
    )


def most_calls(effort: Effort) -> int:
    """Return how many buffers the calls need at most: one, or one per call if they must be cold."""
    if not effort.cold:
        return 1
    timed = effort.iterations or plan.MOST_BATCHES * plan.MOST_BATCH_CALLS
    return 1 + (MOST_WARMUP if effort.warmup is None else effort.warmup) + timed + plan.MOST_BATCHES


def _warm_up(group: RankGroup, case: Case, calls: Iterator[Call], effort: Effort, first_s: float) -> float:
    """Make uncounted calls like the timed ones. Return the seconds per call, with its barrier if it has one."""
    count = effort.warmup
    if count is None:
        affordable = math.floor(WARMUP_SHARE * effort.seconds / max(first_s, 1e-9))
        count = max(first_s < SLOW_CALL_S, min(MOST_WARMUP, affordable))
    count = int(group.agree(count))
    if count == 0:
        return first_s
    began_s = time.monotonic()
    if case.mode is Mode.LATENCY:
        _run_case(group, case, calls, count, 1)
        return (time.monotonic() - began_s) / count
    return _run_case(group, case, calls, 1, count).host_us[0] / count / 1e6


def plan_calls(mode: Mode, effort: Effort, each_s: float) -> tuple[int, int]:
    """Return the number of batches, and of calls per batch, one in latency mode, if a call takes ``each_s``."""
    each_s = max(each_s, 1e-9)
    affordable = math.floor(effort.seconds / each_s)
    if mode is Mode.LATENCY:
        return effort.iterations or max(plan.LEAST_CALLS, min(plan.MOST_CALLS, affordable)), 1
    if effort.iterations is not None:
        calls = math.ceil(effort.iterations / plan.MOST_BATCHES)
        return math.ceil(effort.iterations / calls), calls
    longest = max(math.ceil(plan.LEAST_BATCH_S / each_s), min(affordable, plan.MOST_CALLS) // plan.MOST_BATCHES)
    calls = max(1, min(plan.MOST_BATCH_CALLS, longest))
    return max(plan.LEAST_BATCHES, min(plan.MOST_BATCHES, affordable // calls)), calls


def _run_case(group: RankGroup, case: Case, calls: Iterator[Call], batches: int, count: int) -> Spans:
    if case.mode is Mode.LATENCY:
        return time_calls(group, case.collective.value, calls, batches)
    return time_batches(group, case.collective.value, calls, batches, count)


def summarize(
    case: Case, first_us: Sequence[float], times_us: Sequence[Sequence[float]], calls: int, size: int, *, warm: bool
) -> Measurement:
    """Take the slowest rank of each iteration, then reduce over iterations. ``times_us`` has one row per rank."""
    slowest = [max(column) / calls for column in zip(*times_us, strict=True)]
    p50_us = statistics.median(slowest)
    p95_us = statistics.quantiles(slowest, n=20, method="inclusive")[-1] if len(slowest) > 1 else p50_us
    low_us, high_us = median_interval(slowest)
    algbw_gb_s = case.size_bytes / p50_us / 1e3
    factor = bus_factor(case.collective, size)
    return Measurement(
        **asdict(case), iterations=len(slowest) * calls, first_us=max(first_us), min_us=min(slowest), p50_us=p50_us,
        p95_us=p95_us, p50_low_us=low_us, p50_high_us=high_us, cv=coefficient_of_variation(slowest),
        algbw_gb_s=algbw_gb_s, busbw_gb_s=None if factor is None else algbw_gb_s * factor, warm=warm, wrong=None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """One rank's times in microseconds, one value per call, or per batch."""

    times_us: tuple[float, ...]
    host_us: tuple[float, ...]  # ``times_us`` by the host's clock. On the CPU the two are the same.
    # How long this rank waited for the others in the barrier, minus the time it then took to issue the call. It is
    # small for a rank that is late for either. For batches it is only the wait.
    waits_us: tuple[float, ...]

    def __add__(self, more: Spans) -> Spans:
        return Spans(**{field.name: getattr(self, field.name) + getattr(more, field.name) for field in fields(Spans)})


def time_calls(group: RankGroup, op: str, calls: Iterator[Call], count: int) -> Spans:
    if group.device.type == "cuda":
        return time_batches(group, op, calls, count, 1, single=True)
    clock, tracker, ranks, handle = time.perf_counter_ns, group.tracker, group.ranks, group.handle
    times_us, waits_us = [], []
    with no_collection():
        for call in islice(calls, count):
            # Not ``Group.barrier``: it adds a few microseconds before the call, in which the backend's threads fall
            # asleep. We measured 3 % of an all-reduce of 1 KiB.
            tracker.enter("barrier", ranks)
            barrier = dist.barrier(handle, True)  # noqa: FBT003 - async_op
            arrived = clock()
            if barrier is not None:
                barrier.wait()
            left = clock()
            tracker.enter(op, ranks)
            began = clock()
            work = call(True)  # noqa: FBT003 - async_op
            handed_in = clock()
            if work is not None:
                work.wait()
            ended = clock()
            tracker.leave()
            times_us.append((ended - began) / 1e3)
            waits_us.append(((left - arrived) - (handed_in - began)) / 1e3)
    return Spans(times_us=tuple(times_us), host_us=tuple(times_us), waits_us=tuple(waits_us))


def time_batches(
    group: RankGroup, op: str, calls: Iterator[Call], batches: int, count: int, *, single: bool = False
) -> Spans:
    """Time ``batches`` batches of ``count`` calls, each batch after a barrier. A GPU's time is by its own clock.

    With ``single``, the time to issue the calls is subtracted from the waits.
    """
    clock, tracker, ranks = time.perf_counter_ns, group.tracker, group.ranks
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if group.device.type == "cuda" else None
    times_us, host_us, waits_us = [], [], []
    with no_collection():
        for _ in range(batches):
            batch = list(islice(calls, count))
            waited_us = group.barrier() * 1e6
            tracker.enter(op, ranks)
            began = clock()
            if events is not None:
                events[0].record()
            for call in batch:
                call(False)  # noqa: FBT003 - async_op
            handed_in = clock()
            if events is not None:
                events[1].record()
                events[1].synchronize()
            ended = clock() if events is not None else handed_in
            tracker.leave()
            host_us.append((ended - began) / 1e3)
            times_us.append(events[0].elapsed_time(events[1]) * 1e3 if events is not None else host_us[-1])
            waits_us.append(waited_us - (handed_in - began) / 1e3 if single else waited_us)
    return Spans(times_us=tuple(times_us), host_us=tuple(host_us), waits_us=tuple(waits_us))


class BarrierWaits:
    """Collects the waits of all cases measured with barriers, by ranks on these hosts: those of the whole job."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._late_us: list[torch.Tensor] = []

    def add(self, waits_us: Sequence[Sequence[float]]) -> None:
        if len(waits_us) > 1:
            self._late_us.append(lateness(waits_us))

    def summary(self) -> tuple[Arrival, ...]:
        if not self._late_us:
            return ()
        late_us = torch.cat(self._late_us)
        last = late_us.argmax(dim=1)
        # torch.quantile takes no more than 16 million values.
        middle, high = (late_us.kthvalue(math.ceil(share * len(late_us)), dim=0).values for share in (0.5, 0.95))
        return tuple(
            Arrival(
                rank=rank, host=host, late_us=float(middle[rank]), late_p95_us=float(high[rank]),
                share=float((last == rank).double().mean()), calls=len(late_us),
            )
            for rank, host in enumerate(self._hosts)
        )  # fmt: skip


def lateness(waits_us: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return how late each rank was, by call and rank: the others' median wait minus its own."""
    waits = torch.tensor([row[:MOST_KEPT] for row in waits_us], dtype=torch.float64).T
    ordered, order = waits.sort(dim=1)
    place, others = order.argsort(dim=1), waits.shape[1] - 1
    # For each rank, the two waits in the middle of the sorted row after its own wait is removed
    middle = [ordered.gather(1, (place <= index).long() + index) for index in ((others - 1) // 2, others // 2)]
    return (middle[0] + middle[1]) / 2 - waits


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of about 95 % for the median, for any distribution."""
    # Its ends are the values of rank n/2 -+ 1.96 sqrt(n)/2 (Conover, Practical Nonparametric Statistics, 3rd edition,
    # section 3.2). With five values or fewer, even the whole range gives less: 94 % with five, 75 % with three.
    ordered = sorted(values)
    half = Z * math.sqrt(len(ordered)) / 2
    low = math.floor(len(ordered) / 2 - half)
    high = math.ceil(len(ordered) / 2 + half)
    return ordered[max(0, low - 1)], ordered[min(len(ordered) - 1, high)]


def coefficient_of_variation(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return statistics.pstdev(values, mean) / mean if mean else 0.0
