"""What a curve is held to, and how it stands: published sweeps are healthy, and only what is surely below is below."""

from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.model.bandwidth import Assessment, BenchSettings, Collective, Mode, read_references
from ddpdoctor.rules.bandwidth.curves import (
    build_curves,
    describe_end,
    find_latency,
    find_plateau,
    fit_line,
    fit_of,
    size_at,
    time_at,
)
from tests.rules.bandwidth.build import A100, GIB, H200, KIB, MIB, bench, linear, members, powers, series, sweep, upto

HEALTHY, BELOW, NOISY = Assessment.HEALTHY, Assessment.BELOW, Assessment.NOISY
NO_REFERENCE, NOT_REACHED, NOT_DEFINED = Assessment.NO_REFERENCE, Assessment.NOT_REACHED, Assessment.NOT_DEFINED
A100_NAME = "NVIDIA A100-SXM4-80GB"
H100_NAME = "NVIDIA H100 80GB HBM3"


def scaled(curve, share):
    return {size: gb_s * share for size, gb_s in curve.items()}


def only(made, expect=None, *, use_reference=True):
    (curve,) = build_curves(made, expect, use_reference=use_reference)
    return curve


def test_every_figure_of_the_table_has_a_source_and_those_found_there_an_address():
    for row in read_references():
        assert row.source
        assert row.source.startswith("https://") is row.checked
        assert row.high_gb_s is None or row.high_gb_s >= row.low_gb_s
        assert row.min_size_bytes >= GIB


def test_no_question_has_two_answers_of_one_algorithm():
    asked = [(row.gpu.pattern, row.ranks, row.nodes, row.collective, row.algorithm) for row in read_references()]

    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("made", "assessment", "share", "says"),
    [
        (
            bench(sweep(upto(H200, GIB))),
            HEALTHY,
            0.970,
            "450 GB/s from 256 MiB on: healthy, 97% of the reference (8 H200",
        ),
        (bench(sweep(H200)), HEALTHY, 1.02, "471 GB/s from 512 MiB on: healthy, 102% of"),
        (bench(sweep(upto(A100, GIB)), name=A100_NAME), HEALTHY, 0.991, "(8 A100 over NVLink3: 228-235 GB/s)"),
        (
            bench(sweep(scaled(upto(A100, GIB), 0.95)), name=A100_NAME),
            HEALTHY,
            0.941,
            "215 GB/s from 512 MiB on: healthy, 94% of",
        ),
        (
            bench(sweep(scaled(upto(A100, GIB), 0.6)), name=A100_NAME),
            BELOW,
            0.594,
            "41% below the reference (8 A100 over NVLink3: 228-235 GB/s) [https://github.com/stas00/",
        ),
        (
            bench(sweep(scaled(upto(H200, GIB), 0.78))),
            BELOW,
            0.757,
            "a ring without NVLS (reduction in the switch) gives 363 GB/s",
        ),
        # 10 % below is still healthy; with an interval around that it cannot be determined.
        (
            bench(sweep(scaled(upto(A100, GIB), 0.91), noise=0.03), name=A100_NAME),
            NOISY,
            0.902,
            "Too noisy to judge: 200-212 GB/s from 512 MiB on, compared with 205 GB/s, 10% below the reference",
        ),
        # Near misses: noise that leaves no doubt.
        (bench(sweep(upto(A100, GIB), noise=0.05), name=A100_NAME), HEALTHY, 0.991, "healthy"),
        (bench(sweep(scaled(upto(A100, GIB), 0.6), noise=0.2), name=A100_NAME), BELOW, 0.594, "below"),
        # A sweep that ends early is no slow network: a healthy fabric reads an eighth of its plateau at 16 MiB.
        (bench(sweep(upto(H200, 64 * MIB))), NOT_REACHED, None, "No plateau reached: 347 GB/s at 64 MiB, and it still"),
        (
            bench(sweep(dict.fromkeys(powers(MIB, GIB), 700.0)), name="NVIDIA B200"),
            NOT_REACHED,
            None,
            "No plateau reached: 700 GB/s at 1 GiB, and the reference applies from 8 GiB on.",
        ),
        # ... but what is reached already may be enough.
        (bench(sweep(scaled(upto(H200, 64 * MIB), 1.4))), HEALTHY, 1.045, "485 GB/s at 64 MiB: healthy"),
    ],
)
def test_assessment_against_the_table(made, assessment, share, says):
    curve = only(made)

    assert curve.assessment is assessment, curve.verdict
    assert says in curve.verdict
    assert curve.verdict.endswith(".")
    assert curve.reference is not None
    if share is not None:
        assert curve.share == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (bench(sweep(H200), name="NVIDIA L4"), "no reference for this hardware: nccl on NVIDIA L4."),
        (bench(sweep(H200), name="NVIDIA GH200 480GB"), "no reference for this hardware: nccl on NVIDIA GH200 480GB."),
        (bench(sweep(H200), name="NVIDIA H100 PCIe"), "no reference for this hardware"),
        (bench(sweep(H200), name=f"{H100_NAME} MIG 1g.10gb"), "no reference for this hardware"),
        (bench(sweep(H200, ranks=2), ranks=2), "no reference for all_reduce of 2 NVIDIA H200 on 1 host (available:"),
        (bench(sweep(H200), hosts=2), "no reference for all_reduce of 8 NVIDIA H200 on 2 hosts"),
        (
            bench(sweep(H200, collective=Collective.BROADCAST, redop=None)),
            "no reference for broadcast of 8 NVIDIA H200 on 1 host",
        ),
        (bench(sweep(H200, dtype="int8")), "the references are for sums of float32, float16 and bfloat16"),
        (bench(sweep(H200, redop="max")), "the references are for sums"),
        (bench(sweep(H200), backend="gloo"), "no reference for this hardware: gloo on NVIDIA H200"),
        (
            bench(sweep(H200), name="AMD EPYC", device="cpu"),
            "471 GB/s from 512 MiB on; no reference for gloo on CPUs: there is no known peak.",
        ),
        (
            bench(sweep(upto(H200, 64 * MIB)), name="AMD EPYC", device="cpu"),
            "347 GB/s at 64 MiB, no plateau (it still rises by 26% from 32 MiB to 64 MiB); no reference for gloo",
        ),
        (
            replace(bench(sweep(H200)), members=(*members(4), *members(8, name=H100_NAME)[4:])),
            "no reference for mixed hardware: NVIDIA H100 80GB HBM3, NVIDIA H200",
        ),
    ],
)
def test_what_the_table_does_not_have_is_held_to_nothing(made, says):
    curve = only(made)

    assert curve.assessment is NO_REFERENCE
    assert (curve.reference, curve.share) == (None, None)
    assert says in curve.verdict


