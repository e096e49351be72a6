"""What the failures of a job cost, how far apart they are, and who returns in their verdicts."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from ddpdoctor.diagnose.history import job_key
from ddpdoctor.diagnose.history_sums import cost_of, find_returning, sum_up
from ddpdoctor.model.findings import JobStatus
from ddpdoctor.model.history import Blamed, Cost, PassSeen, Returning, Start

ZERO = datetime(2026, 3, 14, 10, tzinfo=timezone.utc)


def at(minutes):
    return None if minutes is None else ZERO + timedelta(minutes=minutes)


def start(
    began=0, first=1, last=9, ended=10, *, steps=90, status=JobStatus.FAILED, epochs=None, blamed=(), hosts=2,
    first_epoch=None,
):  # fmt: skip
    passes = tuple(PassSeen(epoch=epoch, steps=count) for epoch, count in (epochs or {}).items())
    known = next(iter(epochs), None) if epochs and first_epoch is None else first_epoch
    return Start(
        run="run", attempt=0, status=status, began_at=at(began), first_step_at=at(first), last_progress_at=at(last),
        ended_at=at(ended), steps=steps, passes=passes, first_epoch=known, hosts=hosts, blamed=blamed,
    )  # fmt: skip


def test_the_time_lost_is_from_the_last_step_to_the_next_first_step():
    assert cost_of([start(), start(began=12, first=14)], 0).seconds == 5 * 60


def test_a_start_without_a_step_ends_what_the_one_before_it_cost_and_begins_its_own():
    starts = [start(), start(began=12, first=None, last=None, ended=13, steps=0), start(began=15, first=17)]
    assert [cost_of(starts, number).seconds for number in range(3)] == [3 * 60, 5 * 60, None]


def test_a_job_that_finished_or_runs_has_lost_nothing():
    for status in (JobStatus.FINISHED, JobStatus.RUNNING):
        assert cost_of([start(status=status), start(began=12)], 0) == Cost(steps=None, seconds=None)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({0: 30, 1: 30, 2: 30}, {2: 5}, 30),  # it began epoch 2 again
        ({0: 30, 1: 30, 2: 30}, {0: 5}, 90),  # it began from scratch
        ({0: 30, 1: 30, 2: 30}, {3: 5}, 0),  # it was saved at the end of epoch 2
        ({4: 30, 5: 30, 6: 30}, {5: 5}, 60),
        ({4: 30, 5: 30, 6: 30}, {2: 5}, 90),  # all of it, and more of the start before
    ],
)
def test_steps_made_again_are_those_since_the_epoch_with_which_the_next_start_began(before, after, lost):
    assert cost_of([start(epochs=before), start(began=12, epochs=after)], 0).steps == lost


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),  # no sampler has epochs
        ({0: 90}, {}),  # the next start made no step
        ({}, {2: 5}),
    ],
)
def test_steps_are_not_known_where_nothing_says_where_the_next_start_began(before, after):
    assert cost_of([start(epochs=before), start(began=12, epochs=after)], 0).steps is None


def test_of_the_first_of_many_passes_nothing_is_known_any_more():
    earlier = start(epochs={7: 30, 8: 30}, first_epoch=0, steps=270)
    assert cost_of([earlier, start(began=12, epochs={5: 5})], 0).steps is None
    assert cost_of([earlier, start(began=12, epochs={8: 5})], 0).steps == 30


def test_steps_since_the_last_checkpoint_are_lost_whatever_the_epochs_say():
    saved = replace(start(epochs={0: 45, 1: 45}), saved_step=80)
    assert cost_of([saved, start(began=12, epochs={0: 5})], 0).steps == 10
    assert cost_of([replace(saved, saved_step=90), start(began=12)], 0).steps == 0


def test_a_start_that_made_no_step_lost_none():
    assert cost_of([start(steps=0, first=None, last=None), start(began=12)], 0).steps == 0


def test_the_mean_time_between_failures_is_the_time_that_it_ran_by_failures():
    starts = [
        start(0, ended=10), start(20, 21, 49, 50), start(60, 61, 69, 70, status=JobStatus.INTERRUPTED),
        start(80, 81, 99, None, status=JobStatus.RUNNING),
    ]  # fmt: skip
    found = sum_up(("train.py",), starts, at(100))
    assert (found.failures, found.span_s) == (2, 100 * 60)
    assert found.between_failures_s == (10 + 30 + 10 + 20) * 60 / 2


def test_a_job_without_a_failure_has_no_mean_time():
    found = sum_up((), [start(status=JobStatus.FINISHED)], at(100))
    assert (found.failures, found.between_failures_s, found.returning) == (0, None, ())


def test_a_start_of_which_no_time_is_known_counts_all_the_same():
    found = sum_up((), [start(None, None, None, None)], at(100))
    assert (found.failures, found.span_s, found.costs) == (1, None, (Cost(steps=None, seconds=None),))


def test_a_rank_on_one_host_returns():
    blamed = [(Blamed(rank=3, host="n7"),), (Blamed(rank=3, host="n7"),), (Blamed(rank=1, host="n2"),)]
    found = find_returning([start(blamed=one) for one in blamed])
    assert found == (Returning(who=Blamed(rank=3, host="n7"), times=2),)


def test_a_host_returns_with_other_ranks():
    blamed = [(Blamed(rank=3, host="n7"),), (Blamed(rank=5, host="n7"),)]
    assert find_returning([start(blamed=one) for one in blamed]) == (Returning(who=Blamed(host="n7"), times=2),)


def test_a_rank_returns_on_other_hosts():
    blamed = [(Blamed(rank=3, host="n7"),), (Blamed(rank=3, host="n8"),)]
    assert find_returning([start(blamed=one) for one in blamed]) == (Returning(who=Blamed(rank=3), times=2),)


def test_the_only_host_of_a_job_is_not_to_blame_for_its_ranks():
    blamed = [(Blamed(rank=0, host="n7"),), (Blamed(rank=1, host="n7"),)]
    assert find_returning([start(blamed=one, hosts=1) for one in blamed]) == ()


def test_interruptions_blame_nobody():
    one = (Blamed(rank=3, host="n7"),)
    assert find_returning([start(blamed=one), start(blamed=one, status=JobStatus.INTERRUPTED)]) == ()


def test_starts_of_one_job_have_one_command_line_but_for_what_varies():
    one = job_key(("/a/ddpdoctor", "wrap", "--report-dir", "r1", "--master_port=1", "train.py", "--lr", "1"))
    other = job_key(("/b/ddpdoctor", "wrap", "--report-dir=r2", "--master-port", "2", "train.py", "--lr", "1"))
    assert one == other == ("ddpdoctor", "wrap", "train.py", "--lr", "1")
    assert job_key(("/b/ddpdoctor", "wrap", "train.py", "--lr", "2")) != one
