"""The time budget of a step over ranks whose steps are known."""

import pytest

from ddpdoctor.model.reading import Unread
from ddpdoctor.model.speed import PhaseRow
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state

from .jobs import HEALTHY, every, job, rank, state


def rows(found: SpeedState) -> dict[str, PhaseRow]:
    return {row.phase: row for row in found.budget.phases}


def test_the_critical_column_adds_up_to_the_step() -> None:
    slow = rank(0, {"host": every(8, 1.0, 301.0), "data": lambda n: n % 5})
    waiting = rank(1, {"exposed": every(8, 6.0, 304.0)})
    budget = state(slow, waiting).budget
    assert sum(row.critical_ms for row in budget.phases) == pytest.approx(budget.wall_ms, rel=0.03)


def test_what_the_last_rank_spends_in_a_reduction_is_the_transfer_and_the_rest_is_waiting() -> None:
    found = state(rank(0, {"forward": 72.0, "exposed": 3.0}), rank(1, {"exposed": 43.0}))
    assert set(found.steps.critical) == {0}
    assert rows(found)["gradient reduction"].critical_ms == pytest.approx(3.0)
    assert rows(found)["waiting for ranks"].worst_ms == pytest.approx(40.0)
    assert rows(found)["waiting for ranks"].worst_rank == 1
    assert rows(found)["waiting for ranks"].critical_ms == pytest.approx(0.0)
    assert found.budget.communication_share == pytest.approx(3.5 / 141, rel=0.01)


def test_samples_are_counted_over_all_ranks() -> None:
    budget = state(rank(0), rank(1)).budget
    assert budget.samples_per_s == pytest.approx(1e3 * 16 / sum(HEALTHY.values()))


def test_looks_at_replicas_and_the_warm_up_are_left_out() -> None:
    found = state(rank(0, {"own": every(10, 0.0, 50.0), "forward": lambda n: 900.0 if n < 4 else 32.0}), rank(1))
    assert found.budget.wall_ms == pytest.approx(100.0)
    assert not {1, 2, 3, 10, 20} & set(found.steps.numbers)


def test_where_backward_is_not_split_it_is_taken_to_compute_as_long_as_usual() -> None:
    from dataclasses import replace

    one = rank(0)
    assert one.speed is not None
    backward = [62.0 if n % 2 else 102.0 for n in one.speed.kept.numbers]
    kept = replace(
        one.speed.kept, parts_ms={**one.speed.kept.parts_ms, "backward": backward},
        is_split=[n % 2 for n in one.speed.kept.numbers],
    )  # fmt: skip
    found = state(replace(one, speed=replace(one.speed, kept=kept)))
    unsplit = [i for i, number in enumerate(found.steps.numbers) if number % 2 == 0]
    assert {found.steps.ranks[0].parts_ms["exposed"][i] for i in unsplit} == {42.0}


@pytest.mark.parametrize(
    ("ranks", "reason"), [((), "no rank recorded"), ((rank(0, steps=19),), "19 steps are too few")]
)
def test_what_cannot_be_told_says_why(ranks: tuple[object, ...], reason: str) -> None:
    found = build_speed_state(job(*ranks))  # type: ignore[arg-type]
    assert isinstance(found, Unread)
    assert found.reason.startswith(reason)
