"""DD405 and DD406: below what is demanded or normal, and what noise forbids to say."""

import math
from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode, Reason
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.rules.bandwidth.curves import Baseline, Measured, build_curves, cannot_tell, compare
from ddpdoctor.rules.bandwidth.verdicts import LAST_WORD, MEASURE_MORE, advise, check_below, check_noise
from tests.rules.bandwidth.build import GIB, H200, KIB, MIB, bench, linear, members, powers, row, sweep, upto

PASSED, FAILED, SKIPPED, UNKNOWN = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.INCONCLUSIVE
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
FULL = upto(H200, GIB)
HALF = {size: gb_s / 2 for size, gb_s in FULL.items()}
SHORT = upto(H200, 64 * MIB)
NARROW = Reason(text="GPU 0 has 8 of 16 PCIe lanes", source="DD320 pcie", hosts=("node0",), fix="Reseat the card.")
FLAT = {MIB: 1.0, 2 * MIB: 1.0}


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


@pytest.mark.parametrize(
    ("given", "outcome", "severity", "says"),
    [
        # The table of known hardware
        (scene(sweep(FULL)), PASSED, None, "450 GB/s from 256 MiB on: healthy"),
        (scene(sweep(HALF)), FAILED, WARNING, "all_reduce float32: 225 GB/s from 256 MiB on: 51% below the reference"),
        (scene(sweep(SHORT)), SKIPPED, None, "No plateau reached"),
        (
            scene(sweep({size: gb_s * 0.95 for size, gb_s in FULL.items()}, noise=0.15)),
            SKIPPED,
            None,
            "Too noisy to judge",
        ),
        (scene(sweep(FLAT), made=cpus(sweep(FLAT))), SKIPPED, None, "no reference for gloo on CPUs"),
        (scene(()), SKIPPED, None, "nothing was measured"),
        # --expect
        (scene(sweep(FULL), expect=400.0), PASSED, None, "healthy, 113% of --expect 400 GB/s"),
        (scene(sweep(FULL), expect=500.0), FAILED, ERROR, "10% below --expect 500 GB/s"),
        (scene(sweep(SHORT), expect=400.0), UNKNOWN, None, "all_reduce float32: No plateau reached"),
        (scene(sweep(FLAT, noise=0.2), expect=1.0), UNKNOWN, None, "all_reduce float32: Too noisy to judge"),
        (scene(sweep(FLAT, ranks=1), expect=1.0, made=bench(sweep(FLAT, ranks=1), ranks=1)), UNKNOWN, None, "n/a"),
        (scene((), expect=1.0), UNKNOWN, None, "no measurement can be compared with --expect"),
        # --compare with --fail-below
        (held(sweep(FLAT), then=sweep(FLAT), fail_below=0.9), PASSED, None, "none of 2 sizes is below 90%"),
        (
            held([row(MIB, 1.0), row(2 * MIB, 0.5)], then=sweep(FLAT), fail_below=0.9),
            FAILED,
            ERROR,
            "all_reduce float32 throughput of 2 MiB reaches 50% (49%-51%) of its earlier speed",
        ),
        (
            held(sweep({MIB: 0.88, 2 * MIB: 1.0}, noise=0.03), then=sweep(FLAT), fail_below=0.9),
            UNKNOWN,
            None,
            "too noisy to judge 1 of 2 sizes: all_reduce float32 throughput of 1 MiB reaches 88%",
        ),
        (
            held(sweep(FLAT), then=sweep(FLAT), fail_below=0.9, ranks_then=4),
            UNKNOWN,
            None,
            "the baseline has no case in common with this run (ranks: 4 then, 8 now)",
        ),
        # A baseline that nothing is demanded of is shown, and judged by nobody.
        (scene([row(MIB, 0.1)], then=[row(MIB, 1.0)], made=cpus([row(MIB, 0.1)])), SKIPPED, None, "no reference"),
    ],
)
def test_below(given, outcome, severity, says):
    answer = check_below(given)

    assert answer.outcome is outcome, answer.seen
    assert says in answer.seen
    assert [problem.severity for problem in answer.problems] == ([severity] if severity else [])


