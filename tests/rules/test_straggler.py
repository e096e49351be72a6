"""DD610: who is slow, how often, at what cost, in which phase and at which line; and who is not."""

import random
from dataclasses import replace
from typing import Any

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model import facts
from ddpdoctor.model.facts import Rank, Work, WorkingChild
from ddpdoctor.model.steps import CoreTime, FetchTimes, LineSeen, Phase, StepEnd, StepTimes, pace_of
from ddpdoctor.rules.progress.straggler import find_slow_reason, shares_busy_cores
from tests.golden import table
from tests.rules import build
from tests.rules.build import LONG_AGO, NOW, S, call, ended, group, in_call, in_user, job, line, pack_calls
from tests.rules.speed.jobs import STEPS, rank

MS = 1000
COMMUNICATION_MS = 2.0


def trained(*work, steps=60, ends_with=StepEnd.REDUCTION, groups=("",), lines=()):
    """A job that finished. ``work`` is, by rank, a function of the step's number that returns busy ms by phase."""
    busy = [[work[rank](number) for number in range(1, steps + 1)] for rank in range(len(work))]
    ranks = []
    for number in range(len(work)):
        name = groups[number % len(groups)]
        fellows = [r for r in range(len(work)) if groups[r % len(groups)] == name]
        slowest = [max(sum(busy[fellow][i]) for fellow in fellows) + COMMUNICATION_MS for i in range(steps)]
        ranks.append(
            ended(
                number,
                len(work),
                step_times=step_times(busy[number], slowest, ends_with, name),
                lines_seen=tuple(seen for of, seen in lines if of == number),
                main_ended_ns=LONG_AGO,
            )
        )
    return job(*ranks, ended=True, launcher_status=0)


def step_times(busy, slowest, ends_with=StepEnd.REDUCTION, name="", first=1):
    """Who is ready early waits in backward until the slowest has come."""
    waits = [total - sum(own) for own, total in zip(busy, slowest, strict=True)]
    phases = [(*own[:3], own[3] + wait) for own, wait in zip(busy, waits, strict=True)]
    return StepTimes(
        ends_with=ends_with,
        group=name,
        numbers=tuple(range(first, first + len(busy))),
        phases_us=tuple(tuple(int(step[i] * MS) for step in phases) for i in range(4)),
        waits_us=(*((0,) * len(busy) for _ in range(3)), tuple(int(wait * MS) for wait in waits)),
    )


def usual(_step):
    return (5.0, 20.0, 1.0, 30.0)


def slower(phase, ms, when=lambda _step: True):
    def work(step):
        took = list(usual(step))
        took[phase] += ms if when(step) else 0
        return tuple(took)

    return work


def long(extra):
    return lambda _step: (500.0, 300.0, 0.0, 200.0 + extra)


def by_hand(ms):
    return lambda _step: (25.0 + ms, 0.0, 0.0, 30.0)


def only(judged):
    """Leave the check of stragglers alone."""
    return replace(judged, checks=tuple(check for check in judged.checks if check.code == "DD610"))


def blind(found):
    """The same job, of which no wait was seen."""
    unseen = replace(found.ranks[0].step_times, numbers=(), phases_us=((),) * 4, waits_us=((),) * 4, unknown=60)
    return replace(found, ranks=tuple(replace(one, step_times=unseen) for one in found.ranks))


def after_calls(found, calls, number=1):
    """The same job, in which a rank has made these calls."""
    ranks = tuple(replace(one, recent_calls=pack_calls(calls)) if one.rank == number else one for one in found.ranks)
    return replace(found, ranks=ranks)


def met(rank, number, phase=Phase.BEFORE, times=20, *, in_child=False, function="augment"):
    return rank, LineSeen(frame=line(number, function), phase=phase, times=times, in_child=in_child)


def random_lengths(rank):
    chance = random.Random(rank)
    lengths = [chance.uniform(0, 80) for _ in range(61)]
    return lambda step: (5.0, 20.0 + lengths[step], 1.0, 30.0)


