"""DD405 and DD406: below what is demanded or normal, and what noise forbids to say."""

import math

import pytest

from ddpdoctor.model import bandwidth
from ddpdoctor.model.bandwidth import BenchSettings
from ddpdoctor.rules.bandwidth import curves, verdicts
from ddpdoctor.rules.bandwidth.curves import Baseline, Measured, build_curves, cannot_tell, compare
from ddpdoctor.rules.bandwidth.verdicts import LAST_WORD, advise
from tests.golden import table
from tests.rules.bandwidth import build
from tests.rules.bandwidth.build import GIB, KIB, MIB, bench, linear, members, powers, row, sweep


def scene(rows, *, expect=None, then=None, fail_below=None, reasons=(), made=None, ranks_then=8):
    made = made or bench(rows)
    baseline = Baseline(
        name="monday.json",
        results=tuple(then or ()),
        members=members(ranks_then),
        settings=BenchSettings(backend="nccl"),
    )
    return Measured(
        bench=made,
        curves=build_curves(made, expect, use_reference=True),
        comparison=None if then is None else compare(made, baseline, fail_below),
        reasons=reasons,
        expect_gb_s=expect,
        fail_below=fail_below,
    )


def cpus(rows):
    return bench(rows, device="cpu", name="AMD EPYC")


def held(rows, **given):
    """Without a reference of the table, so that the comparison speaks alone."""
    return scene(rows, made=cpus(rows), **given)


# A bench against a saved one: each size by itself, with what noise allows to say.


CURVE = {MIB: 1.0, 2 * MIB: 2.0, 4 * MIB: 4.0}


def baseline(rows=None, *, ranks=8, settings=None, **changes):
    return Baseline(
        name="monday.json",
        results=tuple(sweep(CURVE) if rows is None else rows),
        members=members(ranks, **changes),
        settings=settings or BenchSettings(backend="nccl"),
    )


def compared(ratio, noise):
    """Compare a size with a saved one, and say whether it is below, or cannot be told."""
    (change,) = compare(bench([row(MIB, ratio, noise=noise)]), baseline([row(MIB, 1.0, noise=noise)]), 0.9).changes
    return f"below: {change.below}, cannot tell: {cannot_tell(change, 0.9)}"


# What the curve of all_reduce means for DDP, against figures worked out by hand.


ALPHA_US, ALGBW = 400.0, 1.0
GLOO = linear(ALPHA_US, ALGBW, powers(KIB, GIB), ranks=2)
"""Two ranks on two cores, as Gloo gives it: 0.4 ms and 1 GB/s."""


def cpus_ddp(rows, **changes):
    return bench(rows, ranks=2, device="cpu", name="AMD EPYC", **changes)


def time_us(size):
    return ALPHA_US + size / ALGBW / 1e3


def test_time_of_a_model_in_default_buckets():
    advice = advise(cpus_ddp(GLOO), 100_000_000)

    assert advice is not None
    assert advice.model_bytes == 400_000_000
    full, rest = divmod(400_000_000 - MIB, 25 * MIB)
    expected = (time_us(MIB) + full * time_us(25 * MIB) + time_us(rest)) / 1e3
    assert advice.whole_ms == pytest.approx(expected, rel=0.01)
    assert advice.bucket_share == pytest.approx(25 * MIB / 1e3 / ALGBW / time_us(25 * MIB), rel=0.03)
    assert advice.text[1].startswith("100M gradients in float32 (0.4 GB) in such buckets take 4")
    assert advice.text[-1] == LAST_WORD


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
    advice = advise(cpus_ddp(linear(alpha_us, ALGBW, powers(KIB, GIB), ranks=2)), params)

    assert advice is not None
    assert advice.try_mib == round(math.sqrt(alpha_us * 1e3 * ALGBW * 4 * params) / MIB) == mib
    limits = sorted(gain_us(alpha_us, params, mib, waits) / 1e3 for waits in (0, 1))
    assert advice.gain_ms == pytest.approx(gain_us(alpha_us, params, mib, waits=1) / 1e3, rel=1e-6)
    assert [advice.gain_low_ms, advice.gain_high_ms] == pytest.approx(limits, rel=1e-3)
    assert f"Worth trying: bucket_cap_mb={mib}; it saves about" in advice.text[2]
    assert says in advice.text[2]


def test_the_gain_is_as_sure_as_the_fit():
    wavy = {one.size_bytes: one.busbw_gb_s * (1.05 if at % 2 else 0.95) for at, one in enumerate(GLOO)}

    advice, sure = advise(cpus_ddp(sweep(wavy, ranks=2)), 10_000_000), advise(cpus_ddp(GLOO), 10_000_000)

    assert advice is not None
    assert sure is not None
    assert advice.try_mib == sure.try_mib == 4
    assert advice.gain_low_ms < sure.gain_low_ms < sure.gain_high_ms < advice.gain_high_ms


test_rows = table("below", vars(bandwidth), vars(verdicts), vars(curves), vars(build), globals())
