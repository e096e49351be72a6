"""What changes are predicted to gain, over jobs whose steps and gradients are known."""

from dataclasses import replace

from ddpdoctor.model.bandwidth import Collective, Measurement, Mode
from ddpdoctor.model.facts import GroupState, Rank
from ddpdoctor.model.node import Node
from ddpdoctor.model.steps import GradientTimes
from ddpdoctor.rules.speed.predictions import MeasuredSize, PredictionBasis, job_basis
from ddpdoctor.rules.speed.reduction import (
    MIB,
    BucketGradients,
    ReductionCost,
    ReductionCurve,
    buckets_for,
    networks_of,
    predict_cap,
    simulate,
)
from ddpdoctor.rules.speed.state import SpeedState
from tests.golden import table
from tests.rules.speed.jobs import rank, state

SLOW = {"exposed": 150.0, "backward": 160.0, "forward": 80.0}
LATE = GradientTimes(
    number=1, group="0", sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(16, 0, -1)),
    bucket_bytes=(MIB, 15 * MIB), compute_end_ms=160.0, exposed_ms=150.0, readings=8, reductions=100,
    cap_bytes=25 * MIB, finds_unused=False, static_graph=False, same_unused=True,
)  # fmt: skip
"""Sixteen layers in two buckets, of which the second leaves when backward is over, at 10 ms for each MiB."""
LINE = ReductionCurve(ranks=2, sizes_bytes=(1024, MIB, 64 * MIB), times_ms=(0.2, 10.0, 640.0))
CURVES = (LINE, LINE, LINE)


def two(parts_ms: dict[str, float] = SLOW, times: GradientTimes | None = LATE, **more: object) -> tuple[Rank, Rank]:
    given = {"gradient_times": () if times is None else (times,), **more}
    return rank(0, parts_ms, **given), rank(1, parts_ms, **given)  # type: ignore[arg-type]


def basis(**changes: object) -> PredictionBasis:
    return replace(job_basis(state(*two())), **changes)  # type: ignore[arg-type]


def measured(size_bytes: int, p50_us: float, mode: Mode = Mode.THROUGHPUT, dtype: str = "float32") -> Measurement:
    return Measurement(
        collective=Collective.ALL_REDUCE, dtype=dtype, redop="sum", mode=mode, in_place=False, size_bytes=size_bytes,
        count=size_bytes // 4, iterations=10, first_us=p50_us, min_us=p50_us, p50_us=p50_us, p95_us=p50_us,
        p50_low_us=0.9 * p50_us, p50_high_us=1.2 * p50_us, cv=0.1, algbw_gb_s=1.0, busbw_gb_s=1.0, warm=True, wrong=0,
    )  # fmt: skip


# More ranks than were run are predicted by a ring and a tree, from what the largest job measured.


NETWORK = ReductionCost(latency_ms=0.5, bytes_per_ms=MIB / 10)
LATE_BUCKETS = BucketGradients(
    sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(1, 17)), bucket_bytes=(MIB, 15 * MIB),
    compute_end_ms=160.0, end_ms=310.5,
)  # fmt: skip
BASIS = PredictionBasis(step_ms=400.0, gradients=LATE_BUCKETS, networks=(NETWORK,), assumes="", exposed_ms=150.5)
TWO = MeasuredSize(ranks=2, step_ms=400.0, efficiency=0.6, spread_ms=0.0)


# Buckets close as DDP closes them, and a backward with other buckets is predicted from the present one.


QUICK_NETWORK = ReductionCost(latency_ms=0.25, bytes_per_ms=MIB / 10)
"""1 MiB takes 10.25 ms."""


def even(**changes: object) -> BucketGradients:
    """Return sixteen layers of 1 MiB, one ready every 10 ms, as seen over ``LINE`` with DDP's default buckets."""
    gradients = BucketGradients(
        sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(1, 17)), bucket_bytes=(MIB, 15 * MIB),
        compute_end_ms=160.0, end_ms=0.0,
    )  # fmt: skip
    changed = replace(gradients, **changes)  # type: ignore[arg-type]
    return replace(changed, end_ms=simulate(changed, changed.bucket_bytes, QUICK_NETWORK))


def test_of_many_small_buckets_the_latency_is_the_range() -> None:
    slow = ReductionCost(latency_ms=2.0, bytes_per_ms=MIB / 10)
    gradients = BucketGradients(
        sizes_bytes=(MIB // 64,) * 64, ready_ms=tuple(0.1 * i for i in range(64)), bucket_bytes=(MIB // 64,) * 64,
        compute_end_ms=7.0, end_ms=0.0,
    )  # fmt: skip
    gradients = replace(gradients, end_ms=simulate(gradients, gradients.bucket_bytes, slow))
    low_ms, _, high_ms = predict_cap(gradients, networks_of(gradients), None)
    truth = gradients.end_ms - simulate(gradients, buckets_for(gradients, None), slow)
    assert low_ms <= truth <= high_ms
    assert high_ms > gradients.end_ms / 2


def seen(**changes: object) -> GradientTimes:
    times = GradientTimes(
        number=1, group="0", sizes_bytes=(400, 40), ready_ms=(3.0, 1.0), bucket_bytes=(440,), compute_end_ms=3.5,
        exposed_ms=2.0, readings=3, reductions=20, finds_unused=False,
    )  # fmt: skip
    return replace(times, **changes)  # type: ignore[arg-type]


# What a job uses of the network, and what the network could carry; nothing is said where one is unknown.


def made(backend: str = "gloo", hosts: tuple[str, str] = ("a", "b"), machine: Node | None = None) -> SpeedState:
    ranks: list[Rank] = [
        replace(one, host=host, groups=(GroupState(name="0", ranks=(0, 1), backend=backend, enqueued=1),))
        for one, host in zip(two(), hosts, strict=True)
    ]
    found = state(*ranks)
    return replace(found, job=replace(found.job, ranks=tuple(ranks), machine=machine))


test_rows = table(
    "predictions",
    "ddpdoctor.model.bandwidth ddpdoctor.model.findings ddpdoctor.model.node ddpdoctor.model.reading",
    "ddpdoctor.model.steps ddpdoctor.rules.speed.comparing ddpdoctor.rules.speed.predictions",
    "ddpdoctor.rules.speed.reduction",
    "ddpdoctor.report.verbs.speed tests.rules.speed.jobs",
    globals(),
)