def replace_groups(found, worlds):
    """Give two groups the same name: only their members tell them apart."""
    ranks = [
        replace(rank, groups=tuple(group(0, 0, "", members) for members in worlds.values() if rank.rank in members))
        for rank in found.ranks
    ]
    return replace(found, ranks=tuple(ranks))


def calling(seen):
    number, found = seen
    return number, replace(found, calls_module=True)


def test_a_pace_is_the_median_of_what_was_no_waiting():
    times = step_times([usual(1), slower(0, 900)(2), usual(3)], [80.0, 1000.0, 80.0])
    pace = pace_of(times)
    assert (pace.steps, pace.step_ms, pace.busy_ms, pace.waited_ms) == (3, 80.0, (5.0, 20.0, 1.0, 30.0), 24.0)
    assert pace_of(replace(times, numbers=(), phases_us=((),) * 4, waits_us=((),) * 4)) is None


def fetching(found, *busy_shares, batch_ms=85.0, batches=60):
    """The same job, whose loader workers were at work for so much of the time; None: without workers."""
    ranks = [
        one
        if share is None
        else replace(one, fetch_times=FetchTimes(
            batches=batches, making_ms=batches * batch_ms, pauses_ms=batches * batch_ms * (1 / share - 1)
        ))
        for one, share in zip(found.ranks, busy_shares, strict=True)
    ]  # fmt: skip
    return replace(found, ranks=tuple(ranks))


def receiving(found, number, ms, steps=60):
    """The same job, in which a rank waits so long for a message of a peer in each step, before forward."""
    one = found.ranks[number]
    times = one.step_times
    took_ns = [1000 * sum(step) for step in zip(*times.phases_us, strict=True)]
    ends = tuple(NOW + sum(took_ns[: i + 1]) for i in range(steps))
    starts = [end - took + S // 1000 for end, took in zip(ends, took_ns, strict=True)]
    calls = tuple(
        call("recv", site=50, index=i, open_=False, peer=1, started_ns=start, ended_ns=start + int(ms * 1e6))
        for i, start in enumerate(starts)
    )
    waiter = replace(one, step_times=replace(times, ended_ns=ends), recent_calls=pack_calls(calls))
    return replace(found, ranks=tuple(waiter if rank is one else rank for rank in found.ranks))


# A rank that works is busy, shown with what it does; whoever waits in vain is not, whatever else its process
# does.


def work(cores=0.0, wanted=None, read=0.0, written=0.0):
    return Work(over_s=2.0, cores=cores, wanted=wanted, read_bytes_s=read, written_bytes_s=written)


def child(**done):
    return WorkingChild(pid=77, name="gcc -O2 a.c", work=work(**done))


def found(causes, **more):
    return judge(job(in_call(0), in_user(1, line(12, "tokenize"), causes=causes, **more), in_call(2)))


# Why a rank is slow: each cause, and what only looks like it.


COST_MS = 40.0


def cores(number: int, on_core_ms: float, queued_ms: float, **more: Any) -> Rank:
    """A rank that runs and waits for a core for so long in each step of 100 ms."""
    time = CoreTime(elapsed_ms=100.0 * STEPS, on_core_ms=on_core_ms * STEPS, queued_ms=queued_ms * STEPS)
    return rank(number, speed={"core_time": time}, **more)


def loads(queued_ms: float, computing_ms: float = 0.0) -> Rank:
    """A rank that waits for its loader, and for a core."""
    return cores(1, 30.0, queued_ms, parts_ms={"data": 41.0}, cpu_ms={"data": computing_ms})


def why(slow: Rank, other: Rank) -> tuple[str | None, bool]:
    reason = find_slow_reason(slow, [other], COST_MS)
    return reason and reason.cause.name, shares_busy_cores(slow, [other], COST_MS)


test_rows = table("straggler", vars(facts), vars(build), globals(), head=build.sureness)
