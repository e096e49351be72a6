"""Buckets close as DDP closes them, and a backward with other buckets is predicted from the present one."""

from dataclasses import replace

import pytest

from ddpdoctor.model.gradient_times import GradientTimes
from ddpdoctor.rules.speed.reduction import (
    DEFAULT_BYTES,
    MIB,
    BucketGradients,
    ReductionCost,
    best_cap,
    buckets_for,
    gather,
    networks_of,
    predict_cap,
    simulate,
)

LINE = ReductionCost(latency_ms=0.25, bytes_per_ms=MIB / 10)
"""1 MiB takes 10.25 ms."""


def even(**changes: object) -> BucketGradients:
    """Return sixteen layers of 1 MiB, one ready every 10 ms, as seen over ``LINE`` with DDP's default buckets."""
    gradients = BucketGradients(
        sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(1, 17)), bucket_bytes=(MIB, 15 * MIB),
        compute_end_ms=160.0, end_ms=0.0,
    )  # fmt: skip
    changed = replace(gradients, **changes)  # type: ignore[arg-type]
    return replace(changed, end_ms=simulate(changed, changed.bucket_bytes, LINE))


def test_a_bucket_closes_once_it_holds_its_cap_and_the_first_of_the_default_is_small() -> None:
    assert buckets_for(even(), None) == (MIB, 15 * MIB)
    assert buckets_for(even(), MIB) == (MIB,) * 16
    assert buckets_for(even(), 3 * MIB // 2) == (2 * MIB,) * 8
    assert buckets_for(even(), 100 * MIB) == (16 * MIB,)
    big = even(sizes_bytes=(MIB,) * 15 + (2 * DEFAULT_BYTES,), bucket_bytes=(MIB, 14 * MIB + 2 * DEFAULT_BYTES))
    assert buckets_for(big, 8 * MIB) == (8 * MIB, 7 * MIB + 2 * DEFAULT_BYTES)


def test_with_find_unused_parameters_buckets_are_filled_in_the_order_of_registration() -> None:
    assert buckets_for(even(by_registration=True), None) == (15 * MIB, MIB)


def test_the_second_of_two_buckets_leaves_when_backward_is_over() -> None:
    assert simulate(even(), (MIB, 15 * MIB), LINE) == pytest.approx(160 + 150.25)
    assert simulate(even(), (MIB,) * 16, LINE) == pytest.approx(10 + 16 * 10.25)
    assert simulate(even(), (MIB,) * 16, ReductionCost(latency_ms=0, bytes_per_ms=MIB)) == pytest.approx(161)


def test_the_network_is_found_from_the_run_itself() -> None:
    gradients = even()
    found = networks_of(gradients)
    assert [network.latency_ms for network in found] == [0.0, 0.25, 0.5]
    assert found[1].bytes_per_ms == pytest.approx(LINE.bytes_per_ms, rel=1e-3)
    for network in found:
        assert simulate(gradients, gradients.bucket_bytes, network) == pytest.approx(gradients.end_ms, rel=1e-3)


def test_smaller_buckets_are_predicted_to_overlap() -> None:
    gradients = even()
    cap, saved = best_cap(gradients, networks_of(gradients), [MIB // 2, MIB, 2 * MIB, 4 * MIB, 100 * MIB])
    truth = gradients.end_ms - simulate(gradients, buckets_for(gradients, cap), LINE)
    assert cap in {MIB // 2, MIB}
    assert saved.low_ms < truth < saved.high_ms
    assert saved.mid_ms == pytest.approx(truth, rel=1e-2)


def test_of_many_small_buckets_the_latency_is_the_range() -> None:
    slow = ReductionCost(latency_ms=2.0, bytes_per_ms=MIB / 10)
    gradients = BucketGradients(
        sizes_bytes=(MIB // 64,) * 64, ready_ms=tuple(0.1 * i for i in range(64)), bucket_bytes=(MIB // 64,) * 64,
        compute_end_ms=7.0, end_ms=0.0,
    )  # fmt: skip
    gradients = replace(gradients, end_ms=simulate(gradients, gradients.bucket_bytes, slow))
    saved = predict_cap(gradients, networks_of(gradients), None)
    truth = gradients.end_ms - simulate(gradients, buckets_for(gradients, None), slow)
    assert saved.low_ms <= truth <= saved.high_ms
    assert saved.high_ms > gradients.end_ms / 2


def test_a_hidden_reduction_tells_nothing_of_the_network() -> None:
    assert networks_of(replace(even(), end_ms=160.0)) == ()


def seen(**changes: object) -> GradientTimes:
    times = GradientTimes(
        number=1, group="0", sizes_bytes=(400, 40), ready_ms=(3.0, 1.0), bucket_bytes=(440,), compute_end_ms=3.5,
        exposed_ms=2.0, readings=3, reductions=20, finds_unused=False,
    )  # fmt: skip
    return replace(times, **changes)  # type: ignore[arg-type]


def test_a_gradient_is_ready_on_its_last_rank_and_the_least_exposed_time_is_the_transfer() -> None:
    gathered = gather([seen(), seen(ready_ms=(2.0, 1.5), compute_end_ms=2.5, exposed_ms=4.0)])
    assert gathered == BucketGradients(
        sizes_bytes=(40, 400), ready_ms=(1.5, 3.0), bucket_bytes=(440,), compute_end_ms=3.5, end_ms=5.5
    )


def test_find_unused_parameters_keeps_the_order_of_registration() -> None:
    unused = seen(finds_unused=True, sizes_bytes=(40, 400), ready_ms=(1.0, 3.0))
    gathered = gather([unused])
    assert gathered is not None
    assert (gathered.sizes_bytes, gathered.by_registration) == ((400, 40), True)
    static = gather([replace(unused, static_graph=True)])
    assert static is not None
    assert (static.sizes_bytes, static.by_registration) == ((40, 400), False)


def test_ranks_with_other_tensors_are_not_put_together() -> None:
    assert gather([seen(), seen(sizes_bytes=(400, 44))]) is None
