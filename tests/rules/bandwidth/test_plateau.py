"""Where a curve is flat, and what is said where it is not."""

import pytest

from ddpdoctor.rules.bandwidth.shape import describe_end, find_latency, find_plateau
from tests.rules.bandwidth.sweeps import A100, GIB, H200, KIB, MIB, linear, powers, series, sweep, upto

NOISY = {64 * MIB: 1.0, 128 * MIB: 0.9, 256 * MIB: 1.1}


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
        (NOISY, 0.2, 1.0, 64 * MIB, 0.2),
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
        (sweep(NOISY, noise=0.01), "it still rises by 22% from 128 MiB to 256 MiB"),
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
