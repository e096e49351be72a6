"""How long DDP's reduction of gradients takes: with the buckets of a run or others, on other networks, on more ranks.

A bucket leaves when its last gradient is ready and the bucket before it is done, and takes ``latency + size /
bandwidth``. Gloo runs two buckets concurrently, which share the link: one queue is close enough. The result is an
estimate of what another setting saves. A trial measures it.

More ranks than were run: a ring takes ``2 (N - 1) a + 2 (N - 1) / N * S / B`` (Patarasuk and Yuan, 2009; NVIDIA/nccl,
src/graph/tuning.cc), a tree ``2 ceil(log2 N) a`` and about twice the time of its bytes. Waiting grows with the slowest
of N ranks, whose time is beyond the mean by up to ``sigma * sqrt(2 ln N)``.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import ceil, exp, inf, log, log2
from typing import TYPE_CHECKING, TypeAlias

from ddpdoctor.model.bandwidth import Collective, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.model.bandwidth import Measurement
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.steps import GradientTimes

MIB = 2**20
FIRST_BYTES = MIB
# DDP's buckets without ``bucket_cap_mb``: ``_DEFAULT_FIRST_BUCKET_BYTES``, and 25 MiB for the others. A given cap holds
# for the first bucket too (pytorch#121640).
DEFAULT_BYTES = 25 * MIB
CAPS_BYTES = tuple(int(cap * MIB) for cap in (0.5, 1, 2, 4, 8, 16, 25, 50, 100))  # the caps that are tried
# How long a bucket of no size may take. A run with few buckets cannot tell. Gloo over a link of 1 Gbit/s took 0.4 to
# 0.5 ms.
LATENCIES_MS = (0.0, 0.25, 0.5)
MANY_BUCKETS = 40  # with more, the run itself tells how long a bucket of no size takes at most
# Bytes per millisecond that a network with so many buckets may have: 400 Mbit/s, 1 Gbit/s, any. Our choice: no job
# trains over a slower one, and at 100 Mbit/s half a MiB alone would explain 120 buckets on a busy machine.
SPEEDS = (50e3, 125e3, inf)
# Caps count as equally good if what they save differs by less than this share of backward. Our choice: predictions are
# no better.
NEARLY = 0.01
LEAST_SIZES = 3
TREE_BYTES = 2.0  # a tree reaches about half of the ring's bandwidth (tuning.cc; double binary trees, NCCL 2.4)
MOST_QUEUED = 0.20
# If the ranks compute on more of the cores, the threads that reduce take time from backward, and no prediction of the
# reduction holds. Our choice.
MOST_OF_CORES = 0.5
_HALVINGS = 60
# What another cap saves of backward in ms: at least, in the middle, at most, as the run does not tell more.
Saved: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGradients:
    """The gradients of one DDP model over all ranks that reduce them, in the order in which DDP puts them into buckets.

    Times are milliseconds from the start of backward.
    """

    sizes_bytes: tuple[int, ...]
    ready_ms: tuple[float, ...]  # when each was ready on the last rank
    bucket_bytes: tuple[int, ...]
    compute_end_ms: float
    end_ms: float  # when backward ended on a rank that waits for nobody
    # The order is the reverse of the registration: ``find_unused_parameters`` keeps DDP from building buckets anew.
    by_registration: bool = False

    @property
    def exposed_ms(self) -> float:
        """The time of the reduction that backward does not hide."""
        return self.end_ms - self.compute_end_ms


def gather(ranks: Sequence[GradientTimes]) -> BucketGradients | None:
    """Return the gradients of one model from what its ranks recorded, or None if they do not have the same tensors."""
    first = ranks[0]
    if any(rank.sizes_bytes != first.sizes_bytes for rank in ranks) or not first.bucket_bytes:
        return None
    ready = [max(rank.ready_ms[i] or 0.0 for rank in ranks) for i in range(len(first.sizes_bytes))]
    by_registration = bool(first.finds_unused and not first.static_graph)
    order = list(reversed(range(len(ready)))) if by_registration else sorted(range(len(ready)), key=ready.__getitem__)
    compute_end = max(rank.compute_end_ms for rank in ranks)
    return BucketGradients(
        sizes_bytes=tuple(first.sizes_bytes[i] for i in order),
        ready_ms=tuple(ready[i] for i in order),
        bucket_bytes=first.bucket_bytes,
        compute_end_ms=compute_end,
        end_ms=compute_end + min(rank.exposed_ms for rank in ranks),
        by_registration=by_registration,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCost:
    """A network of one latency and one bandwidth."""

    latency_ms: float
    bytes_per_ms: float

    def time_ms(self, size_bytes: float) -> float:
        return self.latency_ms + size_bytes / self.bytes_per_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCurve:
    """Times of all-reduces, by rising size, between some number of ranks."""

    ranks: int
    sizes_bytes: tuple[int, ...]
    times_ms: tuple[float, ...]

    def time_ms(self, size_bytes: float) -> float:
        """Return the time of one bucket: between two sizes by the power law through both, beyond all in proportion."""
        sizes, times = self.sizes_bytes, self.times_ms
        if size_bytes <= sizes[0]:
            return times[0]
        if size_bytes >= sizes[-1]:
            return times[-1] * size_bytes / sizes[-1]
        above = bisect_left(sizes, size_bytes)
        part = log(size_bytes / sizes[above - 1]) / log(sizes[above] / sizes[above - 1])
        return exp(log(times[above - 1]) * (1 - part) + log(times[above]) * part)


LinkModel: TypeAlias = ReductionCost | ReductionCurve
# A curve that ``allreduce-bench`` measured, between the curves of the ends of the 95 % intervals of its points.
MeasuredCurves: TypeAlias = tuple[ReductionCurve, ...]


def curves_of(results: Iterable[Measurement], ranks: int) -> MeasuredCurves | None:
    """Return the curve of float32 all-reduces among measurements, or None if too few sizes were measured.

    Buckets follow each other without a pause, as the calls of the throughput mode do.
    """
    by_mode: dict[Mode, list[Measurement]] = {}
    for result in results:
        if result.collective is Collective.ALL_REDUCE and result.dtype == "float32":
            by_mode.setdefault(result.mode, []).append(result)
    chosen = by_mode.get(Mode.THROUGHPUT) or by_mode.get(Mode.LATENCY) or []
    points = sorted(chosen, key=lambda measurement: measurement.size_bytes)
    if len(points) < LEAST_SIZES:
        return None
    sizes = tuple(point.size_bytes for point in points)
    columns = zip(*((point.p50_low_us, point.p50_us, point.p50_high_us) for point in points), strict=True)
    times = (tuple(us / 1e3 for us in column) for column in columns)
    return tuple(ReductionCurve(ranks=ranks, sizes_bytes=sizes, times_ms=times_ms) for times_ms in times)


def scaled_to(curves: MeasuredCurves, ranks: int) -> MeasuredCurves:
    """Return the curves for another number of ranks, by the bytes that a ring moves."""
    measured = curves[0].ranks
    if ranks == measured or ranks < 2 or measured < 2:
        return curves
    factor = ring_factor(ranks) / ring_factor(measured)
    times = (tuple(factor * time for time in curve.times_ms) for curve in curves)
    return tuple(replace(curve, ranks=ranks, times_ms=ms) for curve, ms in zip(curves, times, strict=True))


def networks_of(gradients: BucketGradients) -> tuple[ReductionCost, ...]:
    """Return networks with which the present buckets take as long as was seen, by latency; empty if there is none."""
    end_ms = gradients.end_ms

    def is_slower(latency_ms: float, bytes_per_ms: float) -> bool:
        network = ReductionCost(latency_ms=latency_ms, bytes_per_ms=bytes_per_ms)
        return simulate(gradients, gradients.bucket_bytes, network) > end_ms

    latencies: Sequence[float] = LATENCIES_MS
    if len(gradients.bucket_bytes) > MANY_BUCKETS:
        most = [_boundary(lambda ms, at=speed: not is_slower(ms, at), 0.0, end_ms) for speed in SPEEDS]  # type: ignore[misc]
        if most[0] > 0:
            pairs = zip(most, SPEEDS, strict=True)
            return tuple(ReductionCost(latency_ms=latency, bytes_per_ms=speed) for latency, speed in pairs)
        latencies = (0.0, most[-1] / 2, most[-1] * 0.99)
    slowest = sum(gradients.bucket_bytes) / (end_ms or 1.0) / 2
    if end_ms <= gradients.compute_end_ms:
        return ()
    return tuple(
        ReductionCost(latency_ms=latency, bytes_per_ms=_boundary(partial(is_slower, latency), slowest, slowest * 1e6))
        for latency in latencies
        if simulate(gradients, gradients.bucket_bytes, ReductionCost(latency_ms=latency, bytes_per_ms=inf)) < end_ms
    )


def _boundary(is_below: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a condition ends that holds from ``low`` on, or ``low`` if it does not hold there."""
    if not is_below(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def buckets_for(gradients: BucketGradients, cap_bytes: int | None) -> tuple[int, ...]:
    """Return the sizes of the buckets that DDP makes for a cap, in the order of their reduction; None: its default.

    A bucket closes once it holds at least its cap, so no tensor is split. In the order of registration DDP fills
    buckets from the other end.
    """
    sizes = gradients.sizes_bytes[::-1] if gradients.by_registration else gradients.sizes_bytes
    caps = [FIRST_BYTES, DEFAULT_BYTES] if cap_bytes is None else [cap_bytes]
    buckets: list[int] = []
    held = 0
    for size in sizes:
        held += size
        if held >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(held)
            held = 0
    buckets += [held] if held else []
    return tuple(reversed(buckets)) if gradients.by_registration else tuple(buckets)


def simulate(
    gradients: BucketGradients, bucket_bytes: Sequence[int], network: LinkModel, *, sent: float = 1.0
) -> float:
    """Return when backward ends with these buckets, in milliseconds, if so much of each is sent."""
    ends, ready = list(accumulate(bucket_bytes)), [0.0] * len(bucket_bytes)
    bucket, reached = 0, 0
    for size, at in zip(gradients.sizes_bytes, gradients.ready_ms, strict=True):
        reached += size
        ready[bucket] = max(ready[bucket], at)
        while bucket < len(ends) - 1 and reached >= ends[bucket]:
            bucket += 1
    done = 0.0
    for at, size in zip(ready, bucket_bytes, strict=True):
        done = max(at, done) + network.time_ms(sent * size)
    return max(done, gradients.compute_end_ms)


def predict_cap(gradients: BucketGradients, networks: Sequence[LinkModel], cap_bytes: int | None) -> Saved:
    buckets = buckets_for(gradients, cap_bytes)
    saved = sorted(gradients.end_ms - simulate(gradients, buckets, network) for network in networks)
    return saved[0], saved[len(saved) // 2], saved[-1]


def best_cap(
    gradients: BucketGradients, networks: Sequence[LinkModel], caps_bytes: Sequence[int] = CAPS_BYTES
) -> tuple[int, Saved]:
    """Return the cap that saves most, and what it saves. Among nearly equal caps, it is the closest to the default."""
    predictions = [(cap, predict_cap(gradients, networks, cap)) for cap in caps_bytes]
    most_ms = max(mid_ms for _, (_, mid_ms, _) in predictions)
    good = [prediction for prediction in predictions if prediction[1][1] >= most_ms - NEARLY * gradients.end_ms]
    return min(good, key=lambda cap: abs(log(cap[0] / DEFAULT_BYTES)))


def contention(ranks: Iterable[Rank]) -> str:
    """Return why a prediction of the reduction would not hold, or "": the ranks may have no cores to spare for it."""
    by_host: dict[str, float] = {}
    cores = 0
    is_known = False
    for rank in ranks:
        time, around = (rank.speed.core_time, rank.speed.surroundings) if rank.speed is not None else (None, None)
        if time is None or not time.elapsed_ms:
            continue
        is_known = True
        if time.queued_ms > MOST_QUEUED * time.elapsed_ms:
            return f"rank {rank.rank} waited for a core for {time.queued_ms / time.elapsed_ms:.0%} of the time"
        if around is not None:
            cores = max(cores, around.cores)
            by_host[rank.host] = by_host.get(rank.host, 0.0) + around.threads * time.on_core_ms / time.elapsed_ms
    if cores and max(by_host.values(), default=0.0) > MOST_OF_CORES * cores:
        return "the ranks use most of the cores for computation, so the reduction takes cores from backward"
    return "" if is_known else "the job was too short to measure how many cores the ranks use"


def ring_factor(ranks: int) -> float:
    """Return how many times the size each rank sends."""
    return 2 * (ranks - 1) / ranks


def larger_costs(network: ReductionCost, measured: int, ranks: int) -> tuple[ReductionCost, ReductionCost]:
    """Return the cost of a bucket on a ring and on a tree of more ranks. The measured job is assumed to be a ring."""
    sent = network.bytes_per_ms * ring_factor(measured)
    hop_ms = network.latency_ms / (2 * (measured - 1))
    ring_ms = network.latency_ms * (ranks - 1) / (measured - 1)
    ring = ReductionCost(latency_ms=ring_ms, bytes_per_ms=sent / ring_factor(ranks))
    return ring, ReductionCost(latency_ms=2 * ceil(log2(ranks)) * hop_ms, bytes_per_ms=sent / TREE_BYTES)
