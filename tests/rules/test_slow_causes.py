"""Why a rank is slow: each cause, and what only looks like it."""

from typing import Any

import pytest

from ddpdoctor.model.facts import Rank
from ddpdoctor.model.steps import CoreTime
from ddpdoctor.rules.progress.straggler import SlowCause, find_slow_reason, shares_busy_cores
from tests.rules.speed.jobs import STEPS, rank

COST_MS = 40.0


def cores(number: int, on_core_ms: float, queued_ms: float, **more: Any) -> Rank:
    """A rank that runs and waits for a core for so long in each step of 100 ms."""
    time = CoreTime(elapsed_ms=100.0 * STEPS, on_core_ms=on_core_ms * STEPS, queued_ms=queued_ms * STEPS)
    return rank(number, speed={"core_time": time}, **more)


USUAL = rank(0)
CAUSES = {
    "collections": (rank(1, {"gc": 30.0}), SlowCause.COLLECTIONS),
    "a larger batch": (rank(1, {"forward": 72.0}, numel=128), SlowCause.BATCH),
    "input": (rank(1, {"data": 41.0}), SlowCause.INPUT),
    "waiting in forward": (rank(1, {"forward": 72.0}), SlowCause.COMPUTE),
    "computing in backward": (rank(1, {"backward": 102.0}, cpu_ms={"backward": 30.0}), SlowCause.WORK),
    "too little of anything": (rank(1, {"gc": 15.0, "data": 16.0}), None),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_explains_half_of_the_cost(name: str) -> None:
    slow, cause = CAUSES[name]
    reason = find_slow_reason(slow, [USUAL], COST_MS)
    assert (reason.cause if reason else None) is cause


def test_a_rank_whose_core_is_taken() -> None:
    slow, free = cores(1, 30.0, 45.0), cores(0, 30.0, 1.0)
    reason = find_slow_reason(slow, [free], COST_MS)
    assert reason is not None
    assert reason.cause is SlowCause.HOST_LOAD
    assert not shares_busy_cores(slow, [free], COST_MS)


def test_ranks_whose_cores_are_all_taken() -> None:
    assert shares_busy_cores(cores(1, 30.0, 55.0), [cores(0, 30.0, 20.0)], COST_MS)
    assert shares_busy_cores(cores(1, 10.0, 45.0), [cores(0, 10.0, 5.0)], COST_MS)


@pytest.mark.parametrize(
    ("own_ms", "others_ms", "computing_ms", "contested"),
    [(25.0, 15.0, 0.0, True), (25.0, 7.0, 0.0, False), (15.0, 15.0, 0.0, False), (25.0, 15.0, 35.0, False)],
)
def test_a_loader_is_not_blamed_where_all_ranks_wait_for_cores(
    own_ms: float, others_ms: float, computing_ms: float, *, contested: bool
) -> None:
    slow = cores(1, 30.0, own_ms, parts_ms={"data": 41.0}, cpu_ms={"data": computing_ms})
    reason = find_slow_reason(slow, [cores(0, 30.0, others_ms)], COST_MS)
    assert reason is not None
    assert reason.cause is SlowCause.INPUT
    assert shares_busy_cores(slow, [cores(0, 30.0, others_ms)], COST_MS) is contested


def test_a_rank_that_computes_more_waits_more_for_its_core() -> None:
    slow, other = cores(1, 60.0, 50.0, numel=128), cores(0, 30.0, 25.0)
    reason = find_slow_reason(slow, [other], COST_MS)
    assert reason is not None
    assert reason.cause is SlowCause.BATCH
    assert not shares_busy_cores(slow, [other], COST_MS)


def test_a_rank_that_sleeps_beside_busy_cores_is_slow_by_itself() -> None:
    slow = cores(1, 5.0, 12.0, parts_ms={"data": 45.0})
    assert not shares_busy_cores(slow, [cores(0, 5.0, 12.0)], COST_MS)
