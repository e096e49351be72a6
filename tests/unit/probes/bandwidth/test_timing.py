from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth.timing import (
    LEAST_BATCHES,
    LEAST_CALLS,
    MOST_BATCH_CALLS,
    MOST_BATCHES,
    MOST_CALLS,
    Effort,
    TimingPlan,
    even_out,
    plan_calls,
    summarize,
)

CASE = Case(
    collective=Collective.ALL_REDUCE,
    dtype="float32",
    redop="sum",
    mode=Mode.LATENCY,
    in_place=True,
    size_bytes=10**6,
    count=250_000,
)


@pytest.mark.parametrize(
    ("mode", "effort", "each_s", "plan"),
    [
        # As many as there is time for, within bounds.
        (Mode.LATENCY, Effort(seconds=0.5), 0.005, TimingPlan(batches=100, calls=1)),
        (Mode.LATENCY, Effort(seconds=0.5), 10.0, TimingPlan(batches=LEAST_CALLS, calls=1)),
        (Mode.LATENCY, Effort(seconds=0.5), 1e-6, TimingPlan(batches=MOST_CALLS, calls=1)),
        (Mode.LATENCY, Effort(seconds=0.5), 0.0, TimingPlan(batches=MOST_CALLS, calls=1)),
        (Mode.LATENCY, Effort(iterations=7), 10.0, TimingPlan(batches=7, calls=1)),
        # A batch lasts 5 ms at least; with more time, batches are longer rather than more.
        (Mode.THROUGHPUT, Effort(seconds=0.1), 0.001, TimingPlan(batches=20, calls=5)),
        (Mode.THROUGHPUT, Effort(seconds=0.3), 0.001, TimingPlan(batches=30, calls=10)),
        (Mode.THROUGHPUT, Effort(seconds=0.5), 10.0, TimingPlan(batches=LEAST_BATCHES, calls=1)),
        (Mode.THROUGHPUT, Effort(seconds=0.5), 1e-6, TimingPlan(batches=MOST_BATCHES, calls=MOST_BATCH_CALLS)),
        # What the user asks for is rounded up to whole batches.
        (Mode.THROUGHPUT, Effort(iterations=1), 0.001, TimingPlan(batches=1, calls=1)),
        (Mode.THROUGHPUT, Effort(iterations=20), 0.001, TimingPlan(batches=20, calls=1)),
        (Mode.THROUGHPUT, Effort(iterations=100), 0.001, TimingPlan(batches=25, calls=4)),
        (Mode.THROUGHPUT, Effort(iterations=31), 0.001, TimingPlan(batches=16, calls=2)),
    ],
)
def test_time_decides_how_many_calls_are_made_unless_the_user_does(mode, effort, each_s, plan):
    assert plan_calls(mode, effort, each_s) == plan


def test_times_are_reduced_over_ranks_first():
    # The median of each rank is 100; in every iteration one of them takes 300.
    times_us = [[100.0, 100.0, 300.0, 100.0], [300.0, 300.0, 100.0, 100.0]]

    measurement = summarize(CASE, [1000.0, 2000.0], times_us, 1, 2, warm=True)

    assert measurement.first_us == 2000.0
    assert measurement.p50_us == 300.0
    assert measurement.min_us == 100.0
    assert (measurement.p50_low_us, measurement.p50_high_us) == (100.0, 300.0)
    assert measurement.iterations == 4


def test_bandwidths_are_in_gb_s_of_a_billion_bytes_and_taken_at_the_median():
    measurement = summarize(CASE, [1.0] * 4, [[500.0]] * 4, 1, 4, warm=True)

    assert measurement.algbw_gb_s == pytest.approx(2.0)
    assert measurement.busbw_gb_s == pytest.approx(3.0)


def test_a_batch_counts_as_its_time_over_its_calls():
    case = replace(CASE, mode=Mode.THROUGHPUT)

    measurement = summarize(case, [1.0, 1.0], [[1000.0, 3000.0, 2000.0], [900.0, 900.0, 900.0]], 10, 2, warm=False)

    assert (measurement.p50_us, measurement.min_us, measurement.iterations) == (200.0, 100.0, 30)
    assert measurement.cv == pytest.approx(0.408, abs=0.001)
    assert measurement.warm is False


def test_one_rank_has_no_bus_bandwidth():
    assert summarize(CASE, [1.0], [[100.0]], 1, 1, warm=True).busbw_gb_s is None


def test_who_ends_a_call_early_does_not_make_the_others_late():
    # Rank 0's calls take 100 ms, rank 1's 20: it then waits for rank 0, which did nothing but end later.
    calls_us = [[100e3, 100e3, 100e3], [20e3, 20e3, 20e3]]

    assert even_out([[5.0, 0.0, 0.0], [5.0, 80e3, 80e3]], calls_us) == ((5.0, 100e3, 100e3), (5.0, 100e3, 100e3))
    # Here rank 0 dawdles for 20 ms besides.
    assert even_out([[5.0, 0.0], [5.0, 100e3]], calls_us) == ((5.0, 100e3), (5.0, 120e3))