def test_why_stands_beside_the_figure_and_the_first_remedy_is_the_fix():
    (alone,) = check_below(scene(sweep(HALF))).problems
    (explained,) = check_below(scene(sweep(HALF), reasons=(NARROW, replace(NARROW, text="and more", fix="")))).problems

    assert alone.fix == MEASURE_MORE
    assert explained.fix == "Reseat the card."
    assert explained.evidence == (
        "the sizes of the plateau differ by 6%",
        "GPU 0 has 8 of 16 PCIe lanes [DD320 pcie]",
        "and more [DD320 pcie]",
    )


@pytest.mark.parametrize(
    ("made", "expect", "confidence"),
    [
        (bench(sweep(HALF)), None, Confidence.HIGH),
        (bench(sweep(HALF)), 460.0, Confidence.HIGH),
        # The source of this figure was not found again.
        (bench(sweep(dict.fromkeys(FULL, 50.0)), name="Tesla V100-SXM2-16GB"), None, Confidence.MEDIUM),
        # What network the hosts have, the table does not know.
        (bench(sweep(HALF, ranks=32), ranks=32, hosts=4, name="NVIDIA B200"), None, Confidence.MEDIUM),
    ],
)
def test_how_sure_it_is(made, expect, confidence):
    (problem,) = check_below(scene((), expect=expect, made=made)).problems

    assert problem.confidence is confidence


def test_many_slower_sizes_are_one_finding_with_the_worst_first():
    now = sweep({size: gb_s * (0.5 if size > MIB else 0.7) for size, gb_s in FULL.items()})

    (problem,) = check_below(scene(now, then=sweep(FULL), fail_below=0.9, made=cpus(now))).problems

    assert problem.summary.startswith("all_reduce float32 throughput of ")
    assert "reaches 50% (49%-51%) of its earlier speed: " in problem.summary
    assert problem.summary.endswith(": below --fail-below 90% of monday.json. 15 more of 16 sizes are below it.")
    assert len([line for line in problem.evidence if "of its earlier speed" in line]) == 6


def test_a_demand_that_is_open_counts_before_a_warning():
    answer = check_below(scene(sweep(HALF, noise=0.3), then=sweep(HALF), fail_below=0.9))

    assert answer.outcome is UNKNOWN
    assert [problem.severity for problem in answer.problems] == [WARNING]
    assert "52% below the reference (8 H200" in answer.problems[0].summary


def test_a_hundredth_is_not_said_to_be_all_below():
    (problem,) = check_below(scene(sweep(dict.fromkeys(FULL, 2.0)))).problems

    assert "2.00 GB/s from 32 KiB on: less than 1% of the reference (8 H200" in problem.summary


def test_what_is_below_counts_beside_what_cannot_be_determined():
    rows = [*sweep(FLAT), *sweep({MIB: 0.4, 2 * MIB: 0.8}, dtype="bfloat16")]

    answer = check_below(scene(rows, expect=5.0))

    assert answer.outcome is FAILED
    assert [problem.summary.split(":")[0] for problem in answer.problems] == ["all_reduce float32"]


@pytest.mark.parametrize(
    ("given", "outcome", "says"),
    [
        (scene(sweep(FULL)), PASSED, "the noise is low enough"),
        (scene(sweep(HALF)), PASSED, "the noise is low enough"),
        (scene(sweep(SHORT)), PASSED, "the noise is low enough"),
        (scene((), made=cpus(sweep(FLAT, noise=0.5))), SKIPPED, "nothing to compare with"),
        (scene(()), SKIPPED, "nothing to compare with"),
        (
            scene(sweep(FLAT, noise=0.2), expect=1.0),
            FAILED,
            "all_reduce float32 in throughput mode: Too noisy to judge",
        ),
        (scene(sweep(FLAT, noise=0.3), then=sweep(FLAT), fail_below=0.9), FAILED, "2 of 2 sizes against monday.json"),
        (scene(sweep(FLAT, noise=0.2), then=sweep(FLAT), made=cpus(sweep(FLAT, noise=0.2))), PASSED, "low enough"),
    ],
)
def test_noise(given, outcome, says):
    answer = check_noise(given)

    assert answer.outcome is outcome
    assert says in answer.seen
    assert all(says in problem.summary for problem in answer.problems)
    assert len(answer.problems) == (outcome is FAILED)


