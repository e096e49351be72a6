"""Each rule of speed over jobs whose steps are known: faults, healthy jobs that look alike, and near misses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ddpdoctor.model.facts import Rank
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.reading import Unread
from ddpdoctor.model.steps import Budget, CoreTime, DataParallelSeen, FetchTimes, HandReduced
from ddpdoctor.rules.answers import Answer
from ddpdoctor.rules.speed.comparing import NOISY, compare_phases, compare_steps, measure_effect, settings_of, spread_of
from ddpdoctor.rules.speed.gradients import (
    check_accumulation,
    check_buffers,
    check_communication,
    check_hand_made,
    check_sync,
)
from ddpdoctor.rules.speed.input import check_input
from ddpdoctor.rules.speed.ranks import (
    check_collections,
    check_data_parallel,
    check_imbalance,
    check_periodic,
    check_rank_work,
    check_threads,
)
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state
from tests.golden import table
from tests.rules.speed.jobs import Value, every, frame, job, rank, state

Check = Callable[[SpeedState], Answer]
RULES: tuple[Check, ...] = (
    check_accumulation, check_buffers, check_communication, check_collections, check_threads, check_data_parallel,
    check_imbalance, check_input, check_hand_made, check_sync, check_periodic, check_rank_work,
)  # fmt: skip


def both(*args: Any, **kwargs: Any) -> tuple[Rank, Rank]:
    return rank(0, *args, **kwargs), rank(1, *args, **kwargs)


def workers(make_ms: float, count: int) -> FetchTimes:
    return FetchTimes(batches=60, making_ms=60 * make_ms, pauses_ms=0.0, cpu_ms=3.0, workers=count)


def with_threads(others_queued_ms: float) -> CoreTime:
    """The main thread waits for a core for 3 s of 10 s, and all other threads together for this long."""
    return CoreTime(elapsed_ms=1e4, on_core_ms=1e3, queued_ms=3e3, others_queued_ms=others_queued_ms)


REDUCED = {"hand_reduced": HandReduced(gradients=12, site=frame(9))}


HEALTHY: dict[str, tuple[Rank, ...]] = {
    "a healthy job": both(),
    "reduced at the last micro-batch only": both({"backward": 186.0, "exposed": 2.0}),
    "reduced three times, hidden": both({"exposed": 3.0}, reductions=3),
    "a small job": both(
        {"forward": 1.0, "backward": 1.0, "exposed": 2.0, "buffers": 2.0, "data": 0.1, "calls": 1.0}, reductions=2,
        speed=REDUCED,
    ),
    "prefetching loaders that keep up": tuple(
        rank(n, fetch_times=workers(80.0, 1), batches=60) for n in range(2)
    ),
    "one rank whose loader is slow": (rank(0, {"data": 101.0}), rank(1, {"exposed": 102.0})),
    "a rank that is slow in each step": (rank(0, {"forward": 92.0}), rank(1, {"exposed": 62.0})),
    "one long pause": (rank(0, {"host": every(50, 1.0, 5001.0)}), rank(1, {"exposed": every(50, 2.0, 5002.0)})),
    "a save that takes little": (rank(0, {"host": every(20, 1.0, 91.0)}), rank(1, {"exposed": every(20, 2.0, 92.0)})),
    "threads that wait for nothing": both(threads=8),
    "threads that have nothing to do": both(threads=8, speed={"core_time": with_threads(5e3)}),
    "a machine that is busy for a while": both({"forward": every(8, 32.0, 130.0), "backward": every(8, 62.0, 250.0)}),
    "a toy job on a busy machine": both(
        {"forward": every(3, 20.0, 1.0), "backward": every(3, 20.0, 1.0), "exposed": every(3, 9.0, 1.0),
         "buffers": every(3, 9.0, 1.0), "calls": every(3, 9.0, 1.0)},
        speed=REDUCED,
    ),
    "a few slow broadcasts": both({"buffers": every(8, 1.0, 200.0)}),
    "neighbors that take the cores": both(queued_ms=5e3),
    "young collections": both({"gc": 2.0}),
    "a call that costs nothing": both({"calls": 0.4}),
    "ranks that wait for a slow one in a call": (rank(0, {"host": 41.0}), rank(1, {"calls": 40.0})),
    "DataParallel on one GPU": both(speed={"data_parallel": (DataParallelSeen(devices=1, site=frame(5)),)}),
}  # fmt: skip


@pytest.mark.parametrize("look_alike", HEALTHY)
def test_a_healthy_job_that_looks_alike_is_left_alone(look_alike: str) -> None:
    seen = state(*HEALTHY[look_alike])
    answers = {check.__name__: check(seen) for check in RULES}
    assert [name for name, answer in answers.items() if answer.outcome is Outcome.FAILED] == []


# Two runs compared: what is called a change, and what is noise.


def noisy(mean_ms: float, spread: float, seed: int) -> Value:
    """Return a part of a step that varies at random from step to step."""
    dice = random.Random(seed)
    values = [mean_ms * dice.gauss(1.0, spread) for _ in range(400)]
    return lambda n: values[n]


def budget(seed: int, steps: int = 200, spread: float = 0.1, **parts_ms: float) -> Budget:
    """Return the budget of two ranks; the parts vary from step to step, each for itself."""
    both = []
    for number in range(2):
        means = {"forward": 32.0, "backward": 62.0, "exposed": 8.0, "data": 4.0, **parts_ms}
        parts = {part: noisy(mean, spread, hash((seed, number, i))) for i, (part, mean) in enumerate(means.items())}
        both.append(rank(number, parts, steps=steps))
    return state(*both).budget


def test_a_shorter_reduction_is_a_change_of_its_phase_and_of_the_step() -> None:
    first, second = budget(1, exposed=31.0), budget(2, exposed=8.0)
    step = compare_steps(first, second)
    assert step.is_change
    assert step.low_ms < step.change_ms < step.high_ms < 0
    assert {one.phase for one in compare_phases(first, second) if one.time.is_change} == {"gradient reduction"}


def test_a_step_that_grew_is_longer() -> None:
    step = compare_steps(budget(1), budget(2, data=40.0))
    assert step.is_change
    assert step.low_ms > 0


def test_two_runs_of_one_job_rarely_differ() -> None:
    """Of intervals of 95%, about one in twenty lies beside the truth."""
    changes = [compare_steps(budget(2 * i, spread=0.3), budget(2 * i + 1, spread=0.3)).is_change for i in range(20)]
    assert sum(changes) <= 3


def test_a_run_that_drifts_has_a_wide_interval() -> None:
    """Neighboring steps are alike here. Resampled one by one, they would seem to be certain of their mean."""
    drifting = state(rank(0, {"forward": lambda n: 50.0 if n % 60 < 30 else 30.0}, steps=240)).budget
    steady = state(rank(0, {"forward": 43.0}, steps=240)).budget
    step = compare_steps(drifting, steady)
    assert step.high_ms - step.low_ms > 5.0
    assert not step.is_change


def test_a_certain_change_of_less_than_a_hundredth_is_none() -> None:
    step = compare_steps(state(rank(0)).budget, state(rank(0, {"forward": 32.5})).budget)
    assert step.low_ms > 0
    assert not step.is_change


def test_blocks_add_up_to_the_mean() -> None:
    found = budget(1, steps=60)
    assert sum(found.blocks_ms) / len(found.blocks_ms) == pytest.approx(found.wall_ms, rel=0.05)
    for row in found.phases:
        assert len(row.blocks_ms) == len(found.blocks_ms)


def test_settings_that_ranks_do_not_share_are_unknown() -> None:
    same = settings_of(state(rank(0, threads=2), rank(1, threads=2)))
    assert (same.rows, same.reductions, same.threads, same.cores) == (8, 1, 2, 2)
    assert same.bucket_cap_bytes is None
    assert settings_of(state(rank(0, threads=2), rank(1, threads=4))).threads is None


# A gain is one that is larger than what a job's own settings differ by between two blocks.


QUIET = measure_effect([1.0, 1.01, 0.99, 1.0], [1.0, 1.0, 1.0, 1.0])
NOISE = measure_effect([0.8, 1.2, 1.0, 1.1], [1.0, 1.0, 1.0, 1.0])


def test_rounds_are_compared_each_by_itself():
    effect = measure_effect([0.5, 1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0])
    assert (effect.ratio, effect.low, effect.high) == (0.5, 0.5, 0.5)


def test_two_runs_of_the_same_settings_show_the_noise():
    assert spread_of(QUIET) <= NOISY < spread_of(NOISE)


def usable(own_share: float) -> str:
    found = build_speed_state(job(*both({"own": 100 * own_share}, steps=20)))
    return found.reason if isinstance(found, Unread) else "judged"


test_rows = table("speed", "ddpdoctor.model.steps tests.rules.speed.jobs ddpdoctor.rules.speed.comparing", globals())
