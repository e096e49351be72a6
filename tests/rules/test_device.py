"""Jobs over NCCL without DETAIL: what is judged from the calls that torch's flight recorder holds as pending."""

import random
import sys
from dataclasses import replace

import pytest

from ddpdoctor.collect.run_files import read_control_flow
from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import Call, ControlFlow, DeviceState, GroupState, Life
from ddpdoctor.model.findings import Confidence, Severity
from tests.rules.build import (
    C10D,
    LONG_AGO,
    NOW,
    S,
    backwards,
    call,
    crashed,
    ended,
    error,
    failed_in,
    group,
    in_backward,
    in_call,
    in_user,
    job,
    killed,
    line,
    moving,
    phase,
    rank,
    sample,
    stack,
)

UNKNOWN, SCHEDULED, STARTED = DeviceState.UNKNOWN, DeviceState.SCHEDULED, DeviceState.STARTED
LIMIT_S = 600


def nccl(enqueued, world=3, name="0", ranks=None, limit_s=LIMIT_S):
    members = tuple(range(world)) if ranks is None else ranks
    return GroupState(name=name, ranks=members, backend="nccl", enqueued=enqueued, timeout_s=limit_s)


def pending(op="all_reduce", seq=7, state=UNKNOWN, *, native=False, index=200, **more):
    """A call that the device has not completed. Of a native one, C++ alone knows."""
    own = {"site": None, "dtype": "Float", "shape": (25_000_000,), "tensors": 1} if native else {}
    return call(op, seq, **{**own, "index": index, "device_state": state, "native": native, **more})


def made(*ops, first=1, site=20):
    """Recorded collectives that the host has made and gone on from."""
    return tuple(call(op, first + n, site, index=first + n, open_=False) for n, op in enumerate(ops))


def on_device(number, *calls, world=3, enqueued=7, recent=None, groups=None, site=40, **more):
    """A rank whose host stands at a line such as ``loss.item()``, and whose device has pending calls."""
    calls = calls or (pending(),)
    if recent is None:
        recent = made(*(["all_reduce"] * enqueued))
    return rank(
        number, world, open_calls=calls, recent_calls=recent, groups=groups or (nccl(enqueued, world),),
        samples=(sample(stack(line(site, "step"))),), **more,
    )  # fmt: skip


def asleep(number, world=3, enqueued=6, **more):
    """A rank that stands in the script, and has nothing pending."""
    recent = more.pop("recent", made(*["all_reduce"] * enqueued))
    return in_user(number, world=world, groups=(nccl(enqueued, world),), recent_calls=recent, **more)


def bucket(number, state=UNKNOWN, world=3, enqueued=7):
    """A rank whose reducer has queued its bucket, and whose host has left ``backward``."""
    return on_device(
        number, pending(state=state, native=True), world=world, enqueued=enqueued, recent=backwards(3, last=7)
    )


def peer(op, other, index=200):
    return pending(op, None, peer=other, index=index)


TWO = (nccl(7, 2, "0"), nccl(3, 2, "1"))
SWAPPED = (nccl(6, 2, "0"), nccl(4, 2, "1"))
SIX = made(*["all_reduce"] * 6)
HALTED = [on_device(0), asleep(1), on_device(2)]
RUN_AHEAD = [on_device(0, enqueued=150), asleep(1), on_device(2, enqueued=90)]
OTHER = made(*["all_reduce"] * 6, "broadcast", *["all_reduce"] * 13)
DISAGREE = [on_device(0, enqueued=20), on_device(1, pending("broadcast", peer=0), enqueued=20, recent=OTHER),
            on_device(2, enqueued=20)]  # fmt: skip
COMPILED = [on_device(n, pending("broadcast" if n == 0 else "all_reduce", native=True), recent=()) for n in range(3)]
BEHIND = [on_device(n, pending(state=SCHEDULED if n == 1 else STARTED)) for n in range(3)]
GROUPS = [on_device(0, pending(seq=7), world=2, groups=TWO),
          on_device(1, pending(seq=4, group="1"), world=2, groups=SWAPPED, recent=SIX)]  # fmt: skip