def test_reference_none_is_held_to_nothing():
    curve = only(bench(sweep(H200)), use_reference=False)

    assert curve.assessment is NO_REFERENCE
    assert "the comparison with references is disabled" in curve.verdict


def test_one_rank_has_no_assessment():
    curve = only(bench(sweep({MIB: 1.0, 2 * MIB: 1.0}, ranks=1), ranks=1), 460.0)

    assert curve.assessment is NOT_DEFINED
    assert curve.verdict == "n/a: with one rank, no data crosses a link."
    assert (curve.plateau_gb_s, curve.share, curve.half_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("variables", "gb_s"),
    [
        ({}, 464),
        ({"NCCL_NVLS_ENABLE": "1"}, 464),
        ({"NCCL_NVLS_ENABLE": "0"}, 363),
        ({"NCCL_ALGO": "Ring"}, 363),
        ({"NCCL_ALGO": "NVLS,Ring"}, 464),
        ({"NCCL_ALGO": "^Tree"}, 464),
        ({"NCCL_ALGO": "^NVLS"}, 363),
        ({"NCCL_ALGO": "^NVLSTree"}, 464),
        ({"NCCL_ALGO": "broadcast:ring; allreduce:tree,ring"}, 363),
        ({"NCCL_ALGO": "broadcast:ring"}, 464),
    ],
)
def test_where_the_switch_must_not_reduce_the_ring_is_the_reference(variables, gb_s):
    curve = only(bench(sweep(scaled(upto(H200, GIB), 0.5)), variables=variables))

    assert curve.assessment is BELOW
    assert curve.reference is not None
    assert curve.reference.gb_s == gb_s
    assert ("is set: without it, 464 GB/s is typical" in curve.verdict) is (gb_s == 363)


