"""DD808 names a line only if it runs in each step, however many calls it makes in a few of them."""

import pytest

from ddpdoctor.model.facts import Call, Rank
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.speed import DataParallelSeen
from ddpdoctor.model.stacks import Frame
from ddpdoctor.rules.speed.gradients import check_sync

from .jobs import STEPS, frame, rank, state

STEP_NS = 100_000_000


def call(op: str, at_ns: int, took_ns: int, site: Frame) -> Call:
    return Call(
        op=op, api=op, group="0", dtype=None, shape=None, tensors=1, peer=None, redop=None, site=site, is_async=False,
        failed=False, thread_is_main=True, index=at_ns, seq=None, started_ns=at_ns, ended_ns=at_ns + took_ns,
    )  # fmt: skip


def calling(number: int, each: int, calls: int, **speed: object) -> Rank:
    """A rank that makes so many calls after each ``each``-th backward."""
    log = []
    for step in range(STEPS):
        start = step * STEP_NS
        log.append(call("backward", start, 60_000_000, frame(9)))
        if step % each == 0:
            log += [call("all_reduce", start + 70_000_000 + i, 1_000_000, frame(12)) for i in range(calls)]
    return rank(number, {"calls": 20.0}, recent_calls=tuple(log), speed=speed)


@pytest.mark.parametrize(("each", "calls", "found"), [(1, 1, True), (2, 1, True), (10, 20, False), (10, 1, False)])
def test_a_line_that_runs_in_each_step(each: int, calls: int, found: bool) -> None:  # noqa: FBT001
    answer = check_sync(state(*(calling(number, each, calls) for number in range(2))))
    assert [[place.line for place in problem.where] for problem in answer.problems] == ([[12, 12]] if found else [])


def test_the_reductions_of_a_model_in_data_parallel_are_left_to_its_finding() -> None:
    wrapped = (DataParallelSeen(devices=0, site=frame(5)),)
    answer = check_sync(state(*(calling(number, 1, 1, data_parallel=wrapped) for number in range(2))))
    assert answer.outcome is Outcome.PASSED
    assert "DataParallel" in answer.seen
