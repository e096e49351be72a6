"""t(S) = alpha + S / B, fitted to a curve, and interpolation on it."""

import numpy as np
import pytest

from ddpdoctor.rules.bandwidth.shape import fit_line, fit_of
from ddpdoctor.rules.bandwidth.sweeps import size_at, time_at
from tests.rules.bandwidth.sweeps import A100, GIB, H200, KIB, MIB, linear, powers, series, sweep, upto


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
    ("size", "time_us"),
    [(KIB // 2, 100.1), (KIB, 100.1), (25 * MIB, 2721.4), (64 * MIB, 6810.9), (65 * MIB, None)],
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
