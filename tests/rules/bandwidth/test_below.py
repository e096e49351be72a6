"""DD405 and DD406: below what is demanded or normal, and what noise forbids to say."""

from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Mode, Reason
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.rules.bandwidth.below import MEASURE_MORE, check_below, check_noise
from ddpdoctor.rules.bandwidth.compare import Baseline, cannot_tell, compare
from ddpdoctor.rules.bandwidth.curve import Measured, build_curves
from tests.rules.bandwidth.sweeps import GIB, H200, KIB, MIB, bench, members, row, sweep, upto

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