@pytest.mark.parametrize(
    ("rows", "assessment", "says"),
    [
        ({MIB: 1.0, 2 * MIB: 1.0}, HEALTHY, "1.00 GB/s from 1 MiB on: healthy, 110% of --expect 0.91 GB/s."),
        ({MIB: 0.8, 2 * MIB: 0.8}, BELOW, "0.80 GB/s from 1 MiB on: 12% below --expect 0.91 GB/s."),
        # No margin is taken of what the user demands: his figure within the interval is open.
        (
            {MIB: 0.905, 2 * MIB: 0.905},
            NOISY,
            "Too noisy to judge: 0.90-0.91 GB/s from 1 MiB on, compared with --expect",
        ),
        ({MIB: 0.4, 2 * MIB: 0.7}, NOT_REACHED, "No plateau reached: 0.70 GB/s at 2 MiB, and it still rises by 75%"),
        ({MIB: 0.7, 2 * MIB: 1.3}, HEALTHY, "1.30 GB/s at 2 MiB: healthy, 143% of --expect"),
        ({MIB: 0.4, 2 * MIB: 0.1}, BELOW, "0.10 GB/s at 2 MiB: 89% below --expect"),
        ({MIB: 0.0}, NOT_DEFINED, "n/a"),
    ],
)
def test_assessment_against_what_is_expected(rows, assessment, says):
    curve = only(bench(sweep(rows) if all(rows.values()) else sweep({MIB: 1.0}, ranks=1), device="cpu"), 0.91)

    assert curve.assessment is assessment, curve.verdict
    assert says in curve.verdict


@pytest.mark.parametrize(("expect", "assessment"), [(0.1, HEALTHY), (0.6, NOISY), (1.5, NOISY), (3.0, BELOW)])
def test_a_few_calls_tell_what_is_off_by_far(expect, assessment):
    made = bench(sweep({MIB: 1.0, 2 * MIB: 1.0}, iterations=2), device="cpu")

    assert only(made, expect).assessment is assessment


def test_expect_goes_before_the_table():
    curve = only(bench(sweep(upto(H200, GIB))), 500.0)

    assert curve.assessment is BELOW
    assert curve.reference is not None
    assert (curve.reference.gb_s, curve.reference.source) == (500.0, "--expect")


def test_calls_one_by_one_are_held_to_nothing_where_calls_back_to_back_were_measured():
    rows = [*sweep(upto(H200, GIB), mode=Mode.LATENCY), *sweep(upto(H200, GIB))]
    latency, throughput = build_curves(bench(rows), None, use_reference=True)
    alone = only(bench(sweep(upto(H200, GIB), mode=Mode.LATENCY)))

    assert (latency.assessment, throughput.assessment, alone.assessment) == (NO_REFERENCE, HEALTHY, HEALTHY)
    assert "back-to-back calls" in latency.verdict


def test_each_collective_dtype_operator_mode_and_place_is_a_curve():
    rows = [
        *sweep({MIB: 1.0, 2 * MIB: 1.0}),
        *sweep({MIB: 1.0}, in_place=True),
        *sweep({MIB: 1.0}, dtype="bfloat16"),
        *sweep({MIB: 1.0}, collective=Collective.ALL_GATHER, redop=None),
        *sweep({MIB: 1.0}, mode=Mode.LATENCY),
    ]
    curves = build_curves(bench(rows, settings=BenchSettings(backend="gloo")), None, use_reference=True)

    assert len(curves) == 5
    assert curves[0].plateau_from_bytes == MIB


def test_what_a_curve_holds():
    curve = only(bench(linear(40.0, 12.5, powers(KIB, GIB)), name="x"))

    assert curve.plateau_gb_s == pytest.approx(12.5 * 1.75, rel=0.02)
    assert curve.latency_us == pytest.approx(40.4, rel=0.02)
    assert curve.fit is not None
    # n1/2 = alpha * B
    assert curve.half_bytes == pytest.approx(40e-6 * 12.5e9, rel=0.05)


@pytest.mark.parametrize("largest", powers(64 * KIB, 128 * MIB))
@pytest.mark.parametrize(("name", "healthy"), [("NVIDIA H200", H200), (A100_NAME, A100)])
def test_no_healthy_sweep_is_below_however_early_it_ends(name, healthy, largest):
    curve = only(bench(sweep(upto(healthy, largest)), name=name))

    assert curve.assessment in {NOT_REACHED, HEALTHY}, curve.verdict


