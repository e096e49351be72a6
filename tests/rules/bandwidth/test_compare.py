"""A bench against a saved one: each size by itself, with what noise allows to say."""

from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Mode
from ddpdoctor.rules.bandwidth.compare import Baseline, cannot_tell, compare
from tests.rules.bandwidth.sweeps import GIB, KIB, MIB, bench, members, row, sweep

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
