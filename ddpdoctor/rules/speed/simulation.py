"""What a backward would take with other buckets, simulated from when each gradient was ready.

A bucket leaves when its last gradient is ready and the bucket before it is done, and takes ``latency + size /
bandwidth``. Gloo runs two buckets at once, which share the line: one queue is close enough. The result says about how
much another setting saves. A trial says how much it really is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf, log
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.gradient_times import GradientTimes

MIB = 2**20
FIRST_BYTES = MIB
DEFAULT_BYTES = 25 * MIB
"""DDP's buckets without ``bucket_cap_mb``: ``_DEFAULT_FIRST_BUCKET_BYTES``, and 25 MiB for the others. A given cap
holds for the first bucket too (pytorch#121640)."""
CAPS_BYTES = tuple(int(cap * MIB) for cap in (0.5, 1, 2, 4, 8, 16, 25, 50, 100))
"""The caps that are tried."""
LATENCIES_MS = (0.0, 0.25, 0.5)
"""How long a bucket of no size may take. A run with few buckets cannot tell. Gloo over a link of 1 Gbit/s took 0.4 to
0.5 ms."""
MANY_BUCKETS = 40
"""With more, the run itself tells how long a bucket of no size takes at most."""
SPEEDS = (50e3, 125e3, inf)
"""Bytes per millisecond that a network with so many buckets may have: 400 Mbit/s, 1 Gbit/s, any. Our choice: no job
trains over a slower one, and at 100 Mbit/s half a MiB alone would explain 120 buckets on a busy machine."""
NEARLY = 0.01
"""Caps count as equally good if what they save differs by less than this share of backward. Our choice: predictions are
no better."""
_HALVINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGradients:
    """The gradients of one DDP model over all ranks that reduce them, in the order in which DDP puts them into buckets.

    Times are milliseconds from the start of backward.
    """

    sizes_bytes: tuple[int, ...]
    ready_ms: tuple[float, ...]
    """When each was ready on the last rank."""
    bucket_bytes: tuple[int, ...]
    compute_end_ms: float
    end_ms: float
    """When backward ended on a rank that waits for nobody."""
    by_registration: bool = False
    """The order is the reverse of the registration: ``find_unused_parameters`` keeps DDP from building buckets anew."""

    @property
    def exposed_ms(self) -> float:
        """Return the time of the reduction that backward does not hide."""
        return self.end_ms - self.compute_end_ms


class ReductionModel(Protocol):
    """What tells how long the reduction of a bucket takes."""

    def time_ms(self, size_bytes: float) -> float:
        """Return the time of one bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCost:
    """How long the reduction of a bucket takes."""

    latency_ms: float
    bytes_per_ms: float

    def time_ms(self, size_bytes: float) -> float:
        """Return the time of one bucket."""
        return self.latency_ms + size_bytes / self.bytes_per_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What another setting saves of backward, as a range over what the run does not tell."""

    low_ms: float
    mid_ms: float
    high_ms: float


def gather(ranks: Sequence[GradientTimes]) -> BucketGradients | None:
    """Return the gradients of one model from what its ranks recorded, or None if they do not have the same tensors."""
    first = ranks[0]
    if any(one.sizes_bytes != first.sizes_bytes for one in ranks) or not first.bucket_bytes:
        return None
    ready = [max(one.ready_ms[i] or 0.0 for one in ranks) for i in range(len(first.sizes_bytes))]
    by_registration = bool(first.finds_unused and not first.static_graph)
    order = list(reversed(range(len(ready)))) if by_registration else sorted(range(len(ready)), key=ready.__getitem__)
    compute_end = max(one.compute_end_ms for one in ranks)
    return BucketGradients(
        sizes_bytes=tuple(first.sizes_bytes[i] for i in order),
        ready_ms=tuple(ready[i] for i in order),
        bucket_bytes=first.bucket_bytes,
        compute_end_ms=compute_end,
        end_ms=compute_end + min(one.exposed_ms for one in ranks),
        by_registration=by_registration,
    )


def buckets_for(gradients: BucketGradients, cap_bytes: int | None) -> tuple[int, ...]:
    """Return the sizes of the buckets that DDP makes for a cap, in the order of their reduction; None: its default.

    A bucket closes once it holds at least its cap, so no tensor is split. In the order of registration DDP fills
    buckets from the other end.
    """
    sizes = list(gradients.sizes_bytes)
    caps = [FIRST_BYTES, DEFAULT_BYTES] if cap_bytes is None else [cap_bytes]
    if gradients.by_registration:
        sizes.reverse()
    buckets: list[int] = []
    held = 0
    for size in sizes:
        held += size
        if held >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(held)
            held = 0
    if held:
        buckets.append(held)
    return tuple(reversed(buckets)) if gradients.by_registration else tuple(buckets)


def simulate(gradients: BucketGradients, bucket_bytes: Sequence[int], network: ReductionModel) -> float:
    """Return when backward ends with these buckets, in milliseconds."""
    ready, done = _ready_ms(gradients, bucket_bytes), 0.0
    for at, size in zip(ready, bucket_bytes, strict=True):
        done = max(at, done) + network.time_ms(size)
    return max(done, gradients.compute_end_ms)


def networks_of(gradients: BucketGradients) -> tuple[ReductionCost, ...]:
    """Return networks with which the present buckets take as long as was seen, by latency; empty if there is none."""
    latencies: Sequence[float] = LATENCIES_MS
    if len(gradients.bucket_bytes) > MANY_BUCKETS:
        solved = [(_solve_latency(gradients, speed), speed) for speed in SPEEDS]
        if solved[0][0] > 0:
            return tuple(ReductionCost(latency_ms=latency, bytes_per_ms=speed) for latency, speed in solved)
        latencies = (0.0, solved[-1][0] / 2, solved[-1][0] * 0.99)
    return tuple(network for latency in latencies if (network := _solve_bandwidth(gradients, latency)) is not None)


def predict_cap(gradients: BucketGradients, networks: Sequence[ReductionModel], cap_bytes: int | None) -> Prediction:
    """Return what another cap saves of backward."""
    buckets = buckets_for(gradients, cap_bytes)
    saved = sorted(gradients.end_ms - simulate(gradients, buckets, network) for network in networks)
    return Prediction(low_ms=saved[0], mid_ms=saved[len(saved) // 2], high_ms=saved[-1])


def best_cap(
    gradients: BucketGradients, networks: Sequence[ReductionModel], caps_bytes: Sequence[int]
) -> tuple[int, Prediction]:
    """Return the cap that saves most, and what it saves. Of caps nearly as good, it is closest to the default."""
    predictions = [(cap, predict_cap(gradients, networks, cap)) for cap in caps_bytes]
    most_ms = max(saved.mid_ms for _, saved in predictions)
    good = [one for one in predictions if one[1].mid_ms >= most_ms - NEARLY * gradients.end_ms]
    return min(good, key=lambda one: abs(log(one[0] / DEFAULT_BYTES)))


def _ready_ms(gradients: BucketGradients, bucket_bytes: Sequence[int]) -> list[float]:
    """Return when the last gradient of each bucket is ready."""
    ends, ready = list(accumulate(bucket_bytes)), [0.0] * len(bucket_bytes)
    bucket, reached = 0, 0
    for size, at in zip(gradients.sizes_bytes, gradients.ready_ms, strict=True):
        reached += size
        ready[bucket] = max(ready[bucket], at)
        while bucket < len(ends) - 1 and reached >= ends[bucket]:
            bucket += 1
    return ready


def _solve_bandwidth(gradients: BucketGradients, latency_ms: float) -> ReductionCost | None:
    """Return the network of this latency that gives the backward that was seen, or None if none is slow enough."""

    def end_ms(bytes_per_ms: float) -> float:
        return simulate(
            gradients, gradients.bucket_bytes, ReductionCost(latency_ms=latency_ms, bytes_per_ms=bytes_per_ms)
        )

    if end_ms(inf) >= gradients.end_ms or gradients.end_ms <= gradients.compute_end_ms:
        return None
    total = sum(gradients.bucket_bytes)
    slowest = total / (gradients.end_ms or 1.0) / 2
    bandwidth = _boundary(lambda value: end_ms(value) > gradients.end_ms, slowest, slowest * 1e6)
    return ReductionCost(latency_ms=latency_ms, bytes_per_ms=bandwidth)


def _solve_latency(gradients: BucketGradients, bytes_per_ms: float) -> float:
    """Return the largest latency with which backward does not take longer than was seen; 0 if there is none."""

    def is_too_small(latency_ms: float) -> bool:
        network = ReductionCost(latency_ms=latency_ms, bytes_per_ms=bytes_per_ms)
        return simulate(gradients, gradients.bucket_bytes, network) <= gradients.end_ms

    return _boundary(is_too_small, 0.0, gradients.end_ms) if is_too_small(0.0) else 0.0


def _boundary(is_below: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a condition that holds from ``low`` on ends."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2
