"""DD610: who is slow, how often, at what cost, in which phase and at which line; and who is not."""

import random
from dataclasses import replace
from typing import Any

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Blocked, FileLock, LostChild, ProcessCauses, Rank, Receiving, Work, WorkingChild
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.steps import CoreTime, FetchTimes, LineSeen, Phase, StepEnd, StepTimes, pace_of
from ddpdoctor.rules.progress.straggler import SlowCause, find_slow_reason, shares_busy_cores
from tests.rules.build import (
    LONG_AGO,
    NOW,
    S,
    call,
    crashed,
    ended,
    group,
    in_backward,
    in_call,
    in_user,
    job,
    limited,
    line,
    phase,
)
from tests.rules.speed.jobs import STEPS, rank

MS = 1000
COMMUNICATION_MS = 2.0


def trained(*work, steps=60, ends_with=StepEnd.REDUCTION, groups=("",), lines=(), worlds=None):
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
                groups=() if worlds is None else (group(0, 0, name, worlds[name]),),
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


def met(rank, number, phase=Phase.BEFORE, times=20, *, in_child=False, function="augment"):
    return rank, LineSeen(frame=line(number, function), phase=phase, times=times, in_child=in_child)


def straggler(found):
    return next((finding for finding in judge(found).findings if finding.kind == "straggler"), None)


def outcome(found):
    return next(check for check in judge(found).checks if check.code == "DD610")


@pytest.mark.parametrize(
    ("phase", "words", "advice"),
    [
        (Phase.BEFORE, "slow before forward", "num_workers"),
        (Phase.FORWARD, "slow in forward", "check-env"),
        (Phase.BETWEEN, "slow between forward and backward", "loss"),
        (Phase.BACKWARD, "slow in backward", "check-env"),
    ],
)
def test_the_phase_and_its_line_are_named(phase, words, advice):
    lines = (met(1, 31, phase), met(1, 9, Phase((phase + 1) % 4), times=90), met(0, 12, phase, times=40))
    finding = straggler(trained(usual, slower(phase, 40), usual, lines=lines))
    assert (finding.code, finding.severity, finding.ranks) == ("DD610", Severity.WARNING, (1,))
    assert [(place.rank, place.line) for place in finding.where] == [(1, 31)]
    assert finding.confidence is Confidence.HIGH
    assert words in finding.summary
    assert "in 60 of 60 steps" in finding.summary
    assert advice in finding.fix


def test_the_evidence_says_who_waited_how_long():
    finding = straggler(trained(usual, slower(Phase.BEFORE, 44, lambda step: step > 2), usual))
    assert finding.evidence == (
        "rank 1 came last in 58 of 60 steps",
        "ranks 0 and 2 waited 44 ms longer than rank 1 (median), 43% of a 102 ms step; they wait 46 ms per step",
        "rank 1 spends 49 ms before forward, and the others spend 5.0 ms",
    )


@pytest.mark.parametrize(
    ("work", "blamed"),
    [
        ((usual, slower(0, 40)), (1,)),
        ((slower(0, 40), usual, usual), (0,)),
        ((usual, slower(0, 40), usual, slower(0, 43)), (1, 3)),
        ((usual, slower(0, 80), usual, slower(0, 35)), (1,)),
        ((slower(0, 40), *[usual] * 63), (0,)),
    ],
)
def test_exactly_the_slow_ranks_are_blamed(work, blamed):
    assert straggler(trained(*work)).ranks == blamed


def random_lengths(rank):
    chance = random.Random(rank)
    lengths = [chance.uniform(0, 80) for _ in range(61)]
    return lambda step: (5.0, 20.0 + lengths[step], 1.0, 30.0)


