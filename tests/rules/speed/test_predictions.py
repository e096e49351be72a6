"""What changes are predicted to gain, over jobs whose steps and gradients are known."""

from dataclasses import replace
from math import log, sqrt

import pytest

from ddpdoctor.model.bandwidth import Collective, Measurement, Mode
from ddpdoctor.model.facts import GroupState, Rank
from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.node import Gpu, Gpus, Interface, Network, Node
from ddpdoctor.model.reading import NOT_ASKED
from ddpdoctor.model.steps import CoreTime, FetchTimes, GradientTimes
from ddpdoctor.model.tuning import Bound, PredictedStep
from ddpdoctor.report.verbs.speed import network_words
from ddpdoctor.rules.speed.comparing import network_use
from ddpdoctor.rules.speed.predictions import (
    SIZES,
    MeasuredSize,
    PredictionBasis,
    basis_of,
    job_basis,
    predict_changes,
    predict_setting,
    predict_sizes,
    ring_cost,
    tree_cost,
    waiting_of,
)
from ddpdoctor.rules.speed.reduction import (
    DEFAULT_BYTES,
    MIB,
    BucketGradients,
    MeasuredCurves,
    ReductionCost,
    ReductionCurve,
    best_cap,
    buckets_for,
    curves_of,
    gather,
    networks_of,
    predict_cap,
    scaled_to,
    simulate,
)
from ddpdoctor.rules.speed.state import SpeedState
from tests.rules.speed.jobs import rank, state

SLOW = {"exposed": 150.0, "backward": 160.0, "forward": 80.0}
LATE = GradientTimes(
    number=1, group="0", sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(16, 0, -1)),
    bucket_bytes=(MIB, 15 * MIB), compute_end_ms=160.0, exposed_ms=150.0, readings=8, reductions=100,
    cap_bytes=25 * MIB, finds_unused=False, static_graph=False, same_unused=True,
)  # fmt: skip
"""Sixteen layers in two buckets, of which the second leaves when backward is over, at 10 ms for each MiB."""
LINE = ReductionCurve(ranks=2, sizes_bytes=(1024, MIB, 64 * MIB), times_ms=(0.2, 10.0, 640.0))
CURVES = MeasuredCurves(low=LINE, mid=LINE, high=LINE)


def two(parts_ms: dict[str, float] = SLOW, times: GradientTimes | None = LATE, **more: object) -> tuple[Rank, Rank]:
    given = {"gradient_times": () if times is None else (times,), **more}
    return rank(0, parts_ms, **given), rank(1, parts_ms, **given)  # type: ignore[arg-type]


def basis(**changes: object) -> PredictionBasis:
    return replace(job_basis(state(*two())), **changes)  # type: ignore[arg-type]


def predicted(setting: str, given: PredictionBasis | None = None) -> PredictedStep:
    found = predict_setting(given or basis(), setting)
    assert found is not None
    return found


def test_other_buckets_are_a_range_over_what_the_run_does_not_tell() -> None:
    found = predicted(f"bucket_cap={MIB}")
    assert found.low is not None and found.high is not None and found.ratio is not None  # noqa: PT018 - one thing
    assert found.low < found.ratio < found.high
    assert 1 - found.ratio == pytest.approx(140 / 394, abs=0.02)
    assert "one bandwidth" in found.assumes


def test_reducing_once_in_four_batches_saves_three_quarters_of_what_backward_does_not_hide() -> None:
    found = predicted("accumulate=4")
    assert found.gain == pytest.approx(0.75 * 150 / basis().step_ms)
    assert found.bound is Bound.RANGE


def test_no_sync_within_a_step_leaves_one_of_its_reductions() -> None:
    found = predicted("no_sync", job_basis(state(*two(reductions=3))))
    assert found.gain == pytest.approx(2 / 3 * 150 / basis().step_ms)
    assert "2 of 3" in found.change
    assert predict_setting(basis(), "no_sync") is None


def test_half_the_bytes_reach_from_half_of_the_reduction_to_no_gain() -> None:
    found = predicted("bf16_reduction")
    assert found.low == pytest.approx(1 - 75 / basis().step_ms, abs=0.01)
    assert found.high == pytest.approx(1.0)
    assert "slower on CPUs" in found.assumes