RECEIVE = [on_device(0, peer("recv", 1), world=2), on_device(1, peer("recv", 0), world=2)]
JOBS = {
    "one sleeps, the others wait for their devices": (HALTED, "stuck", (1,), "high", True),
    "the hosts ran far ahead, and the oldest pending call counts": (RUN_AHEAD, "stuck", (1,), "high", True),
    "buckets of DDP's reducer": (
        [bucket(0), asleep(1, recent=backwards(3)), bucket(2)], "stuck", (1,), "high", True,
    ),
    "the device of one still runs what was queued before": (BEHIND, "stuck", (1,), "medium", False),
    "another operation under one number, far behind the hosts": (DISAGREE, "mismatch", (1,), "high", True),
    "of compiled code torch alone tells the operation": (COMPILED, "mismatch", (0,), "high", True),
    "two groups in opposite order": (GROUPS, "deadlock", (0, 1), "medium", True),
    "both receive first": (RECEIVE, "deadlock", (0, 1), "medium", True),
    "a receive whose sender sleeps": (
        [on_device(0, peer("recv", 1), world=2), asleep(1, 2, 7)], "stuck", (1,), "high", True,
    ),
    "all kernels run": ([on_device(n, pending(state=STARTED)) for n in range(3)], "transport", (0, 1, 2), "low", True),
    "whether kernels run is not known": ([on_device(n) for n in range(3)], "transport", (0, 1, 2), "low", False),
    "buckets, and nobody knows whether they run": (
        [bucket(n) for n in range(3)], "transport", (0, 1, 2), "low", False,
    ),
    "one has left": ([on_device(0), ended(1, recent_calls=SIX), on_device(2)], "early-exit", (1,), "high", True),
    "one raised": ([on_device(0), crashed(1), on_device(2)], "crash", (1,), "high", True),
    "one ran out of memory": ([on_device(0), killed(1, oom_killed=True), on_device(2)], "killed", (1,), "high", True),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_verdict_needs_no_detail(name):
    ranks, kind, blamed, confidence, certain = JOBS[name]
    judged = judge(job(*ranks))
    assert [(f.kind, f.ranks, f.confidence.value) for f in judged.findings if f.code != "DD901"] == [
        (kind, blamed, confidence)
    ]
    assert judged.certain is certain


BRANCHES = """\
def main():
    if case:
        for _ in range(6):
            all_reduce(x)
        if rank == 0:
            all_reduce(y)
        else:
            broadcast(y, 0)
        if rank == 0: all_reduce(y)
        else: broadcast(y, 0)
        if rank == 0:
            all_reduce(y)
        broadcast(y, 0)
        all_reduce(x if rank == 0 else y)
    synchronize()
"""
REDUCE, CAST = ("all_reduce", {}), ("broadcast", {"peer": 0})
ONE_TRUTH = {
    "a call in each branch": ((6, *REDUCE), (8, *CAST), (0, 1), "low", [6, 8]),
    "a call in each branch, each in one line": ((9, *REDUCE), (10, *CAST), (0, 1), "low", [9, 10]),
    "a call too many under a condition": ((12, *REDUCE), (13, *CAST), (0,), "medium", [11, 12]),
    "another size in one line": ((14, *REDUCE), (14, "all_reduce", {"shape": (8,)}), (1,), "medium", [14]),
}  # fmt: skip


@pytest.mark.parametrize("inside", [True, False], ids=["DETAIL stops the host in the call", "the host has gone on"])
@pytest.mark.parametrize("name", ONE_TRUTH)
def test_where_the_host_stands_does_not_change_who_is_to_blame(name, inside, tmp_path):
    *calls, blamed, confidence, where = ONE_TRUTH[name]
    (tmp_path / "train.py").write_text(BRANCHES)
    read = read_control_flow(tmp_path / "train.py", float("inf"))
    ranks = []
    for number, (site, op, more) in enumerate(calls):
        before = made(*["all_reduce"] * 6, site=4)
        mine = pending(op, 7, site=site, **more)
        gone_on = (replace(mine, ended_ns=NOW, index=7, device_state=None),)
        if site == 12:
            gone_on += (call("broadcast", 8, 13, index=8, open_=False, peer=0),)
        frames = (line(site), C10D) if inside else (line(15),)
        recent = before if inside else before + gone_on
        at = on_device(number, mine, world=2, enqueued=len(recent), recent=recent)
        ranks.append(replace(at, samples=(sample(stack(*frames)),)))
    flow = (ControlFlow(file=line(1).file, statements=read.statements),)
    found = [one for one in judge(job(*ranks, control_flow=flow)).findings if one.code != "DD901"]
    assert [(one.kind, one.ranks, one.confidence.value, [at.line for at in one.where]) for one in found] == [
        ("mismatch", blamed, confidence, where)
    ]
    assert "skipped" not in found[0].summary


def test_ranks_of_which_torch_tells_nothing_are_not_said_to_wait_for_nobody():
    """Both may wait on their devices, for each other or for a third: torch has not answered, as on a loaded machine."""
    lines = [in_user(0, line(11), world=2), in_user(1, line(3, "fetch"), world=2)]
    (known,) = judge(job(*lines)).findings
    assert "no rank is waiting for another" in known.summary
    unread = job(*[replace(rank, device_unread=True) for rank in lines])
    early = judge(replace(unread, hang_timeout_s=40.0))
    assert not early.findings
    assert "torch did not say what ranks 0 and 1 have pending on the device" in str(early.checks)
    assert [judge(replace(unread, hang_timeout_s=s)).certain for s in (10.0, 7.0)] == [False, True]
    (late,) = judge(unread).findings
    assert (late.kind, late.ranks, late.confidence) == ("stuck", (0, 1), Confidence.LOW)
    assert "torch did not say" in late.summary


PROVEN = {"mismatch", "early-exit", "crash", "killed"}


@pytest.mark.parametrize("name", JOBS)
def test_what_a_slow_kernel_may_explain_stops_no_job_before_torchs_limit(name):
    ranks, kind, *_ = JOBS[name]
    assert judge(job(*ranks)).proven is (kind in PROVEN)


@pytest.mark.parametrize("state", [UNKNOWN, SCHEDULED, STARTED])
def test_a_collective_that_has_outlived_torchs_limit_is_certain_whatever_its_kernels_do(state):
    ranks = [on_device(n, pending(state=state), groups=(nccl(7, limit_s=20),)) for n in range(3)]
    judged = judge(job(*ranks))
    assert (judged.findings[0].kind, judged.certain, judged.proven) == ("transport", True, True)


HEALTHY = {
    "devices work through long queues while hosts go on": [moving(on_device(n, enqueued=150)) for n in range(3)],
    "one rank is late with what others have queued": [on_device(0), moving(asleep(1)), on_device(2)],
    "one rank compiles between its calls": [on_device(0), moving(asleep(1)), moving(on_device(2))],
    "buckets are under way": [moving(bucket(n)) for n in range(3)],
    "a rank's own record of what is a bucket for torch": [
        moving(on_device(0, pending(native=True), recent=())), moving(on_device(1)), moving(bucket(2)),
    ],
    "one has left after its part, and another exports": [moving(asleep(0, enqueued=7)), ended(1), ended(2)],
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_is_left_alone(name):
    assert judge(job(*HEALTHY[name])).findings == ()


@pytest.mark.parametrize("peers", [(bucket(1), bucket(2)), (on_device(1), on_device(2))])
def test_torchs_names_for_what_it_alone_reports_make_no_mismatch(peers):
    judged = judge(job(on_device(0, pending(native=True), recent=()), *peers))
    assert [f.kind for f in judged.findings] == ["transport"]


def test_a_call_whose_time_is_not_known_has_not_waited_since_the_machine_started():
    shown = judge(job(*(on_device(n, pending(started_ns=0)) for n in range(3)))).findings
    assert not any(" h " in text for one in shown for text in one.evidence)


def aborted(number, *calls, after_s=LIMIT_S, outside=True, **more):
    """A rank that SIGABRT ended so long after its calls; ``outside``: sent by a thread that runs no Python."""
    own = on_device(number, *(replace(one, started_ns=NOW - int(after_s * S)) for one in calls or (pending(),)))
    common = {
        "open_calls": own.open_calls if calls != () else (),
        "groups": own.groups,
        "recent_calls": own.recent_calls,
    }
    return killed(number, "SIGABRT", fatal_outside=outside, ended_ns=NOW, **{**common, **more})


def three_calls(began_ns):
    """The calls 7 to 9 of a rank, of which the first began at a time."""
    times = [{"started_ns": began_ns + n * S, "ended_ns": began_ns + n * S + 1} for n in range(3)]
    return tuple(call("all_reduce", 7 + n, index=7 + n, open_=False, **more) for n, more in enumerate(times))


ABORTS = {
    "one rank was missed": ([aborted(0, pending()), asleep(1), aborted(2, pending())], "stuck", (1,)),
    "one rank was missed, and has gone with the job": (
        [aborted(0, pending()), replace(asleep(1), after_stop=True), on_device(2)], "stuck", (1,),
    ),
    "one rank was missed, and reported by the others' watchdogs to end": (
        [aborted(0, pending()), aborted(1, recent_calls=SIX, open_calls=(), groups=(nccl(6),), fatal_place=line(12)),
         aborted(2, pending())],
        "stuck", (1,),
    ),
    "another operation": (
        [aborted(0, pending()), aborted(2, pending()),
         aborted(1, pending("broadcast", peer=0), recent_calls=made(*["all_reduce"] * 6, "broadcast"))],
        "mismatch", (1,),
    ),
    "one came after the limit, and waits in a later one": (
        [aborted(0, pending(), after_s=700), aborted(2, pending(), after_s=700),
         on_device(1, pending(seq=9, started_ns=NOW - 58 * S), recent=(*SIX, *three_calls(NOW - 60 * S)))],
        "stuck", (1,),
    ),
    "one came before the limit, and waits in a later one": (
        [aborted(0, pending(), after_s=700), aborted(2, pending(), after_s=700),
         on_device(1, pending(seq=9, started_ns=NOW - 108 * S), recent=(*SIX, *three_calls(NOW - 110 * S)))],
        "transport", (0, 1, 2),
    ),
    "all waited in one collective": ([aborted(n, pending()) for n in range(3)], "transport", (0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", ABORTS)
def test_an_abort_of_the_watchdog_is_a_consequence(name):
    ranks, kind, blamed = ABORTS[name]
    judged = judge(job(*ranks, ended=True, launcher_status=1))
    assert [(f.kind, f.ranks) for f in judged.findings if f.code != "DD901"] == [(kind, blamed)]


def released(number, held_s=LIMIT_S + 1, ended_s=16, *, outside=True, seq=7):
    """A rank whose host left a call for the next one, in which it was aborted, as nccl2 of torch 2.15 does it."""
    left_ns = NOW - ended_s * S
    before = call("all_reduce", seq, index=seq, open_=False, started_ns=left_ns - int(held_s * S), ended_ns=left_ns - 1)
    after = call("all_reduce", seq + 1, index=seq + 1, started_ns=left_ns)
    return killed(
        number, "SIGABRT", fatal_outside=outside, ended_ns=NOW, open_calls=(after,), recent_calls=(*SIX, before),
        groups=(nccl(seq + 1),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of_all", "of_one", "kind"),
    [
        ({}, {}, "transport"),
        ({}, {"outside": False}, "transport"),
        ({}, {"held_s": LIMIT_S / 2}, "killed"),
        ({}, {"seq": 8}, "killed"),
        ({"held_s": LIMIT_S - 5}, {}, "killed"),
        ({"held_s": LIMIT_S + 60}, {}, "killed"),
        ({"ended_s": 300}, {}, "killed"),
        ({"outside": False}, {}, "killed"),
    ],
    ids=[
        "all left it at its limit", "and the end of one was another", "one had left it before", "it is another one",
        "all left it before the limit", "long after it", "they ended long after it", "by the script's own thread",
    ],
)  # fmt: skip
def test_a_collective_that_torch_gave_up_is_the_one_that_did_not_complete(of_all, of_one, kind):
    ranks = [released(0, **of_all), released(1, **of_all), released(2, **{**of_all, **of_one})]
    found = judge(job(*ranks, ended=True, launcher_status=1)).findings[0]
    assert found.kind == kind
    assert ("collective 7 of" in found.summary) is (kind == "transport")
    assert any("when the limit of this one had passed" in said for said in found.evidence) is (kind == "transport")


def test_without_entries_a_late_abort_from_outside_python_is_not_sure():
    calls = (call("all_reduce", 7, index=7, open_=False, started_ns=NOW - LIMIT_S * S),)
    lone = killed(0, "SIGABRT", fatal_outside=True, ended_ns=NOW, recent_calls=calls, groups=(nccl(7),))
    found = judge(job(lone, asleep(1), asleep(2), ended=True, launcher_status=1)).findings[0]
    assert (found.kind, found.ranks, found.confidence) == ("killed", (0,), Confidence.LOW)
    assert any("the NCCL watchdog" in text for text in found.evidence)


@pytest.mark.parametrize(("after_s", "confidence"), [(500, Confidence.LOW), (300, Confidence.HIGH)])
def test_a_watchdog_that_stands_still_itself_is_ended_by_its_monitor(after_s, confidence):
    calls = (call("all_reduce", 7, index=7, open_=False, started_ns=NOW - after_s * S),)
    lone = killed(0, "SIGABRT", fatal_outside=True, ended_ns=NOW, recent_calls=calls, groups=(nccl(7, limit_s=1800),))
    found = judge(job(lone, asleep(1), asleep(2), ended=True, launcher_status=1)).findings[0]
    assert (found.kind, found.ranks, found.confidence) == ("killed", (0,), confidence)


@pytest.mark.parametrize(("outside", "after_s"), [(False, LIMIT_S), (True, 5)])
def test_an_abort_of_the_scripts_own_stays_the_cause(outside, after_s):
    calls = (call("all_reduce", 6, index=6, open_=False, started_ns=NOW - after_s * S),)
    own = killed(0, "SIGABRT", fatal_outside=outside, ended_ns=NOW, recent_calls=calls, groups=(nccl(6),))
    found = judge(job(own, asleep(1), asleep(2), ended=True, launcher_status=1)).findings[0]
    assert (found.kind, found.ranks, found.confidence) == ("killed", (0,), Confidence.HIGH)


@pytest.mark.parametrize(("hang_timeout_s", "shown"), [(10, False), (700, True)])
def test_a_hang_timeout_above_torchs_limit_is_reported(hang_timeout_s, shown):
    ranks = [aborted(0, pending()), asleep(1), aborted(2, pending())]
    found = judge(job(*ranks, ended=True, launcher_status=1, hang_timeout_s=hang_timeout_s)).findings[0]
    assert any("use a --hang-timeout below 10 min" in text for text in found.evidence) is shown


# What must hold for every job: cost grows with the ranks, and no rank that moves is blamed.


def count_entries(ranks, code=None):
    """Return how many Python functions a judgment enters: a measure of its cost that no busy machine disturbs.

    With ``code`` only that function counts.
    """
    entered = 0

    def count(frame, event, _argument):
        nonlocal entered
        entered += event == "call" and code in (None, frame.f_code)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = judge(job(*ranks))
    finally:
        sys.setprofile(before)
    assert [f.ranks for f in found.findings] == [(3,)]
    return entered


def count_calls(world, culprit):
    recent = tuple(call(seq=n, index=n, open_=False) for n in range(1, 41))
    ranks = [in_call(n, seq=41, world=world, recent=recent) for n in range(world)]
    ranks[3] = culprit(3, world)
    return count_entries(ranks)


def test_cost_of_a_hang_grows_with_the_ranks_and_not_with_their_pairs():
    def sleeps(number, world):
        return in_user(number, world=world)

    assert count_calls(256, sleeps) < 3 * count_calls(128, sleeps)


def test_cost_of_a_mismatch_grows_with_the_ranks_and_not_with_their_pairs():
    def differs(number, world):
        return in_call(number, "reduce", 41, 6, world=world)

    assert count_calls(256, differs) < 3 * count_calls(128, differs)


def history(records):
    """Return the packed calls of a long job, in which every fourth record is a collective."""
    found = []
    for n in range(1, records + 1, 4):
        found += [
            phase("next_batch", 28, index=n, open_=False),
            phase("ddp_forward", 29, index=n + 1, open_=False),
            phase("backward", 30, index=n + 2, open_=False),
            call(seq=1 + n // 4, index=n + 3, open_=False),
        ]
    return pack_calls(found)


def after(records, make):
    """Return eight ranks that wait after a long history, and a fourth among them that is different."""
    past = history(records)
    last = {"recent_calls": past, "groups": (group(len(past) // 4, 8),)}
    ranks = [replace(in_call(n, seq=1 + records // 4, world=8, index=records + 9), recent_calls=past) for n in range(8)]
    ranks[3] = replace(make(3, records), **last)
    return ranks


def sleeping(number, _records):
    return in_user(number, world=8)


def calling_another(number, records):
    return in_call(number, "reduce", 1 + records // 4, 6, world=8, index=records + 9)


def gone(number, _records):
    return ended(number, world=8)


@pytest.mark.parametrize("make", [sleeping, calling_another, gone])
def test_few_calls_are_made_of_a_long_packed_history(make):
    made = count_entries(after(4000, make), Call.__init__.__code__)
    assert made <= 3 * 8


@pytest.mark.parametrize("make", [sleeping, calling_another, gone])
def test_cost_grows_with_the_records_and_not_with_their_pairs(make):
    assert count_entries(after(2000, make)) < 3 * count_entries(after(1000, make))


def some_rank(dice, number):
    """Return a rank in any state, with any of its facts missing."""
    seq = dice.choice([6, 7, 8])
    makers = [
        lambda: in_user(number),
        lambda: in_call(number, dice.choice(["all_reduce", "reduce", "barrier"]), seq),
        lambda: in_backward(number, dice.choice([None, 6, 7])),
        lambda: ended(number),
        lambda: killed(number, dice.choice(["SIGKILL", "SIGABRT", "SIGSEGV", None])),
        lambda: crashed(number),
        lambda: failed_in(number, "backward"),
        lambda: failed_in(number, "all_reduce", seq),
        lambda: rank(number, life=Life.NEVER_STARTED),
        lambda: rank(number, proc_state="T"),
        lambda: rank(number, main_ended_ns=1),
        lambda: rank(number, open_calls=(call("recv", peer=dice.choice([None, 0, 9])),), groups=()),
        lambda: rank(number, initialized=False, open_calls=(phase("init_process_group", None),), world_size=None),
        lambda: rank(number, open_calls=(phase("work_wait", None),), started_ns=None, last_progress_ns=None),
        lambda: rank(number, open_calls=(phase("new_group"),), pid=None, host=""),
    ]
    found = dice.choice(makers)()
    return moving(found) if dice.random() < 0.5 else found


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.full) for seed in (6, 7, 8))])
def test_no_job_makes_a_rule_raise_or_blames_a_rank_that_moves(seed):
    dice = random.Random(seed)
    for _ in range(800):
        ranks = [some_rank(dice, n) for n in range(dice.choice([0, 1, 2, 3, 4]))]
        seen = job(*ranks, ended=dice.random() < 0.3, debug_level=dice.choice(["OFF", "DETAIL"]))
        found = judge(seen)
        assert [c for c in found.checks if c.outcome == "crashed"] == []
        errors = [f for f in found.findings if f.severity is Severity.ERROR]
        assert all(len(f.where) <= 2 * len(f.ranks) + 2 for f in errors)
        if seen.ended or any(r.life in (Life.EXITED, Life.SIGNALED) for r in ranks):
            continue
        alive = {r.rank for r in ranks if r.life is Life.RUNNING and r.last_progress_ns == moving(r).last_progress_ns}
        at_end = {r.rank for r in ranks if r.main_ended_ns is not None}
        blamed = {n for f in errors for n in f.ranks}
        assert blamed & (alive - at_end) == set(), [(f.kind, f.ranks) for f in errors]


# Ranks of a device mesh: who waits in which dimension and for whom, and errors that a library of torch's passed
# on.


def mesh_group(name, dim, ranks, enqueued):
    return GroupState(name=name, ranks=ranks, backend="gloo", enqueued=enqueued, mesh_dim=dim)


def waiting(number, op, seq, name, *groups, **more):
    return rank(number, 4, open_calls=(call(op, seq, 20, group=name, **more),), groups=groups)


def two_by_two(inner="tp", outer="dp"):
    """Rank 3 of a mesh of 2 by 2 stands still: 2 waits for it in one dimension, 1 in the other, 0 behind that."""
    first, second = mesh_group("1", inner, (0, 1), 5), mesh_group("2", inner, (2, 3), 5)
    even, odd = mesh_group("3", outer, (0, 2), 5), mesh_group("4", outer, (1, 3), 5)
    behind = mesh_group("3", outer, (0, 2), 4)
    return (
        waiting(0, "all_reduce", 5, "3", first, even),
        waiting(1, "all_reduce", 5, "4", first, odd),
        waiting(2, "all_gather", 5, "2", second, behind),
        in_user(3, groups=(mesh_group("2", inner, (2, 3), 4), mesh_group("4", outer, (1, 3), 4)), world=4),
    )


@pytest.mark.parametrize(
    ("dims", "summary", "seen"),
    [
        pytest.param(
            ("tp", "dp"),
            "; ranks 1 and 2 are waiting for it in the dp and tp groups; rank 0 is waiting behind ranks 1 and 2",
            (
                "ranks 0 and 1 wait in all_reduce of float32[16] in their dp groups for ranks 2 and 3, train.py:20",
                "rank 2 waits in all_gather of float32[16] in the tp group (ranks 2 and 3) for rank 3, train.py:20",
            ),
            id="named dimensions",
        ),
        pytest.param(
            ("dim_1", "dim_0"),
            "; ranks 1 and 2 are waiting for it in the mesh dimension 0 and mesh dimension 1 groups; "
            "rank 0 is waiting behind ranks 1 and 2",
            ("in the mesh dimension 1 group (ranks 2 and 3) for rank 3",),
            id="dimensions without names",
        ),
        pytest.param(
            ("", ""),
            "; ranks 0-2 are waiting for it",
            ("rank 2 waits in all_gather of float32[16], train.py:20",),
            id="no mesh",
        ),
    ],
)
def test_waits_are_reported_by_dimension(dims, summary, seen) -> None:
    verdict = judge(job(*two_by_two(*dims))).findings[0]
    assert (verdict.kind, verdict.ranks) == ("stuck", (3,))
    assert verdict.summary.endswith(summary)
    assert all(any(words in sentence for sentence in verdict.evidence) for words in seen), verdict.evidence


def test_a_dimension_that_spans_all_ranks_is_the_group_of_all() -> None:
    everybody = tuple(range(4))
    ranks = [waiting(n, "all_reduce", 5, "0", mesh_group("0", "dp", everybody, 5)) for n in range(3)]
    verdict = judge(job(*ranks, in_user(3, world=4, enqueued=4))).findings[0]
    assert verdict.summary.endswith("; ranks 0-2 are waiting for it in all_reduce")


def test_a_receive_says_from_whom() -> None:
    found = judge(job(waiting(0, "irecv", None, "0", peer=1), in_user(1, world=2), world_size=2)).findings[0]
    assert any("in irecv of float32[16] from rank 1, " in sentence for sentence in found.evidence), found.evidence


def heard_of(number, of_ranks, at, **more):
    """A rank on which a distributed checkpoint raised the collection of errors."""
    text = f"CheckpointException ranks:dict_keys({list(of_ranks)})"
    return crashed(number, error("CheckpointException", text, at, (line(30), C10D), of_ranks=of_ranks, **more))


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        pytest.param(
            (
                heard_of(0, (1,), LONG_AGO),
                crashed(1, error(at=LONG_AGO + S, of_ranks=(1,), passed_on_as="CheckpointException")),
                heard_of(2, (1,), LONG_AGO),
            ),
            (1,),
            id="the rank whose error it was raised last",
        ),
        pytest.param(
            (heard_of(0, (0, 1), LONG_AGO), heard_of(1, (0, 1), LONG_AGO), heard_of(2, (0, 1), LONG_AGO)),
            (0, 1, 2),
            id="all at one line, with errors of several",
        ),
    ],
)
def test_who_only_heard_of_an_error_is_not_blamed(ranks, blamed) -> None:
    verdict = judge(job(*ranks)).findings[0]
    assert (verdict.kind, verdict.ranks) == ("crash", blamed)


def test_the_error_that_the_log_ends_with_is_named() -> None:
    raised = error(passed_on_as="RuntimeError")
    verdict = judge(job(crashed(0, raised), in_user(1, world=2), world_size=2)).findings[0]
    assert "torch raised RuntimeError because of this error" in verdict.evidence