@pytest.mark.parametrize(
    "work",
    [
        (usual, usual, usual),
        (slower(0, 200), slower(0, 201), slower(0, 199)),
        (usual, slower(0, 1000, lambda step: step % 10 == 0), usual),
        (slower(0, 60, lambda step: step % 2 == 0), slower(0, 60, lambda step: step % 2 == 1)),
        (slower(0, 5000, lambda step: step <= 3), usual),
        (slower(0, 60, lambda step: step <= 45), usual),
        (slower(0, 19), usual, usual),
        (slower(0, 40), slower(0, 40), slower(0, 40), usual),
        tuple(map(random_lengths, range(4))),
        tuple(map(random_lengths, range(2))),
        (usual,),
    ],
    ids=[
        "equal", "all slow", "checkpoints", "in rounds", "warm-up", "three quarters of the steps", "19 ms",
        "one is fast", "random lengths", "random lengths of two", "one rank",
    ],
)  # fmt: skip
def test_no_rank_is_a_straggler(work):
    assert straggler(trained(*work)) is None


def test_a_fifth_of_the_step_is_needed_however_long_that_is():
    def long(extra):
        return lambda _step: (500.0, 300.0, 0.0, 200.0 + extra)

    assert straggler(trained(long(190), long(0))) is None
    assert straggler(trained(long(0), long(300))).ranks == (1,)


@pytest.mark.parametrize(("steps", "found"), [(19, False), (20, True)])
def test_twenty_steps_are_needed(steps, found):
    seen = trained(usual, slower(0, 40), steps=steps)
    assert (straggler(seen) is not None) is found
    if not found:
        assert outcome(seen).outcome is Outcome.SKIPPED
        assert "fewer than 20" in outcome(seen).reason


def test_only_steps_that_all_ranks_have_are_compared():
    short, long = trained(usual, slower(0, 40), steps=15), trained(usual, slower(0, 40), steps=60)
    assert straggler(job(short.ranks[0], long.ranks[1], ended=True, launcher_status=0)) is None


def test_members_of_different_groups_are_not_compared():
    work = (usual, slower(0, 60), usual, slower(0, 60))
    assert straggler(trained(*work, groups=("even", "odd"))) is None
    worlds = {"a": (0, 1), "b": (2, 3)}
    apart = replace_groups(trained(*work), worlds)
    assert sorted(finding.ranks for finding in judge(apart).findings) == [(1,), (3,)]


def replace_groups(found, worlds):
    """Give two groups the same name: only their members tell them apart."""
    ranks = [
        replace(rank, groups=tuple(group(0, 0, "", members) for members in worlds.values() if rank.rank in members))
        for rank in found.ranks
    ]
    return replace(found, ranks=tuple(ranks))


def test_waiting_anywhere_in_the_step_counts():
    """With a barrier after the data, who is early waits there, before forward."""
    slow = step_times([slower(0, 40)(i) for i in range(30)], [98.0] * 30)
    early = step_times([usual(i) for i in range(30)], [98.0] * 30)
    moved = replace(
        early,
        phases_us=(tuple(45 * MS for _ in range(30)), *early.phases_us[1:3], tuple(32 * MS for _ in range(30))),
        waits_us=(tuple(40 * MS for _ in range(30)), *early.waits_us[1:3], tuple(2 * MS for _ in range(30))),
    )
    ranks = [ended(0, 2, step_times=moved), ended(1, 2, step_times=slow)]
    assert straggler(job(*ranks, ended=True, launcher_status=0)).ranks == (1,)


def test_without_ddp_the_words_do_not_claim_a_forward():
    def by_hand(ms):
        return lambda _step: (25.0 + ms, 0.0, 0.0, 30.0)

    seen = trained(by_hand(0), by_hand(60), ends_with=StepEnd.OPTIMIZER)
    assert "slow outside backward" in straggler(seen).summary
    bare = trained(by_hand(0), by_hand(60), ends_with=StepEnd.COLLECTIVE)
    assert "slow between collectives" in straggler(bare).summary


def test_a_rank_that_was_never_met_has_the_line_of_its_forward():
    found = trained(usual, slower(Phase.FORWARD, 40))
    calls = (phase("ddp_forward", 29, open_=False), phase("backward", 30, open_=False))
    finding = straggler(replace(found, ranks=(found.ranks[0], replace(found.ranks[1], recent_calls=calls))))
    assert [place.line for place in finding.where] == [29]
    assert finding.confidence is Confidence.MEDIUM


