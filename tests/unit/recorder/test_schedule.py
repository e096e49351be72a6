"""Which steps are compared with ``--check-every auto``: a simulated job of two ranks with a clock of its own."""

import pytest

from ddpdoctor.recorder.replicas.schedule import ALLOWANCE_S, LEAST, SHARE, AutoDistance, Wishes, next_due


def train(path, *, steps, step_s, costs_s, slower_from=None):
    """Return the steps at which each rank compared, the time in all and what comparing took on the slowest rank."""
    ranks = [AutoDistance(Wishes(str(path), rank)) for rank in range(len(costs_s))]
    due = [[] for _ in ranks]
    now_s = spent_s = 0.0
    for number in range(1, steps + 1):
        now_s += step_s * (10 if slower_from and number >= slower_from else 1)
        for auto, found in zip(ranks, due, strict=True):
            auto.step(now_s)
            early = number <= LEAST and number & (number - 1) == 0
            if early or (number > LEAST and number >> auto.exponent > (number - 1) >> auto.exponent):
                auto.taken()
                found.append(number)
        if due[0][-1] == number:
            for auto, cost_s in zip(ranks, costs_s, strict=True):
                auto.spend(cost_s)
            now_s, spent_s = now_s + max(costs_s), spent_s + max(costs_s)
    return due, now_s, spent_s


@pytest.mark.parametrize(
    ("step_s", "costs_s"),
    [
        (0.013, (0.045, 0.045)),
        (0.013, (0.010, 0.090)),  # one host's rank is slower: both follow it
        (0.035, (0.045, 0.030)),
        (0.5, (3.0, 2.9)),
        (0.05, (0.9, 0.9)),  # a comparison takes 18 steps
    ],
)
def test_comparing_takes_less_than_its_share_and_ranks_agree(tmp_path, step_s, costs_s):
    due, took_s, spent_s = train(tmp_path / "page", steps=20_000, step_s=step_s, costs_s=costs_s)

    assert due[0] == due[1]
    assert due[0][:6] == [1, 2, 4, 8, 16, 32]
    assert spent_s <= max(ALLOWANCE_S, 6 * max(costs_s)) + SHARE * took_s + max(costs_s)
    assert spent_s + 2 * max(costs_s) >= 0.4 * SHARE * took_s  # and the budget is used
    assert max(due[0]) > 10_000  # comparing goes on


def test_what_costs_next_to_nothing_is_compared_at_most_every_32nd_step(tmp_path):
    due, _, _ = train(tmp_path / "page", steps=3_000, step_s=0.1, costs_s=(0.001, 0.001))

    assert due[0] == [1, 2, 4, 8, 16, *range(32, 3_001, 32)]


def test_slower_steps_allow_more_comparisons(tmp_path):
    due, _, _ = train(tmp_path / "page", steps=20_000, step_s=0.01, costs_s=(0.1, 0.1), slower_from=10_000)

    early, late = (sum(first <= step < first + 5_000 for step in due[0]) for first in (5_000, 15_000))
    assert late > 4 * early


@pytest.mark.parametrize(
    ("every", "due"),
    [(50, [1, 2, 4, 8, 16, 32, 50, 100]), (4, [1, 2, 4, 8, 12]), (3, [1, 2, 3, 6]), (2, [1, 2, 4]), (1, [1, 2, 3])],
)
def test_with_a_fixed_distance_powers_of_two_are_due_and_then_multiples(every, due):
    found = [0]
    while len(found) <= len(due):
        found.append(next_due(found[-1], every))
    assert found[1:] == due