def test_without_cores_to_spare_the_reduction_is_refused_and_fewer_reductions_save_at_least() -> None:
    busy = {"core_time": CoreTime(elapsed_ms=1e4, on_core_ms=9e3, queued_ms=0.0)}
    contested = job_basis(state(*two(speed=busy)))
    for setting in (f"bucket_cap={MIB}", "bf16_reduction"):
        assert predicted(setting, contested).ratio is None
        assert "cores" in predicted(setting, contested).reason
    assert predicted("accumulate=4", contested).bound is Bound.AT_LEAST


def test_a_hidden_reduction_does_not_tell_what_other_buckets_would_cost_unless_a_curve_does() -> None:
    hidden = two({}, replace(LATE, exposed_ms=0.0))
    assert "does not show" in predicted("bucket_cap=1", basis_of(hidden, 100.0)).reason
    assert predicted(f"bucket_cap={64 * MIB}", basis_of(hidden, 400.0, CURVES)).gain == pytest.approx(-160 / 400)


def test_a_curve_replaces_the_bandwidth_of_the_run() -> None:
    by_curve = basis_of(two(), 394.0, CURVES)
    found = predicted(f"bucket_cap={MIB}", by_curve)
    assert found.gain == pytest.approx(140 / 394, abs=1e-3)
    assert found.low == found.high
    assert "allreduce-bench" in found.assumes


def test_a_curve_of_two_ranks_is_scaled_to_four_by_the_bytes_of_a_ring() -> None:
    assert scaled_to(CURVES, 4).mid.time_ms(MIB) == pytest.approx(15.0)
    assert scaled_to(CURVES, 2) is CURVES


def test_a_curve_follows_the_power_law_between_its_sizes_and_goes_on_in_proportion() -> None:
    assert LINE.time_ms(100) == 0.2
    assert LINE.time_ms(8 * MIB) == pytest.approx(80.0)
    assert LINE.time_ms(128 * MIB) == pytest.approx(1280.0)


def measured(size_bytes: int, p50_us: float, mode: Mode = Mode.THROUGHPUT, dtype: str = "float32") -> Measurement:
    return Measurement(
        collective=Collective.ALL_REDUCE, dtype=dtype, redop="sum", mode=mode, in_place=False, size_bytes=size_bytes,
        count=size_bytes // 4, iterations=10, first_us=p50_us, min_us=p50_us, p50_us=p50_us, p95_us=p50_us,
        p50_low_us=0.9 * p50_us, p50_high_us=1.2 * p50_us, cv=0.1, algbw_gb_s=1.0, busbw_gb_s=1.0, warm=True, wrong=0,
    )  # fmt: skip


def test_the_curve_of_a_bench_is_that_of_its_throughput_mode() -> None:
    results = [measured(size, size / 100) for size in (4096, 1024, 2048)]
    curves = curves_of([*results, measured(1024, 99.0, Mode.LATENCY), measured(1024, 99.0, dtype="bfloat16")], 2)
    assert curves is not None
    assert curves.mid.sizes_bytes == (1024, 2048, 4096)
    assert [one.time_ms(1024) for one in curves.all] == pytest.approx([0.009216, 0.01024, 0.012288])
    assert curves_of(results[:2], 2) is None


def test_as_many_workers_as_keep_up_hide_the_loader() -> None:
    waiting = {"data": 80.0, "forward": 20.0, "backward": 30.0, "exposed": 0.0}
    (found,) = predict_changes(state(*two(waiting, None)))
    assert found.setting == "workers=2"
    assert found.ratio == pytest.approx(1 - 80 / 132.5, abs=0.02)


def test_workers_that_need_more_cores_than_there_are_are_refused() -> None:
    busy = FetchTimes(batches=60, making_ms=18_000.0, pauses_ms=0.0, cpu_ms=18_000.0, workers=1)
    waiting = {"data": 200.0, "forward": 30.0, "backward": 60.0}
    (found,) = predict_changes(state(*two(waiting, None, fetch_times=busy, batches=60)))
    assert found.ratio is None
    assert "cores, and there are 2" in found.reason