def test_two_lines_at_most_and_none_that_is_rare():
    lines = (met(1, 31), met(1, 32, times=12), met(1, 33, times=8), met(1, 34, times=1))
    assert [place.line for place in straggler(trained(usual, slower(0, 40), lines=lines)).where] == [31, 32]
    lines = (met(1, 31), met(1, 32, times=2))
    assert [place.line for place in straggler(trained(usual, slower(0, 40), lines=lines)).where] == [31]


def calling(seen):
    number, found = seen
    return number, replace(found, calls_module=True)


def test_a_line_that_evaluates_comes_before_the_line_in_the_model():
    lines = (met(1, 31), calling(met(1, 90, times=19)), calling(met(1, 95, times=1)))
    assert [place.line for place in straggler(trained(usual, slower(0, 40), lines=lines)).where] == [90, 31]
    inside = (met(1, 31, Phase.FORWARD), calling(met(1, 90, Phase.FORWARD)))
    assert [place.line for place in straggler(trained(usual, slower(1, 40), lines=inside)).where] == [31]


def test_a_line_that_takes_batches_does_not_come_before_the_line_that_makes_them():
    found = trained(usual, slower(0, 40), lines=(met(1, 31), calling(met(1, 50))))
    taken = (call("next_batch", None, 50, open_=False),)
    finding = straggler(replace(found, ranks=(found.ranks[0], replace(found.ranks[1], recent_calls=taken))))
    assert [place.line for place in finding.where] == [31]


def test_a_rank_that_waits_for_its_loader_has_the_line_of_the_worker():
    lines = (met(1, 50, function="<module>"), met(1, 50, times=30, in_child=True), met(1, 17, times=9, in_child=True))
    found = trained(usual, slower(0, 40), lines=lines)
    taken = (call("next_batch", None, 50, open_=False),)
    finding = straggler(replace(found, ranks=(found.ranks[0], replace(found.ranks[1], recent_calls=taken))))
    assert [place.line for place in finding.where] == [17, 50]


def test_a_job_that_hangs_or_fails_has_another_verdict():
    slow = trained(usual, slower(0, 60), usual).ranks[1].step_times
    early = trained(usual, slower(0, 60), usual).ranks[0].step_times
    hung = job(in_backward(0, step_times=early), in_user(1, step_times=slow), in_backward(2, step_times=early))
    failed = job(crashed(0, step_times=early), crashed(1, step_times=slow), ended=True, launcher_status=1)
    for found in (hung, failed):
        assert straggler(found) is None
        assert outcome(found).outcome is Outcome.SKIPPED


def test_waits_that_were_not_seen_are_no_sign_of_an_even_pace():
    found = trained(usual, slower(0, 60))
    unseen = replace(found.ranks[0].step_times, numbers=(), phases_us=((),) * 4, waits_us=((),) * 4, unknown=60)
    blind = replace(found, ranks=tuple(replace(rank, step_times=unseen) for rank in found.ranks))
    assert straggler(blind) is None
    assert outcome(blind).outcome is Outcome.INCONCLUSIVE


def test_a_straggler_stops_no_job():
    running = trained(usual, slower(0, 60))
    assert not judge(replace(running, ended=False)).certain


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
    waiter = replace(one, step_times=replace(times, ended_ns=ends), recent_calls=calls)
    return replace(found, ranks=tuple(waiter if rank is one else rank for rank in found.ranks))


def test_a_rank_that_is_late_because_it_waits_for_a_peer_is_not_slow():
    assert straggler(receiving(trained(usual, slower(0, 40)), 1, ms=35)) is None
    assert straggler(receiving(trained(usual, slower(0, 80)), 1, ms=35)).ranks == (1,)
    both = receiving(trained(usual, slower(0, 40), usual, slower(0, 43)), 3, ms=35)
    assert straggler(both).ranks == (1,)


def test_a_rank_is_slow_where_the_others_wait_as_long_for_their_peers():
    both = receiving(receiving(trained(slower(0, 35), slower(0, 75)), 0, ms=35), 1, ms=35)
    assert straggler(both).ranks == (1,)