SHARED = replace(bench(sweep(FULL)), members=members(gpu_ranks=2))
"""As good as eight GPUs of their own."""


@pytest.mark.parametrize(("expect", "outcome"), [(None, SKIPPED), (1.0, UNKNOWN), (900.0, UNKNOWN)])
def test_ranks_that_share_a_gpu_measure_no_link(expect, outcome):
    answer = check_below(scene((), made=SHARED, expect=expect))

    assert (answer.outcome, answer.problems) == (outcome, ())
    assert "ranks 0-7 share a GPU: these figures are not those of any link" in answer.seen


# A bench against a saved one: each size by itself, with what noise allows to say.


CURVE = {MIB: 1.0, 2 * MIB: 2.0, 4 * MIB: 4.0}


def baseline(rows=None, *, ranks=8, settings=None, **changes):
    return Baseline(
        name="monday.json",
        results=tuple(sweep(CURVE) if rows is None else rows),
        members=members(ranks, **changes),
        settings=settings or BenchSettings(backend="nccl"),
    )


def test_each_size_is_compared_by_itself():
    now = bench([row(MIB, 1.0), row(2 * MIB, 1.0), row(4 * MIB, 8.0)])

    found = compare(now, baseline(), 0.9)

    assert [change.ratio for change in found.changes] == pytest.approx([1.0, 0.5, 2.0])
    assert [change.below for change in found.changes] == [False, True, False]
    assert [change.size_bytes for change in found.changes] == [MIB, 2 * MIB, 4 * MIB]
    assert found.changes[1].now_us == pytest.approx(2 * found.changes[1].then_us)
    assert (found.baseline, found.differences, found.missing) == ("monday.json", (), 0)


@pytest.mark.parametrize(
    ("then_noise", "now_noise", "low", "high"),
    [(0.0, 0.0, 0.85, 0.85), (0.05, 0.0, 0.8075, 0.8925), (0.0, 0.1, 0.7727, 0.9444), (0.05, 0.1, 0.734, 0.992)],
)
def test_the_interval_of_the_ratio_has_the_noise_of_both_runs(then_noise, now_noise, low, high):
    now = bench([row(MIB, 0.85, noise=now_noise)])
    (change,) = compare(now, baseline([row(MIB, 1.0, noise=then_noise)]), 0.9).changes

    assert (change.ratio_low, change.ratio_high) == pytest.approx((low, high), abs=1e-3)
    assert change.below is (high < 0.9)


@pytest.mark.parametrize(
    ("ratio", "noise", "below", "untold"),
    [
        (1.0, 0.01, False, False),
        (0.5, 0.05, True, False),
        (0.88, 0.005, True, False),
        # Looks slower, and may not be.
        (0.88, 0.03, False, True),
        # May be a little slower, and does not look so: let pass.
        (0.95, 0.04, False, False),
        # So noisy that a loss of a fifth would not be seen.
        (1.0, 0.15, False, True),
    ],
)
def test_below_unknown_or_let_pass(ratio, noise, below, untold):
    now = bench([row(MIB, ratio, noise=noise)])
    (change,) = compare(now, baseline([row(MIB, 1.0, noise=noise)]), 0.9).changes

    assert (change.below, cannot_tell(change, 0.9)) == (below, untold)


def test_a_few_calls_of_either_run_tell_only_what_is_off_by_far():
    few = [row(MIB, 1.0, noise=0.0, iterations=3)]

    (half,) = compare(bench([row(MIB, 0.5, noise=0.0)]), baseline(few), 0.9).changes
    (quarter,) = compare(bench([row(MIB, 0.25, noise=0.0)]), baseline(few), 0.9).changes

    assert (half.below, half.ratio_high) == (False, pytest.approx(1.0))
    assert (quarter.below, quarter.ratio_high) == (True, pytest.approx(0.5))


def test_without_a_limit_nothing_is_below():
    (change,) = compare(bench([row(MIB, 0.1)]), baseline([row(MIB, 1.0)]), None).changes

    assert not change.below