@pytest.mark.parametrize(
    ("expect", "backend", "assessment"),
    [
        (10_000.0, "gloo", BELOW),
        # Within four times what the last step came at, larger sizes may reach it.
        (20.0, "gloo", NOT_REACHED),
        # Over NCCL the algorithm changes with the size.
        (10_000.0, "nccl", NOT_REACHED),
    ],
)
def test_what_is_out_of_reach_needs_no_plateau(expect, backend, assessment):
    made = bench(linear(400.0, 5.0, powers(KIB, MIB), noise=0.05), device="cpu", backend=backend)

    assert only(made, expect).assessment is assessment


@pytest.mark.parametrize(
    "rows", [{MIB: 0.5}, {MIB: 0.1, 2 * MIB: 0.9}], ids=["one size", "a larger size that is faster"]
)
def test_no_tcp_carries_what_no_card_does(rows):
    assert only(bench(sweep(rows), device="cpu"), 101.0).assessment is BELOW
    assert only(bench(sweep(rows), device="cpu"), 99.0).assessment is NOT_REACHED


# t(S) = alpha + S / B, fitted to a curve, and interpolation on it.


def test_a_line_is_found_again():
    fit = fit_of(fit_line(series(linear(40.0, 12.5, powers(KIB, GIB)))))

    assert fit is not None
    assert fit.alpha_us == pytest.approx(40.0)
    assert fit.bandwidth_gb_s == pytest.approx(12.5)
    assert fit.residual == pytest.approx(0.0, abs=1e-9)
    assert fit.fits


def test_figures_and_variances_are_those_of_weighted_least_squares():
    one = series(sweep(A100))
    sizes = np.array([point.size_bytes for point in one.points], dtype=float)
    times = np.array([point.p50_us for point in one.points])
    (slope, alpha), covariance = np.polyfit(sizes, times, 1, w=1 / times, cov=True)

    line = fit_line(one)

    assert line is not None
    assert (line.alpha_us, line.us_per_byte) == pytest.approx((alpha, slope), rel=1e-6)
    assert (line.var_slope, line.var_alpha) == pytest.approx((covariance[0, 0], covariance[1, 1]), rel=1e-6)
    assert line.covariance == pytest.approx(covariance[0, 1], rel=1e-6)
    assert line.residual == pytest.approx(np.sqrt(np.mean(((alpha + slope * sizes - times) / times) ** 2)))


@pytest.mark.parametrize("curve", [upto(H200, GIB), upto(A100, GIB)], ids=["H200", "A100"])
def test_nvlink_does_not_follow_it(curve):
    fit = fit_of(fit_line(series(sweep(curve))))

    assert fit is not None
    assert fit.residual > 0.10
    assert not fit.fits


def test_three_sizes_fit_anything():
    assert fit_line(series(linear(40.0, 12.5, [KIB, MIB, GIB]))) is None


def test_a_latency_below_zero_is_no_fit():
    curve = {size: 1.0 / (1 + size / (64 * MIB)) for size in powers(MIB, 64 * MIB)}
    line = fit_line(series(sweep(curve)))

    assert line is not None
    assert line.alpha_us < 0
    assert not line.fits


def test_a_time_that_falls_with_the_size_has_no_bandwidth():
    curve = {size: size**2 / 1e12 for size in powers(MIB, 16 * MIB)}

    assert fit_of(fit_line(series(sweep(curve)))) is None


