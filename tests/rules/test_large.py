"""What must hold for every job: cost grows with the ranks, and no rank that moves is blamed."""

import random
import sys
from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import Call, Life
from ddpdoctor.model.findings import Severity
from tests.rules.build import (  # fmt: skip
    call,
    crashed,
    ended,
    failed_in,
    group,
    in_backward,
    in_call,
    in_user,
    job,
    killed,
    moving,
    phase,
    rank,
)


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
