"""What the curve of all_reduce means for DDP, against figures worked out by hand."""

import math

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode
from ddpdoctor.rules.bandwidth.ddp import LAST_WORD, advise
from tests.rules.bandwidth.sweeps import GIB, H200, KIB, MIB, bench, linear, powers, sweep, upto

ALPHA_US, ALGBW = 400.0, 1.0
GLOO = linear(ALPHA_US, ALGBW, powers(KIB, GIB), ranks=2)
"""Two ranks on two cores, as Gloo gives it: 0.4 ms and 1 GB/s."""


def cpus(rows, **changes):
    return bench(rows, ranks=2, device="cpu", name="AMD EPYC", **changes)


def time_us(size):
    return ALPHA_US + size / ALGBW / 1e3


def test_time_of_a_model_in_default_buckets():
    advice = advise(cpus(GLOO), 100_000_000)

    assert advice is not None
    assert advice.model_bytes == 400_000_000
    full, rest = divmod(400_000_000 - MIB, 25 * MIB)
    expected = (time_us(MIB) + full * time_us(25 * MIB) + time_us(rest)) / 1e3
    assert advice.whole_ms == pytest.approx(expected, rel=0.01)
    assert advice.bucket_share == pytest.approx(25 * MIB / 1e3 / ALGBW / time_us(25 * MIB), rel=0.03)
    assert advice.text[1].startswith("100M gradients in float32 (0.4 GB) in such buckets take 4")
    assert advice.text[-1] == LAST_WORD


@pytest.mark.parametrize(("size", "expected_us"), [(1000, time_us(4000)), (262_144, time_us(MIB))])
def test_a_small_model_is_one_bucket(size, expected_us):
    advice = advise(cpus(GLOO), size)

    assert advice is not None
    assert advice.whole_ms == pytest.approx(expected_us / 1e3, rel=0.01)


def gain_us(alpha_us, params, mib, waits):
    """alpha * (G/b0 - G/b1), and where a bucket is waited for (b0 - b1)/B."""
    gradients, bucket, other = 4 * params, 25 * MIB, mib * MIB
    return alpha_us * gradients * (1 / bucket - 1 / other) + waits * (bucket - other) / 1e3 / ALGBW


@pytest.mark.parametrize(
    ("alpha_us", "params", "mib", "says"),
    [
        # sqrt(alpha * B * G) = sqrt(400 us * 1 GB/s * 40 MB) = 4 MB: starts earlier, and calls more often.
        (400, 10_000_000, 4, "(between 3.20 ms lost and 18.8 ms saved)"),
        # sqrt(20 ms * 1 GB/s * 4 GB) = 283 MB
        (20_000, 1_000_000_000, 270, "(between 2.51 s saved and 2.77 s saved)"),
    ],
)
def test_the_bucket_worth_trying_is_near_the_square_root(alpha_us, params, mib, says):
    advice = advise(cpus(linear(alpha_us, ALGBW, powers(KIB, GIB), ranks=2)), params)

    assert advice is not None
    assert advice.try_mib == round(math.sqrt(alpha_us * 1e3 * ALGBW * 4 * params) / MIB) == mib
    limits = sorted(gain_us(alpha_us, params, mib, waits) / 1e3 for waits in (0, 1))
    assert advice.gain_ms == pytest.approx(gain_us(alpha_us, params, mib, waits=1) / 1e3, rel=1e-6)
    assert [advice.gain_low_ms, advice.gain_high_ms] == pytest.approx(limits, rel=1e-3)
    assert f"Worth trying: bucket_cap_mb={mib}; it saves about" in advice.text[2]
    assert says in advice.text[2]


def test_the_gain_is_as_sure_as_the_fit():
    wavy = {one.size_bytes: one.busbw_gb_s * (1.05 if at % 2 else 0.95) for at, one in enumerate(GLOO)}

    advice, sure = advise(cpus(sweep(wavy, ranks=2)), 10_000_000), advise(cpus(GLOO), 10_000_000)

    assert advice is not None
    assert sure is not None
    assert advice.try_mib == sure.try_mib == 4
    assert advice.gain_low_ms < sure.gain_low_ms < sure.gain_high_ms < advice.gain_high_ms


