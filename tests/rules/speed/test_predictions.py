"""What changes are predicted to gain, over jobs whose steps and gradients are known."""

from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import Collective, Measurement, Mode
from ddpdoctor.model.facts import Rank
from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.gradient_times import GradientTimes
from ddpdoctor.model.predictions import Bound, PredictedStep
from ddpdoctor.model.speed import CoreTime
from ddpdoctor.model.steps import FetchTimes
from ddpdoctor.rules.speed.predictions import PredictionBasis, basis_of, job_basis, predict_changes, predict_setting
from ddpdoctor.rules.speed.reduction import MIB, MeasuredCurves, ReductionCurve, curves_of, scaled_to

from .jobs import rank, state

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
