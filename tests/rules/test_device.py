"""Jobs over NCCL without DETAIL: what is judged from the calls that torch's flight recorder holds as pending."""

import random
import sys
from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Call, ControlFlow, DeviceState, GroupState, Life
from ddpdoctor.model.findings import Severity
from tests.golden import table
from tests.rules import build
from tests.rules.build import (
    C10D,
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
    pack_calls,
    phase,
    rank,
    sample,
    stack,
)
from tests.rules.test_turning import read

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
OTHER = made(*["all_reduce"] * 6, "broadcast", *["all_reduce"] * 13)


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


def branched(inside, *calls):
    """Judge a job of two ranks in one of these calls each, in which the host stops, or from which it has gone on."""
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
    judged = judge(job(*ranks, control_flow=(ControlFlow(file=line(1).file, statements=read(BRANCHES).statements),)))
    return replace(judged, findings=tuple(one for one in judged.findings if one.code != "DD901"))


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


def released(number, held_s=LIMIT_S + 1, ended_s=16, *, outside=True, seq=7):
    """A rank whose host left a call for the next one, in which it was aborted, as nccl2 of torch 2.15 does it."""
    left_ns = NOW - ended_s * S
    before = call("all_reduce", seq, index=seq, open_=False, started_ns=left_ns - int(held_s * S), ended_ns=left_ns - 1)
    after = call("all_reduce", seq + 1, index=seq + 1, started_ns=left_ns)
    return killed(
        number, "SIGABRT", fatal_outside=outside, ended_ns=NOW, open_calls=(after,), recent_calls=(*SIX, before),
        groups=(nccl(seq + 1),),
    )  # fmt: skip


def lone(seq, after_s, limit_s=LIMIT_S, **more):
    """Rank 0, that SIGABRT ended so long after its last call began, and of which torch told nothing."""
    calls = (call("all_reduce", seq, index=seq, open_=False, started_ns=NOW - int(after_s * S)),)
    return killed(0, "SIGABRT", ended_ns=NOW, recent_calls=calls, groups=(nccl(seq, limit_s=limit_s),), **more)


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


@pytest.mark.full
@pytest.mark.parametrize(
    "culprit",
    [lambda n, world: in_user(n, world=world), lambda n, world: in_call(n, "reduce", 41, 6, world=world)],
    ids=["a hang", "a mismatch"],
)
def test_cost_grows_with_the_ranks_and_not_with_their_pairs(culprit):
    assert count_calls(256, culprit) < 3 * count_calls(128, culprit)


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
def test_of_a_long_packed_history_few_calls_are_made_and_cost_grows_with_the_records(make):
    assert count_entries(after(2000, make), Call.__init__.__code__) <= 3 * 8
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
    for _ in range(300):
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


def waits_in(number, op, seq, name, *groups, **more):
    return rank(number, 4, open_calls=(call(op, seq, 20, group=name, **more),), groups=groups)


def two_by_two(inner="tp", outer="dp"):
    """Rank 3 of a mesh of 2 by 2 stands still: 2 waits for it in one dimension, 1 in the other, 0 behind that."""
    first, second = mesh_group("1", inner, (0, 1), 5), mesh_group("2", inner, (2, 3), 5)
    even, odd = mesh_group("3", outer, (0, 2), 5), mesh_group("4", outer, (1, 3), 5)
    behind = mesh_group("3", outer, (0, 2), 4)
    return (
        waits_in(0, "all_reduce", 5, "3", first, even),
        waits_in(1, "all_reduce", 5, "4", first, odd),
        waits_in(2, "all_gather", 5, "2", second, behind),
        in_user(3, groups=(mesh_group("2", inner, (2, 3), 4), mesh_group("4", outer, (1, 3), 4)), world=4),
    )


def heard_of(number, of_ranks, at, **more):
    """A rank on which a distributed checkpoint raised the collection of errors."""
    text = f"CheckpointException ranks:dict_keys({list(of_ranks)})"
    return crashed(number, error("CheckpointException", text, at, (line(30), C10D), of_ranks=of_ranks, **more))


test_rows = table("device", vars(build), globals(), head=build.sureness)
