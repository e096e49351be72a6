"""The time budget of a step over ranks whose steps are known."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ddpdoctor.model.facts import Rank
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.reading import Unread
from ddpdoctor.model.speed import DeviceSteps, PhaseRow
from ddpdoctor.rules.speed.input import check_input
from ddpdoctor.rules.speed.ranks import check_host
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


# Jobs on GPUs: the budget is made of what CUDA events measured, and host times are in none of its rows.


DEVICE = {"before": 2.0, "forward": 30.0, "between": 1.0, "backward": 62.0, "optimizer": 5.0}
HOST = {"before": 2.0, "forward": 8.0, "between": 0.2, "backward": 9.0, "optimizer": 1.0}


def on_gpu(
    number: int, device: Mapping[str, float] = {}, host: Mapping[str, float] = {}, *, data_ms: float = 1.0,
    exposed_ms: float = 4.0, behind: int = 3, count: int = 15,
) -> Rank:  # fmt: skip
    """A rank whose GPU takes 100 ms for a step, and whose host queues it in 20."""
    one = rank(number, {"forward": 8.0, "backward": 9.0, "exposed": 0.0})
    assert one.speed is not None
    columns = [{**DEVICE, **device}, {**HOST, **host}]
    of_device, of_host = ({phase: [value] * count for phase, value in times.items()} for times in columns)
    steps = DeviceSteps(
        numbers=[1 + 20 * i for i in range(count)], device_ms=of_device, host_ms=of_host, data_ms=[data_ms] * count,
        data_cpu_ms=[0.0] * count, gc_ms=[0.0] * count, input_rows=[8] * count, input_numel=[64] * count,
        reductions=[1] * count, backwards=[1] * count, behind=[behind] * count,
        exposed_ms={2: 90.0, 5: 50.0, 100: exposed_ms, 200: exposed_ms},
    )  # fmt: skip
    return replace(one, speed=replace(one.speed, device=steps))


def test_the_budget_is_what_the_gpus_take() -> None:
    budget = state(on_gpu(0), on_gpu(1, exposed_ms=14.0)).budget
    assert budget.is_device
    assert budget.wall_ms == pytest.approx(100.0)
    rows = {row.phase: row for row in budget.phases}
    assert rows["forward"].critical_ms == pytest.approx(30.0)
    assert rows["backward"].critical_ms == pytest.approx(58.0)
    assert rows["gradient reduction"].critical_ms == pytest.approx(4.0)
    assert (rows["waiting for ranks"].worst_rank, rows["waiting for ranks"].worst_ms) == (1, pytest.approx(10.0))
    assert sum(row.critical_ms for row in budget.phases) == pytest.approx(100.0)


def test_the_wait_for_data_counts_only_while_the_gpu_idles() -> None:
    hidden = state(*(on_gpu(number, host={"before": 50.0}, data_ms=48.0) for number in (0, 1)))
    starved = state(*(on_gpu(number, {"before": 60.0}, {"before": 60.0}, data_ms=57.0) for number in (0, 1)))
    assert check_input(hidden).outcome is Outcome.PASSED
    (problem,) = check_input(starved).problems
    assert problem.share == pytest.approx(57 / 158, rel=0.2)


def test_without_the_times_of_reductions_or_with_too_few_steps_it_cannot_be_told() -> None:
    assert isinstance(build_speed_state(job(on_gpu(0), on_gpu(1, count=6))), Unread)
    assert isinstance(build_speed_state(job(on_gpu(0), rank(1))), Unread)


FOLLOWS = {"forward": 29.0, "backward": 60.0}


@pytest.mark.parametrize(
    ("host", "behind", "outcome"),
    [
        (FOLLOWS, 0, Outcome.FAILED),
        ({}, 3, Outcome.PASSED),
        (FOLLOWS, 2, Outcome.PASSED),  # the queue is full: the host waits for room in it
        ({"forward": 29.0}, 0, Outcome.PASSED),  # one wait for the GPU, in forward
    ],
    ids=["the GPU follows", "the host runs ahead", "a full queue", "one wait"],
)
def test_the_gpu_waits_for_the_host(host: dict[str, float], behind: int, outcome: Outcome) -> None:
    answer = check_host(state(*(on_gpu(number, host=host, behind=behind) for number in (0, 1))))
    assert (Outcome.FAILED if answer.problems else answer.outcome) is outcome


def test_on_a_cpu_it_is_skipped() -> None:
    assert check_host(state(rank(0), rank(1))).outcome is Outcome.SKIPPED
