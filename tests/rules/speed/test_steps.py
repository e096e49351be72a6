"""Buckets, the time budget of a step, efficiency and the calls of a script, over ranks whose steps are known."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ddpdoctor.model.facts import Call, Job, Life, ModelSeen, Rank
from ddpdoctor.model.stacks import Frame
from ddpdoctor.model.steps import Budget, CoreTime, DeviceSteps, GradientTimes, Speed, StepEnd, StepParts, Surroundings
from ddpdoctor.model.tuning import LaunchKind, ScalingLaunch, ScalingRow, TrialRecord, TrialStop, TriedBlock
from ddpdoctor.rules.speed.reduction import MIB
from ddpdoctor.rules.speed.state import JobSteps, SpeedState
from ddpdoctor.rules.tuning.trial import measure_scaling
from tests.golden import table
from tests.rules.build import pack_calls
from tests.rules.speed.jobs import STEPS, frame, rank, state

# DD804 and DD806 over two ranks whose gradients and steps are known.


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


def state_of_buckets(
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


# The time budget of a step over ranks whose steps are known.


def told(*ranks: Rank) -> str:
    """Return the budget of a job, in which the critical column adds up to the step."""
    found = state(*ranks)
    budget, numbers = found.budget, found.steps.numbers
    assert sum(row.critical_ms for row in budget.phases) == pytest.approx(budget.wall_ms, rel=0.03)
    samples = "of GPUs" if budget.is_device else f"{budget.samples_per_s:.4g} samples/s"
    lines = [
        f"{budget.wall_ms:.4g} ms, {samples}, communication {budget.communication_share:.2%}",
        f"last {sorted(set(found.steps.critical))} in {len(numbers)} steps: {', '.join(map(str, numbers[:4]))} ...",
    ]
    rows = (
        f"{one.phase}: {one.critical_ms:.4g}, at most {one.worst_ms:.4g} on {one.worst_rank}" for one in budget.phases
    )
    return "\n".join([*lines, *rows])


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


# Efficiency is measured against honest baselines, and its factors multiply to it.


ALONE = ScalingLaunch(kind=LaunchKind.ALONE, ranks=1, step_ms=100.0, unreduced_ms=100.0, rows=32.0)
SHARE = ScalingLaunch(kind=LaunchKind.SHARE, ranks=4, step_ms=125.0, unreduced_ms=125.0, rows=32.0)
JOB = ScalingLaunch(kind=LaunchKind.JOB, ranks=4, step_ms=250.0, unreduced_ms=200.0, rows=32.0, noise=0.02)


def measured(*launches: ScalingLaunch) -> ScalingRow:
    (row,) = measure_scaling(launches)
    return row


def trial(stop: TrialStop = TrialStop.DONE, rounds: int = 4) -> TrialRecord:
    """Return four rounds in which a step takes 100 ms, and without reduction 80 and 84 ms on two ranks."""
    settings = {"base": (100.0, 100.0), "again": (100.0, 100.0), "unreduced": (80.0, 84.0)}
    blocks = tuple(
        TriedBlock(round=number, setting=setting, ranks_ms=tuple((ms,) * 5 for ms in ranks_ms))
        for number in range(rounds) for setting, ranks_ms in settings.items()
    )  # fmt: skip
    return TrialRecord(settings=tuple(settings), rounds=4, blocks=blocks, stop=stop)


# DD808 names a line only if it runs in each step, however many calls it makes in a few of them.


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
    return rank(number, {"calls": 20.0}, recent_calls=pack_calls(log), speed=speed)


test_rows = table(
    "steps",
    "ddpdoctor.model.steps ddpdoctor.model.tuning ddpdoctor.rules.speed.gradients ddpdoctor.rules.speed.input",
    "ddpdoctor.rules.speed.state ddpdoctor.rules.speed.ranks ddpdoctor.rules.speed.reduction",
    "ddpdoctor.rules.tuning.trial tests.rules.speed.jobs",
    globals(),
)