BEHIND = (slower(Phase.BEFORE, 40), usual, usual)


@pytest.mark.parametrize("shares", [(1.0, 0.98, 0.97), (None, 0.98, 0.97), (0.6, 0.85, 0.9)])
def test_nobody_is_slow_where_the_workers_of_the_others_make_batches_without_a_pause(shares):
    found = fetching(trained(*BEHIND), *shares)
    assert straggler(found) is None
    assert "the loader workers of ranks 0-2 are always busy" in outcome(found).reason


@pytest.mark.parametrize(
    "shares", [(1.0, 0.5, 0.6), (0.5, 0.5, 0.5), (1.0, None, None), (1.0, None, 0.98), (None, 0.5, 0.98)]
)
def test_whoever_the_others_could_outrun_is_slow(shares):
    assert straggler(fetching(trained(*BEHIND), *shares)).ranks == (0,)


def test_a_few_batches_of_workers_show_nothing():
    assert straggler(fetching(trained(*BEHIND), 1.0, 1.0, 1.0, batches=5)).ranks == (0,)


def test_what_workers_take_for_a_batch_is_reported():
    found = fetching(trained(*BEHIND), 1.0, 0.5, 0.5)
    assert straggler(found).evidence[-1] == (
        "a loader worker of rank 0 takes 85 ms per batch and is busy 100% of the time; on the others it takes "
        "85 ms and is busy 50%"
    )


def test_the_line_of_a_spawned_worker_is_not_that_of_its_imports():
    seen = (met(0, 50), met(0, 1, times=90, in_child=True, function="<module>"), met(0, 31, in_child=True))
    found = trained(*BEHIND, lines=seen)
    loops = replace(found.ranks[0], recent_calls=(phase("next_batch", 50, open_=False),))
    finding = straggler(replace(found, ranks=(loops, *found.ranks[1:])))
    assert [place.line for place in finding.where] == [31, 50]


# A rank that works is busy, shown with what it does; whoever waits in vain is not, whatever else its process
# does.


LOW, MEDIUM, HIGH = Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH
FEW, MANY = 10_000.0, 40_000_000.0


def work(cores=0.0, wanted=None, read=0.0, written=0.0):
    return Work(over_s=2.0, cores=cores, wanted=wanted, read_bytes_s=read, written_bytes_s=written)


def child(**done):
    return WorkingChild(pid=77, name="gcc -O2 a.c", work=work(**done))


def found(causes, **more):
    (finding,) = judge(job(in_call(0), in_user(1, line(12, "tokenize"), causes=causes, **more), in_call(2))).findings
    return finding


BUSY = {
    "computes": (ProcessCauses(work=work(0.97)), "has used 97% of a core for 60 s", LOW),
    "computes in many threads": (ProcessCauses(work=work(7.6)), "has used 97% of a core for 60 s", LOW),
    "computes on a crowded machine": (
        ProcessCauses(work=work(0.1, 0.95)), "has used 97% of a core for 60 s", LOW,
    ),
    "reads": (ProcessCauses(work=work(0.05, read=MANY)), "reads 40 MB/s", MEDIUM),
    "reads a file": (
        ProcessCauses(work=work(0.05, read=MANY), blocked=Blocked(call="read", file="/data/a.bin")),
        "reads 40 MB/s from a.bin",
        MEDIUM,
    ),
    "writes": (ProcessCauses(work=work(0.05, written=2_500_000.0)), "writes 2.5 MB/s", MEDIUM),
    "downloads": (
        ProcessCauses(work=work(), receiving=Receiving(remote="10.0.0.4:443", bytes_s=MANY)),
        "receives 40 MB/s from 10.0.0.4:443",
        MEDIUM,
    ),
    "its child computes": (
        ProcessCauses(work=work(), working_children=(child(cores=1.0),)),
        "its child gcc -O2 a.c (process 77) uses 100% of a core",
        MEDIUM,
    ),
    "its child computes on a crowded machine": (
        ProcessCauses(work=work(), working_children=(child(cores=0.1, wanted=0.9),)),
        "its child gcc -O2 a.c (process 77) wants 90% but gets 10% of a core",
        MEDIUM,
    ),
    "its child copies": (
        ProcessCauses(work=work(), working_children=(child(cores=0.1, written=MANY),)),
        "its child gcc -O2 a.c (process 77) writes 40 MB/s",
        MEDIUM,
    ),
}  # fmt: skip
VAIN = {
    "sleeps": ProcessCauses(work=work()),
    "polls": ProcessCauses(work=work(0.02, 0.05, read=FEW)),
    "has a child that idles": ProcessCauses(work=work(), working_children=(child(cores=0.12, read=FEW),)),
    "waits for a lock while a thread computes": ProcessCauses(
        work=work(0.9), waits_for_lock=FileLock(path="/data/lock", kind="flock", holder_pid=9, holder="python train.py")
    ),
    "waits for input while a thread computes": ProcessCauses(
        work=work(0.9), blocked=Blocked(call="read", alone_on_fd0=True)
    ),
    "nobody looked for long enough": ProcessCauses(busy_cores=0.9),
}