@pytest.mark.parametrize(
    "other", [{"mode": Mode.LATENCY}, {"dtype": "bfloat16"}, {"redop": "max"}, {"in_place": True}, {"size_bytes": KIB}]
)
def test_only_the_same_case_is_compared(other):
    found = compare(bench([row(MIB, 1.0), row(2 * MIB, 2.0, **other)]), baseline(), 0.9)

    assert len(found.changes) == 1
    assert found.missing == 1


def test_another_number_of_ranks_has_nothing_in_common():
    found = compare(bench(sweep(CURVE, ranks=4), ranks=4), baseline(), 0.9)

    assert found.changes == ()
    assert found.missing == 3
    assert found.differences[0] == "ranks: 8 then, 4 now"


def test_what_is_not_alike_is_said():
    then = baseline(
        name="NVIDIA H100 80GB HBM3",
        settings=BenchSettings(backend="gloo", cold=True, budget_s=60),
        variables={"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eth0"},
    )
    then = replace(then, members=tuple(replace(one, host="old", torch="2.12.0", nccl="2.20.5") for one in then.members))
    now = bench(sweep(CURVE), variables={"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1"})

    assert compare(now, then, None).differences == (
        "backend: gloo then, nccl now",
        "hosts: old then, node0 now",
        "device: NVIDIA H100 80GB HBM3 then, NVIDIA H200 now",
        "torch: 2.12.0 then, 2.13.0 now",
        "NCCL: 2.20.5 then, 2.27.7 now",
        "buffers: cold then, warm now",
        "budget: 60 s then, 30 s now",
        "GLOO_SOCKET_IFNAME: eth0 then, eth1 now",
        "NCCL_ALGO: Ring then, not set now",
    )


def test_a_slower_size_is_not_hidden_by_the_faster_ones():
    now = bench([row(MIB, 10.0), row(2 * MIB, 20.0), row(GIB, 40.0)])
    then = baseline([row(MIB, 1.0), row(2 * MIB, 2.0), row(GIB, 80.0)])

    assert [change.size_bytes for change in compare(now, then, 0.9).changes if change.below] == [GIB]


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


@pytest.mark.parametrize(("size", "expected_us"), [(1000, time_us(4000)), (262_144, time_us(MIB))])
def test_a_small_model_is_one_bucket(size, expected_us):
    advice = advise(cpus_ddp(GLOO), size)

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


@pytest.mark.parametrize(
    ("made", "size", "says"),
    [
        # sqrt(400 us * 1 GB/s * 1.72 GB) is 25 MiB.
        (cpus_ddp(GLOO), 430_000_000, "No other bucket_cap_mb is clearly better than the default of 25."),
        (bench(sweep(upto(H200, GIB))), 350_000_000, "does not follow alpha + S/B (the residual is 11%)"),
        (cpus_ddp(linear(400, 1, [KIB, 32 * MIB, 64 * MIB], ranks=2)), 350_000_000, "too few sizes were measured"),
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
    advice = advise(cpus_ddp(GLOO), None)

    assert advice is not None
    assert (advice.model_bytes, advice.whole_ms, advice.try_mib) == (None, None, None)
    assert len(advice.text) == 2


def test_beyond_the_sizes_measured_the_plateau_counts_and_is_said():
    flat = linear(1.0, 1.0, powers(KIB, 16 * MIB), ranks=2)

    advice = advise(cpus_ddp(flat), 100_000_000)

    assert advice is not None
    assert advice.whole_ms == pytest.approx(400.0, rel=0.01)
    assert advice.bucket_share is None
    assert "based on the plateau, because 25 MiB is larger than the measured sizes" in advice.text[1]


def test_beyond_the_sizes_measured_and_without_a_plateau_nothing_is_known():
    advice = advise(cpus_ddp(linear(ALPHA_US, ALGBW, powers(KIB, MIB), ranks=2)), 100_000_000)

    assert advice is not None
    assert (advice.whole_ms, advice.bucket_share, advice.try_mib) == (None, None, None)
    assert advice.text[0].endswith("is unknown: the largest measured size is 1 MiB.")
    assert advice.text[1].endswith("is unknown: measure up to 32 MiB or more.")


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [((), 2), (sweep({MIB: 1.0}, collective=Collective.ALL_GATHER, redop=None), 2), (sweep({MIB: 1.0}, ranks=1), 1)],
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
