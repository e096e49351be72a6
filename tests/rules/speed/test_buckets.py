"""DD804 and DD806 over two ranks whose gradients and steps are known."""

from dataclasses import replace
from typing import Any

import pytest

from ddpdoctor.model.facts import Job, Life, ModelSeen, Rank
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.gradient_times import GradientTimes
from ddpdoctor.model.speed import Budget, CoreTime, Speed, StepParts, Surroundings
from ddpdoctor.model.stacks import Frame
from ddpdoctor.model.steps import StepEnd
from ddpdoctor.rules.speed.gradients import check_buckets, check_unused, overlap_of
from ddpdoctor.rules.speed.reduction import MIB
from ddpdoctor.rules.speed.state import JobSteps, SpeedState

NOTHING = StepParts(
    numbers=(), parts_ms={}, is_even=(), is_split=(), cpu_ms={}, reductions=(), backwards=(), input_rows=(),
    input_numel=(),
)  # fmt: skip
SITE = Frame(file="/home/user/train.py", line=7, function="main", user=True)
LATE = GradientTimes(
    number=1, group="0", sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(16, 0, -1)),
    bucket_bytes=(MIB, 15 * MIB), compute_end_ms=160.0, exposed_ms=150.0, readings=8, reductions=100,
    cap_bytes=25 * MIB, finds_unused=False, static_graph=False, same_unused=True,
)  # fmt: skip
"""Sixteen layers in two buckets, of which the second leaves when backward is over."""


def state(
    times: GradientTimes | None = LATE, wall_ms: float = 400.0, transfer_ms: float = 150.0, cpu_ms: float = 100.0,
    queued_ms: float = 0.0, frameworks: tuple[str, ...] = (),
) -> SpeedState:  # fmt: skip
    speed = Speed(
        ends_with=StepEnd.OPTIMIZER, group="", count=100, sample_bits=0, kept=NOTHING,
        core_time=CoreTime(elapsed_ms=1e4, on_core_ms=cpu_ms, queued_ms=queued_ms),
        surroundings=Surroundings(threads=1, cores=2, frameworks=frameworks),
    )  # fmt: skip
    model = ModelSeen(group="0", digest="d", count=16, tensors=(), site=SITE)
    ranks = tuple(
        Rank(rank=number, local_rank=number, host="a", pid=None, attempt=0, life=Life.EXITED, models=(model,),
             speed=speed, gradient_times=() if times is None else (times,))
        for number in range(2)
    )  # fmt: skip
    job = Job(now_ns=0, hang_timeout_s=60, ranks=ranks, world_size=2, nnodes=1, local_ranks_expected=2, ended=True)
    steps = JobSteps(
        numbers=(1,), ranks={}, transfer_ms={"exposed": (transfer_ms,)}, waits_ms={}, critical=(0,), count=100
    )
    budget = Budget(phases=(), wall_ms=wall_ms, steps=90, count=100, communication_share=0.0, waiting_share=0.0)
    return SpeedState(job=job, ranks=ranks, steps=steps, budget=budget)


def test_a_bucket_that_leaves_after_backward_is_reported_with_a_cap() -> None:
    (problem,) = check_buckets(state()).problems
    assert problem.fix == "DistributedDataParallel(..., bucket_cap_mb=1)"
    assert "about 34% of the step" in problem.summary
    assert problem.ranks == (0, 1)
    assert {(place.file, place.line) for place in problem.where} == {(SITE.file, SITE.line)}
    assert problem.share == pytest.approx(0.34, abs=0.02)


@pytest.mark.parametrize(
    ("frameworks", "fix"),
    [
        (("transformers", "accelerate"), "TrainingArguments(ddp_bucket_cap_mb=1)"),
        (("accelerate",), "DistributedDataParallelKwargs(bucket_cap_mb=1)"),
        (("lightning",), "DDPStrategy(bucket_cap_mb=1)"),
    ],
)
def test_the_knob_is_the_one_of_the_framework(frameworks: tuple[str, ...], fix: str) -> None:
    assert [problem.fix for problem in check_buckets(state(frameworks=frameworks)).problems] == [fix]