def test_a_fault_that_is_repaired_saves_its_share_at_most() -> None:
    slow = Finding(
        code="DD610", kind="straggler", severity=Severity.WARNING, confidence=Confidence.HIGH, summary="", share=0.31
    )
    covered = replace(slow, code="DD804", kind="bucket-size")
    (found,) = predict_changes(state(*two({}, None)), [slow, covered, replace(slow, kind="hang", share=None)])
    assert (found.setting, found.bound) == ("without=straggler", Bound.UP_TO)
    assert found.gain == pytest.approx(0.31)


def test_the_largest_gain_comes_first_and_what_was_refused_last() -> None:
    gains = [one.gain for one in predict_changes(state(*two()))]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.2


def test_a_toy_job_and_a_healthy_one_have_nothing_to_predict() -> None:
    assert predict_changes(state(*two({"forward": 1.0, "backward": 2.0, "exposed": 2.0}, None))) == ()
    assert predict_changes(state(*two({}, None))) == ()


# More ranks than were run are predicted by a ring and a tree, from what the largest job measured.


NETWORK = ReductionCost(latency_ms=0.5, bytes_per_ms=MIB / 10)
LATE_BUCKETS = BucketGradients(
    sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(1, 17)), bucket_bytes=(MIB, 15 * MIB),
    compute_end_ms=160.0, end_ms=310.5,
)  # fmt: skip
BASIS = PredictionBasis(step_ms=400.0, gradients=LATE_BUCKETS, networks=(NETWORK,), assumes="", exposed_ms=150.5)
TWO = MeasuredSize(ranks=2, step_ms=400.0, efficiency=0.6, spread_ms=0.0)


def test_a_ring_of_more_ranks_has_more_hops_and_sends_up_to_twice_as_much() -> None:
    four = ring_cost(NETWORK, 2, 4)
    assert (four.latency_ms, NETWORK.bytes_per_ms / four.bytes_per_ms) == pytest.approx((1.5, 1.5))
    assert ring_cost(NETWORK, 2, 2) == NETWORK
    assert NETWORK.bytes_per_ms / ring_cost(NETWORK, 2, 1024).bytes_per_ms == pytest.approx(2, rel=1e-2)


def test_a_tree_has_a_logarithm_of_hops_and_half_of_the_bandwidth() -> None:
    wide = tree_cost(NETWORK, 2, 1024)
    assert wide.latency_ms == pytest.approx(2 * 10 * 0.25)
    assert NETWORK.bytes_per_ms / wide.bytes_per_ms == pytest.approx(2)


def test_the_range_is_over_ring_and_tree_and_grows() -> None:
    sizes = predict_sizes(BASIS, TWO)
    assert tuple(one.ranks for one in sizes) == SIZES
    assert sizes[0].low_ms == pytest.approx(400 + 150 * 0.75 + 0.5 * 6, abs=1)  # a ring of 8: 7 times the hops
    assert all(one.low_ms <= one.high_ms and one.low <= one.high <= 0.6 for one in sizes)
    highs = [one.high_ms for one in sizes]
    assert highs == sorted(highs)


def test_waiting_grows_with_the_spread_of_the_ranks_own_times() -> None:
    assert waiting_of(3.0, 1024) == pytest.approx(3 * sqrt(2 * log(1024)))
    still, spread = predict_sizes(BASIS, TWO), predict_sizes(BASIS, replace(TWO, spread_ms=12.0))
    beyond = 12 * (sqrt(2 * log(8)) - sqrt(2 * log(2)))
    assert spread[0].high_ms - still[0].high_ms == pytest.approx(beyond)
    assert spread[0].waiting_ms == pytest.approx(12 * sqrt(2 * log(8)))


def test_only_sizes_beyond_the_measured_one_are_predicted() -> None:
    assert [one.ranks for one in predict_sizes(BASIS, replace(TWO, ranks=256))] == [512, 1024]


