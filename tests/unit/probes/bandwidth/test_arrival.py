import pytest

from ddpdoctor.probes.bandwidth.arrival import MOST_KEPT, BarrierWaits, lateness


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        # Two ranks: what the other waited longer.
        ([20.0, 0.0], [-20.0, 20.0]),
        # The late rank waits for nobody, and only it is late.
        ([20.0, 0.0, 20.0, 20.0], [0.0, 20.0, 0.0, 0.0]),
        # With an odd number of others the middle one, with an even number the mean of the middle two.
        ([1.0, 2.0, 4.0, 9.0], [3.0, 2.0, -2.0, -7.0]),
        ([1.0, 2.0, 5.0], [2.5, 1.0, -3.5]),
        # Equal waits: nobody is late.
        ([7.0, 7.0, 7.0], [0.0, 0.0, 0.0]),
    ],
)
def test_lateness_is_the_median_wait_of_the_others_less_the_own(waits, late):
    assert lateness([[wait] for wait in waits]).tolist() == [late]


def test_a_late_rank_is_named_and_no_other():
    arrivals = BarrierWaits(["a", "a", "b"])
    arrivals.add([[20000.0, 21000.0, 19000.0], [10.0, 5.0, 20.0], [20010.0, 20990.0, 19010.0]])

    first, late, last = arrivals.summary()

    assert (late.rank, late.host, late.share, late.calls) == (1, "a", 1.0, 3)
    assert late.late_us == pytest.approx(19995.0)
    assert late.late_p95_us == pytest.approx(20990.0)
    assert first.late_us < 20
    assert (last.host, last.share) == ("b", 0.0)


def test_a_rank_that_is_late_once_is_not_late_by_its_median():
    arrivals = BarrierWaits(["a", "a", "a"])
    arrivals.add([[30.0, 10.0, 10.0, 10.0, 10.0], [0.0, 10.0, 11.0, 9.0, 10.0], [30.0, 10.0, 10.0, 10.0, 10.0]])

    late = arrivals.summary()[1]

    assert late.late_us == 0.0
    assert late.late_p95_us == 30.0


def test_cases_are_taken_together_and_each_counts_with_so_many_calls():
    arrivals = BarrierWaits(["a", "a"])
    arrivals.add([[5.0] * (MOST_KEPT + 50), [0.0] * (MOST_KEPT + 50)])
    arrivals.add([[5.0], [0.0]])

    assert [one.calls for one in arrivals.summary()] == [MOST_KEPT + 1] * 2


def test_one_rank_is_never_late_and_nothing_measured_says_nothing():
    alone = BarrierWaits(["a"])
    alone.add([[1.0, 2.0]])

    assert alone.summary() == ()
    assert BarrierWaits(["a", "b"]).summary() == ()