@pytest.mark.parametrize(
    ("size", "time_us"), [(KIB // 2, 100.1), (KIB, 100.1), (25 * MIB, 2721.4), (64 * MIB, 6810.9), (65 * MIB, None)]
)
def test_time_between_the_sizes_measured(size, time_us):
    found = time_at(series(linear(100.0, 10.0, powers(KIB, 64 * MIB))), size)

    # Between two sizes the curve is a straight line on logarithmic axes, which is less than 1 % off here.
    assert found == (None if time_us is None else pytest.approx(time_us, rel=0.01))


@pytest.mark.parametrize(
    ("curve", "gb_s", "size"),
    [
        ({MIB: 1.0, 2 * MIB: 2.0, 4 * MIB: 4.0}, 3.0, 3 * MIB),
        ({MIB: 1.0, 2 * MIB: 4.0, 4 * MIB: 1.0, 8 * MIB: 4.0}, 2.0, 5931642),
        ({MIB: 3.0, 2 * MIB: 4.0}, 2.0, None),
        ({MIB: 1.0, 2 * MIB: 1.5}, 2.0, None),
    ],
)
def test_the_size_that_reaches_a_bandwidth(curve, gb_s, size):
    found = size_at(series(sweep(curve)), gb_s)

    assert found == (None if size is None else pytest.approx(size, rel=1e-6))


# Where a curve is flat, and what is said where it is not.


RESTLESS = {64 * MIB: 1.0, 128 * MIB: 0.9, 256 * MIB: 1.1}


@pytest.mark.parametrize(
    ("curve", "noise", "gb_s", "from_bytes", "spread"),
    [
        (upto(H200, GIB), 0.0, 456.9, 512 * MIB, 0.029),
        (H200, 0.0, 473.1, GIB, 0.039),
        (upto(A100, GIB), 0.0, 225.9, 512 * MIB, 0.028),
        # Faster sizes that fit into a cache are not the plateau.
        ({MIB: 2.0, 2 * MIB: 2.1, 4 * MIB: 1.0, 8 * MIB: 0.98, 16 * MIB: 1.01}, 0.01, 1.0, 4 * MIB, 0.03),
        # One size that was disturbed ends it.
        ({MIB: 1.0, 2 * MIB: 0.6, 4 * MIB: 1.0, 8 * MIB: 1.0}, 0.0, 1.0, 4 * MIB, 0.0),
        # Within the noise nothing differs.
        (RESTLESS, 0.2, 1.0, 64 * MIB, 0.2),
        # ... but noise does not make a plateau of a slope.
        ({MIB: 0.25, 2 * MIB: 0.5, 4 * MIB: 1.0, 8 * MIB: 1.05}, 0.6, 1.025, 4 * MIB, 0.049),
    ],
)
def test_the_plateau_is_what_the_largest_sizes_have_in_common(curve, noise, gb_s, from_bytes, spread):
    found = find_plateau(series(sweep(curve, noise=noise)))

    assert found is not None
    assert found.gb_s == pytest.approx(gb_s, rel=1e-3)
    assert found.from_bytes == from_bytes
    assert found.to_bytes == max(curve)
    assert found.spread == pytest.approx(spread, abs=2e-3)
    assert found.low_gb_s == pytest.approx(found.gb_s / (1 + noise), rel=0.02)
    assert found.high_gb_s == pytest.approx(found.gb_s / (1 - noise), rel=0.02)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (sweep(upto(H200, 64 * MIB)), "it still rises by 26% from 32 MiB to 64 MiB"),
        (sweep({MIB: 2.0, 2 * MIB: 1.0}), "it still falls by 50% from 1 MiB to 2 MiB"),
        (sweep(RESTLESS, noise=0.01), "it still rises by 22% from 128 MiB to 256 MiB"),
        (sweep({GIB: 460.0}), "one size is not enough"),
        # 10 % more bytes: no slope would show.
        (sweep({10 * MIB: 1.0, 11 * MIB: 1.0}), "the range from 10 MiB to 11 MiB is too small"),
    ],
)
def test_without_a_plateau_it_is_said_why(rows, says):
    assert find_plateau(series(rows)) is None
    assert describe_end(series(rows)) == says


def test_one_rank_has_no_plateau():
    assert find_plateau(series(sweep({MIB: 1.0, 2 * MIB: 1.0}, ranks=1))) is None


def test_few_calls_prove_little_however_close_they_were():
    found = find_plateau(series(sweep({MIB: 1.0, 2 * MIB: 1.0}, noise=0.0, iterations=4)))

    assert found is not None
    assert (found.low_gb_s, found.high_gb_s) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("rows", "latency_us"),
    [
        (linear(100, 10, powers(KIB, 64 * MIB)), 100.8),
        (sweep(H200), 39.8),
        # Smaller than the smallest was not measured: its time is half transfer.
        (linear(100, 10, powers(MIB, 64 * MIB)), None),
        (linear(100, 10, [KIB]), None),
    ],
)
def test_latency_is_of_sizes_that_cost_the_same(rows, latency_us):
    found = find_latency(series(rows))

    assert found == (None if latency_us is None else pytest.approx(latency_us, rel=0.01))
