"""What a curve is held to, and how it stands: published sweeps are healthy, and only what is surely below is below."""

import numpy as np
import pytest

from ddpdoctor.model.bandwidth import Assessment, read_references
from ddpdoctor.rules.bandwidth import curves
from ddpdoctor.rules.bandwidth.curves import build_curves, describe_end, find_plateau, fit_line
from tests.golden import table
from tests.rules.bandwidth import build
from tests.rules.bandwidth.build import A100, GIB, H200, KIB, MIB, bench, linear, powers, series, sweep, upto

A100_NAME = "NVIDIA A100-SXM4-80GB"


def scaled(curve, share):
    return {size: gb_s * share for size, gb_s in curve.items()}


def only(made, expect=None, *, use_reference=True):
    (curve,) = build_curves(made, expect, use_reference=use_reference)
    return curve


def said(made, expect=None, *, use_reference=True):
    """Return how each curve stands, and what is said of it."""
    lines = []
    for curve in build_curves(made, expect, use_reference=use_reference):
        share = "" if curve.share is None else f", {curve.share:.3f} of {curve.reference.gb_s:g} GB/s"
        lines.append(f"{curve.assessment.value}{share}: {curve.verdict}")
    return "\n".join(lines)


def no_plateau(one):
    return find_plateau(one), describe_end(one)


def test_every_figure_of_the_table_has_a_source_and_those_found_there_an_address():
    for row in read_references():
        reference = row.reference
        assert reference.source
        assert reference.source.startswith("https://") is row.checked
        assert reference.high_gb_s is None or reference.high_gb_s >= reference.gb_s
        assert reference.min_size_bytes >= GIB


def test_no_question_has_two_answers_of_one_algorithm():
    asked = [(row.gpu.pattern, row.ranks, row.nodes, row.collective, row.algorithm) for row in read_references()]

    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("largest", powers(64 * KIB, 128 * MIB))
@pytest.mark.parametrize(("name", "healthy"), [("NVIDIA H200", H200), (A100_NAME, A100)])
def test_no_healthy_sweep_is_below_however_early_it_ends(name, healthy, largest):
    curve = only(bench(sweep(upto(healthy, largest)), name=name))

    assert curve.assessment in {Assessment.NOT_REACHED, Assessment.HEALTHY}, curve.verdict


# t(S) = alpha + S / B, fitted to a curve, and interpolation on it.


def test_figures_and_variances_are_those_of_weighted_least_squares():
    one = series(sweep(A100))
    sizes = np.array([point.size_bytes for point in one], dtype=float)
    times = np.array([point.p50_us for point in one])
    (slope, alpha), covariance = np.polyfit(sizes, times, 1, w=1 / times, cov=True)

    line = fit_line(one)

    assert line is not None
    assert (line.alpha_us, line.us_per_byte) == pytest.approx((alpha, slope), rel=1e-6)
    assert (line.var_slope, line.var_alpha) == pytest.approx((covariance[0, 0], covariance[1, 1]), rel=1e-6)
    assert line.covariance == pytest.approx(covariance[0, 1], rel=1e-6)
    assert line.residual == pytest.approx(np.sqrt(np.mean(((alpha + slope * sizes - times) / times) ** 2)))


def test_three_sizes_fit_anything():
    assert fit_line(series(linear(40.0, 12.5, [KIB, MIB, GIB]))) is None


def test_a_latency_below_zero_is_no_fit():
    curve = {size: 1.0 / (1 + size / (64 * MIB)) for size in powers(MIB, 64 * MIB)}
    line = fit_line(series(sweep(curve)))

    assert line is not None
    assert line.alpha_us < 0
    assert not line.fits


test_rows = table("assessment", vars(curves), vars(build), globals())