@pytest.mark.parametrize("name", BUSY)
def test_a_rank_that_works_is_busy(name):
    causes, said, confidence = BUSY[name]
    finding = found(causes, cpu_share=0.97 if "comput" in said or "used" in said else 0.0)
    sentence = said if said.startswith("its child") else f"it {said}"
    assert finding.summary == (
        f"rank 1 is busy in tokenize (train.py:12): {sentence}; ranks 0 and 2 are waiting for it in all_reduce"
    )
    assert (finding.kind, finding.ranks, finding.confidence) == ("stuck", (1,), confidence)
    assert finding.evidence[0].startswith(f"rank 1: {said}")
    assert "before init_process_group" in finding.fix


@pytest.mark.parametrize("name", VAIN)
def test_a_rank_that_waits_in_vain_is_not(name):
    finding = found(VAIN[name], cpu_share=0.9)
    assert finding.summary.startswith("rank 1 is stuck in tokenize (train.py:12);")
    assert finding.confidence is HIGH


def test_a_dead_child_is_what_it_waits_for_though_it_computes():
    lost = LostChild(pid=9, name="python", signal="SIGKILL")
    finding = found(
        ProcessCauses(work=work(0.9), lost_children=(lost,), blocked=Blocked(call="read", file="pipe")), cpu_share=0.9
    )
    assert "is stuck" in finding.summary


def test_work_is_measured_of_now_and_not_of_the_past():
    assert "is stuck" in found(ProcessCauses(work=work(0.01, 0.02)), cpu_share=0.9).summary


def test_the_fix_says_for_how_long_torch_waits():
    ranks = (limited(in_call(0), 1800.0), in_user(1, causes=ProcessCauses(work=work(0.97))), in_call(2))
    (finding,) = judge(job(*ranks)).findings
    assert "if the others must wait more than 30 min, raise the group's timeout" in finding.fix


def test_ranks_that_compute_while_nobody_waits_are_left_in_peace_for_four_hang_timeouts():
    causes = ProcessCauses(work=work(0.97))
    patient = judge(job(*(in_user(n, causes=causes, last_progress_ns=NOW - 30 * S) for n in range(3))))
    assert patient.findings == ()
    (finding,) = judge(job(*(in_user(n, causes=causes, last_progress_ns=LONG_AGO) for n in range(3)))).findings
    assert (finding.ranks, finding.confidence) == ((0, 1, 2), MEDIUM)
    assert finding.summary == "ranks 0-2 are busy in read_batch (train.py:12); no rank is waiting for another"


def test_a_busy_rank_is_never_stopped_unasked():
    ranks = (in_call(0), in_user(1, causes=ProcessCauses(work=work(0.97))), in_call(2))
    judged = judge(job(*ranks))
    assert (judged.certain, judged.proven) == (True, False)


# Why a rank is slow: each cause, and what only looks like it.


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