@pytest.mark.parametrize(
    ("made", "size", "says"),
    [
        # sqrt(400 us * 1 GB/s * 1.72 GB) is 25 MiB.
        (cpus(GLOO), 430_000_000, "No other bucket_cap_mb is clearly better than the default of 25."),
        (bench(sweep(upto(H200, GIB))), 350_000_000, "does not follow alpha + S/B (the residual is 11%)"),
        (cpus(linear(400, 1, [KIB, 32 * MIB, 64 * MIB], ranks=2)), 350_000_000, "too few sizes were measured"),
    ],
)
def test_where_no_other_bucket_can_be_named_it_is_said_why(made, size, says):
    advice = advise(made, size)

    assert advice is not None
    assert advice.whole_ms is not None
    assert (advice.try_mib, advice.gain_ms, advice.gain_low_ms, advice.gain_high_ms) == (None, None, None, None)
    assert says in advice.text[2]


def test_published_h200():
    """25 MiB take 180 us of 8 H200, at 57 % of the plateau.

    They give 254 GB/s, between 219.9 at 16 MiB and 275.8 at 32 MiB; the plateau is 450.
    """
    advice = advise(bench(sweep(upto(H200, GIB))), 350_000_000)

    assert advice is not None
    assert advice.bucket_share == pytest.approx(254 / 450, abs=0.005)
    assert advice.text[0] == (
        "DDP's default bucket of 25 MiB takes 180 us and reaches 57% of the plateau, of which 90% takes 137 MiB."
    )
    # 56 buckets of 25 MiB
    assert advice.whole_ms == pytest.approx(53.4 * 0.180, rel=0.01)


def test_a_bucket_that_reaches_the_plateau_is_not_called_too_small_for_a_dip_beyond_it():
    disturbed = {MIB: 1.0, 16 * MIB: 2.0, 32 * MIB: 2.0, 64 * MIB: 1.0, 128 * MIB: 2.0, 256 * MIB: 2.0}
    advice = advise(bench(sweep(disturbed)), None)

    assert advice is not None
    assert advice.text[0].endswith("reaches 100% of the plateau.")


def test_without_a_model_only_the_default_bucket_is_spoken_of():
    advice = advise(cpus(GLOO), None)

    assert advice is not None
    assert (advice.model_bytes, advice.whole_ms, advice.try_mib) == (None, None, None)
    assert len(advice.text) == 2


def test_beyond_the_sizes_measured_the_plateau_counts_and_is_said():
    flat = linear(1.0, 1.0, powers(KIB, 16 * MIB), ranks=2)

    advice = advise(cpus(flat), 100_000_000)

    assert advice is not None
    assert advice.whole_ms == pytest.approx(400.0, rel=0.01)
    assert advice.bucket_share is None
    assert "based on the plateau, because 25 MiB is larger than the measured sizes" in advice.text[1]


def test_beyond_the_sizes_measured_and_without_a_plateau_nothing_is_known():
    advice = advise(cpus(linear(ALPHA_US, ALGBW, powers(KIB, MIB), ranks=2)), 100_000_000)

    assert advice is not None
    assert (advice.whole_ms, advice.bucket_share, advice.try_mib) == (None, None, None)
    assert advice.text[0].endswith("is unknown: the largest measured size is 1 MiB.")
    assert advice.text[1].endswith("is unknown: measure up to 32 MiB or more.")


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ((), 2),
        (sweep({MIB: 1.0}, collective=Collective.ALL_GATHER, redop=None), 2),
        (sweep({MIB: 1.0}, ranks=1), 1),
    ],
)
def test_without_an_all_reduce_over_ranks_there_is_no_advice(rows, ranks):
    assert advise(bench(rows, ranks=ranks), 1000) is None


def test_back_to_back_calls_and_the_first_dtype_are_gone_by():
    slow, fast = {MIB: 1.0, 2 * MIB: 1.0}, {MIB: 2.0, 2 * MIB: 2.0}
    rows = [
        *sweep(slow, mode=Mode.LATENCY),
        *sweep(slow),
        *sweep(slow, dtype="bfloat16", mode=Mode.LATENCY),
        *sweep(fast, dtype="bfloat16", count=MIB // 2),
    ]
    advice = advise(bench(rows, settings=BenchSettings(dtypes=("bfloat16", "float32"))), MIB)

    assert advice is not None
    assert advice.dtype == "bfloat16"
    assert advice.model_bytes == 2 * MIB
    assert advice.whole_ms == pytest.approx(2 * MIB * 1.75 / 2e6, rel=0.01)