SILENT: dict[str, tuple[Outcome, dict[str, Any]]] = {
    "a reduction below 10 %": (Outcome.PASSED, {"transfer_ms": 39.0}),
    "a short step": (Outcome.PASSED, {"wall_ms": 9.0, "transfer_ms": 5.0}),
    "gradients that were not recorded": (Outcome.SKIPPED, {"times": None}),
    "ranks that compute on all cores": (Outcome.INCONCLUSIVE, {"cpu_ms": 9000.0}),
    "cores that others use": (Outcome.INCONCLUSIVE, {"queued_ms": 2500.0}),
    "one tensor, which no cap splits": (
        Outcome.PASSED,
        {"times": replace(LATE, sizes_bytes=(16 * MIB,), ready_ms=(160.0,), bucket_bytes=(16 * MIB,))},
    ),
    "a network that no overlap helps": (
        Outcome.PASSED,
        {"times": replace(LATE, exposed_ms=9000.0), "wall_ms": 9200.0, "transfer_ms": 9000.0},
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_other_jobs_are_left_alone(case: str) -> None:
    outcome, given = SILENT[case]
    answer = check_buckets(state(**given))
    assert (answer.outcome, answer.problems) == (outcome, ())


SEARCHES = replace(LATE, finds_unused=True)


def test_a_search_that_never_found_anything_is_needless() -> None:
    (problem,) = check_unused(state(SEARCHES)).problems
    assert (problem.severity, problem.ranks) == (None, (0, 1))
    assert problem.fix.startswith("remove find_unused_parameters=True")


def test_the_same_unused_parameters_in_all_steps_are_a_note() -> None:
    (problem,) = check_unused(state(replace(SEARCHES, unused_bytes=64))).problems
    assert problem.severity is Severity.INFO
    assert "static_graph" in problem.fix


@pytest.mark.parametrize(
    "times",
    [LATE, None, replace(SEARCHES, same_unused=False), replace(SEARCHES, static_graph=True),
     replace(SEARCHES, reductions=19)],
)  # fmt: skip
def test_models_that_need_the_search_or_do_not_search_are_left_alone(times: GradientTimes | None) -> None:
    assert check_unused(state(times)).problems == ()


def test_a_bucket_for_each_tensor_is_reported_also_where_cores_are_short() -> None:
    tiny = replace(
        LATE, sizes_bytes=(2400,) * 300, ready_ms=tuple(0.5 * i for i in range(300, 0, -1)), bucket_bytes=(2400,) * 300
    )
    (problem,) = check_buckets(state(tiny, queued_ms=3000.0)).problems
    assert problem.evidence[0].endswith("in 300 buckets, the largest with 2400 B")


@pytest.mark.parametrize(
    ("times", "share"),
    [
        (LATE, 1 / 16),  # the first MiB of sixteen is sent while backward computes
        (replace(LATE, bucket_bytes=(MIB,) * 16, exposed_ms=10.0), 15 / 16),
        (replace(LATE, exposed_ms=0.0), None),
        (None, None),
    ],
    ids=["two buckets", "a bucket for each layer", "all is hidden", "no times"],
)
def test_the_share_of_the_reduction_that_backward_hides(times: GradientTimes | None, share: float | None) -> None:
    assert overlap_of(state(times)) == (None if share is None else pytest.approx(share, abs=0.01))


def test_many_small_buckets_on_a_busy_machine_are_found_although_half_a_mib_is_little() -> None:
    sizes = (128, 4096) * 120
    times = replace(
        LATE, sizes_bytes=sizes, ready_ms=tuple(55.0 * i / 240 for i in range(240, 0, -1)), bucket_bytes=(4224,) * 120,
        compute_end_ms=55.5, exposed_ms=42.0, cap_bytes=2048,
    )  # fmt: skip
    (problem,) = check_buckets(state(times, wall_ms=160.0, transfer_ms=46.0, queued_ms=3e3)).problems
    assert problem.fix == "DistributedDataParallel(..., bucket_cap_mb=25)"
    assert problem.share > 0.15


def test_a_busy_machine_that_makes_most_reductions_longer_does_not_hide_the_buckets() -> None:
    sizes = (128, 1024) * 120
    times = replace(
        LATE, sizes_bytes=sizes, ready_ms=tuple(20.0 * i / 240 for i in range(240, 0, -1)), bucket_bytes=(1152,) * 120,
        compute_end_ms=20.0, exposed_ms=25.0, cap_bytes=100,
    )  # fmt: skip
    (problem,) = check_buckets(state(times, wall_ms=115.0, transfer_ms=80.0)).problems
    assert problem.fix == "DistributedDataParallel(..., bucket_cap_mb=25)"


def test_a_job_that_is_too_short_to_see_its_cores_is_not_judged() -> None:
    known = state()
    ranks = tuple(replace(rank, speed=replace(rank.speed, core_time=None)) for rank in known.ranks if rank.speed)
    answer = check_buckets(replace(known, ranks=ranks))
    assert (answer.outcome, answer.problems) == (Outcome.INCONCLUSIVE, ())
    assert "too short" in answer.seen