def test_a_hidden_reduction_predicts_nothing() -> None:
    assert predict_sizes(replace(BASIS, networks=()), TWO) == ()
    assert predict_sizes(replace(BASIS, gradients=None), TWO) == ()


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
    assert simulate(even(), (MIB, 15 * MIB), QUICK_NETWORK) == pytest.approx(160 + 150.25)
    assert simulate(even(), (MIB,) * 16, QUICK_NETWORK) == pytest.approx(10 + 16 * 10.25)
    assert simulate(even(), (MIB,) * 16, ReductionCost(latency_ms=0, bytes_per_ms=MIB)) == pytest.approx(161)


def test_the_network_is_found_from_the_run_itself() -> None:
    gradients = even()
    found = networks_of(gradients)
    assert [network.latency_ms for network in found] == [0.0, 0.25, 0.5]
    assert found[1].bytes_per_ms == pytest.approx(QUICK_NETWORK.bytes_per_ms, rel=1e-3)
    for network in found:
        assert simulate(gradients, gradients.bucket_bytes, network) == pytest.approx(gradients.end_ms, rel=1e-3)


def test_smaller_buckets_are_predicted_to_overlap() -> None:
    gradients = even()
    cap, saved = best_cap(gradients, networks_of(gradients), [MIB // 2, MIB, 2 * MIB, 4 * MIB, 100 * MIB])
    truth = gradients.end_ms - simulate(gradients, buckets_for(gradients, cap), QUICK_NETWORK)
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


# What a job uses of the network, and what the network could carry; nothing is said where one is unknown.


def made(backend: str = "gloo", hosts: tuple[str, str] = ("a", "b"), machine: Node | None = None) -> SpeedState:
    ranks: list[Rank] = [
        replace(one, host=host, groups=(GroupState(name="0", ranks=(0, 1), backend=backend, enqueued=1),))
        for one, host in zip(two(), hosts, strict=True)
    ]
    found = state(*ranks)
    return replace(found, job=replace(found.job, ranks=tuple(ranks), machine=machine))


def test_what_a_job_uses_is_its_gradients_by_the_length_of_its_step() -> None:
    use = network_use(made())
    assert use is not None
    assert use.step_bytes == 16 * MIB
    assert use.used_gb_s == pytest.approx(16 * MIB / made().budget.wall_ms / 1e6)
    assert use.limit_gb_s is None
    assert network_words(use) is None


def test_a_bench_says_what_the_network_carries() -> None:
    use = network_use(made(), CURVES)
    assert use is not None
    assert use.limit_gb_s == pytest.approx(MIB / 10.0 / 1e6)
    said = network_words(use)
    assert said is not None
    assert said.startswith("the network could carry 0.105 GB/s (allreduce-bench); the reductions of this job use 0.04")


def test_links_count_between_hosts_over_gloo_if_all_are_known() -> None:
    interface = Interface(
        name="eth0", up=True, operstate="up", carrier=True, loopback=False, virtual=False, mtu=1500, speed_mb_s=1000,
        addresses=(), link_type=1,
    )  # fmt: skip
    network = Network(
        interfaces=(interface,), default_interface="eth0", ipv6_disabled=None, local_ports=None, master_port=NOT_ASKED,
        firewall=NOT_ASKED,
    )  # fmt: skip
    node = Node(host="a", network=network)
    one_known = network_use(made(machine=node))
    assert one_known is not None
    assert one_known.limit_gb_s is None
    one_host = network_use(made(hosts=("a", "a"), machine=node))
    assert one_host is not None
    assert one_host.limit_gb_s is None


def test_a_published_figure_counts_for_the_same_gpus_ranks_and_hosts() -> None:
    gpu = Gpu(index=0, uuid="g", name="NVIDIA H100 80GB HBM3", bus_id="0000:1b:00.0")
    gpus = Gpus(driver="570", cuda_driver="12.8", devices=(gpu,), pairs=(), persistenced=True, fabric_manager=True)
    use = network_use(made("nccl", ("a", "a"), Node(host="a", gpus=gpus)))
    assert use is not None
    assert use.limit_gb_s is None  # there is a figure for 8 ranks, not for 2


def test_without_gradients_nothing_is_said() -> None:
    ranks = two(times=None)
    assert network_use(state(*ranks), CURVES) is None
