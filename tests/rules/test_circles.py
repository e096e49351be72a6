"""Circles of waits: over groups, point-to-point calls and both; who is on them, and how that is said."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.transport import find_targets
from tests.rules.build import (
    C10D,
    call,
    crashed,
    ended,
    failed_in,
    group,
    in_call,
    in_init,
    in_user,
    job,
    killed,
    line,
    model_of,
    moving,
    phase,
    rank,
    sample,
    stack,
)


def peer(number, op, other, world, site=20):
    return rank(number, world, open_calls=(call(op, None, site, peer=other),), groups=(group(6, world),))


def inside(number, world, name, seq, groups, op="all_reduce"):
    """A rank that waits in a group; ``groups`` has the members and this rank's counter of each, by name."""
    mine = tuple(group(n, world, g, members) for g, (members, n) in groups.items() if number in members)
    return rank(number, world, open_calls=(call(op, seq, 20 + number, group=name),), groups=mine)


def groups_of(a, b, world=None):
    return {"1": a, "2": b, **({"0": world} if world else {})}


W3, W4 = (0, 1, 2), (0, 1, 2, 3)
CIRCLES = {
    "both receive": ([peer(0, "recv", 1, 2), peer(1, "recv", 0, 2)], [0, 1]),
    "both send": ([peer(0, "send", 1, 2), peer(1, "send", 0, 2)], [0, 1]),
    "a ring of receives": ([peer(n, "recv", (n - 1) % 4, 4) for n in W4], [0, 1, 2, 3]),
    "a ring of three, a fourth waits for one of them": (
        [*[peer(n, "recv", (n - 1) % 3, 4) for n in W3], peer(3, "recv", 0, 4)],
        [0, 1, 2],
    ),
    "two rings": ([peer(n, "recv", n ^ 1, 4) for n in W4], [0, 1, 2, 3]),
    "two groups in opposite order": (
        [
            inside(0, 2, "1", 3, groups_of(((0, 1), 3), ((0, 1), 2))),
            inside(1, 2, "2", 3, groups_of(((0, 1), 2), ((0, 1), 3))),
        ],
        [0, 1],
    ),
    "a pair and the group of all, a third waits with one of them": (
        [
            inside(0, 3, "0", 7, {"0": (W3, 7), "1": ((0, 1), 2)}),
            inside(1, 3, "1", 3, {"0": (W3, 6), "1": ((0, 1), 3)}),
            inside(2, 3, "0", 7, {"0": (W3, 7)}),
        ],
        [0, 1],
    ),
    "three groups, each rank begins with another": (
        [
            inside(0, 3, "1", 1, {"1": ((0, 1), 1), "3": ((0, 2), 0)}),
            inside(1, 3, "2", 1, {"1": ((0, 1), 0), "2": ((1, 2), 1)}),
            inside(2, 3, "3", 1, {"2": ((1, 2), 0), "3": ((0, 2), 1)}),
        ],
        [0, 1, 2],
    ),
    "a receive against a barrier": (
        [
            peer(0, "recv", 1, 3),
            inside(1, 3, "0", 7, {"0": (W3, 7)}, "barrier"),
            inside(2, 3, "0", 7, {"0": (W3, 7)}, "barrier"),
        ],
        [0, 1],
    ),
    "a receive against new_group": (
        [peer(0, "recv", 1, 2), rank(1, 2, open_calls=(phase("new_group", 21),), groups=(group(6, 2),))],
        [0, 1],
    ),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_the_ranks_on_the_circle_are_named_and_no_others(name):
    ranks, blamed = CIRCLES[name]
    found = judge(job(*ranks))
    assert [(f.kind, list(f.ranks), f.confidence) for f in found.findings] == [("deadlock", blamed, Confidence.HIGH)]
    assert found.certain


def test_the_circle_is_reported_in_words():
    summary = judge(job(*CIRCLES["a pair and the group of all, a third waits with one of them"][0])).findings[0].summary
    assert summary == (
        "ranks 0 and 1 are waiting for each other: "
        "rank 0 is waiting in all_reduce of the group of all ranks for rank 1, "
        "which is waiting in all_reduce of the group of ranks 0 and 1 for rank 0"
    )


def test_groups_of_the_same_members_are_distinguished():
    summary = judge(job(*CIRCLES["two groups in opposite order"][0])).findings[0].summary
    assert "the group of all ranks (1)" in summary
    assert "the group of all ranks (2)" in summary


def test_a_long_circle_is_reported_in_short():
    found = judge(job(*[peer(n, "recv", (n - 1) % 40, 40) for n in range(40)])).findings[0]
    assert found.ranks == tuple(range(40))
    assert "through 34 more ranks" in found.summary


def test_a_transfer_of_which_both_halves_have_come_is_reported_and_the_job_goes_on():
    found = judge(job(peer(0, "send", 1, 3), peer(1, "recv", 0, 3), peer(2, "recv", 0, 3)))
    assert [(f.kind, f.ranks, f.confidence) for f in found.findings] == [("deadlock", (0, 1), Confidence.LOW)]
    assert "rank 0 is waiting in send for rank 1, which is waiting in recv for rank 0" in found.findings[0].summary
    assert "tag" in found.findings[0].fix
    assert not found.certain


def test_a_transfer_that_has_only_begun_is_none():
    found = judge(job(moving(peer(0, "send", 1, 2)), moving(peer(1, "recv", 0, 2))))
    assert found.findings == ()


def chain(end):
    """Ranks 0 and 1 wait in a group for 2, that waits in another for 3, which is ``end``."""
    a, b = ((0, 1, 2), 3), ((2, 3), 2)
    first = {"1": a}
    return [
        inside(0, 4, "1", 3, first),
        inside(1, 4, "1", 3, first),
        inside(2, 4, "2", 2, {"1": ((0, 1, 2), 2), "2": b}),
        end,
    ]


OWN = {"groups": (group(1, 4, "2", (2, 3)),)}
ENDS = {
    "stuck": in_user(3, world=4, **OWN),
    "stopped": in_user(3, world=4, proc_state="T", **OWN),
    "early-exit": ended(3, world=4, **OWN),
    "killed": killed(3, world=4, **OWN),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_chain_ends_at_the_rank_that_waits_for_nobody(kind):
    errors = [f for f in judge(job(*chain(ENDS[kind]))).findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks) for f in errors] == [(kind, (3,))]


def test_a_chain_of_receives_ends_at_the_rank_that_does_not_send():
    ranks = [peer(0, "recv", 1, 3), peer(1, "recv", 2, 3), in_user(2)]
    assert [(f.kind, f.ranks) for f in judge(job(*ranks)).findings] == [("stuck", (2,))]


def test_both_ends_of_two_chains_are_named():
    ranks = [peer(0, "recv", 1, 4), in_user(1, world=4), peer(2, "recv", 3, 4), in_user(3, world=4)]
    assert [(f.kind, f.ranks) for f in judge(job(*ranks)).findings] == [("stuck", (1, 3))]


def test_a_backward_of_a_model_in_another_group_waits_there():
    """The records name the model that ran last; the counters say which group has begun a collective since."""
    both = (model_of("1"), model_of("2"))

    def trains(number, moved):
        calls = (
            phase("ddp_forward", 12, group="1", index=1, open_=False, begun=6),
            phase("ddp_forward", 12, group="2", index=2, open_=False, begun=6),
        )
        pending = phase("backward", 14 + number, group="2", index=3, begun=6)
        counters = tuple(group(7 if name == moved else 6, 2, name) for name in ("1", "2"))
        return rank(number, 2, recent_calls=calls, open_calls=(pending,), groups=counters, models=both)

    found = judge(job(trains(0, "1"), trains(1, "2")))
    assert [(f.kind, f.ranks) for f in found.findings] == [("deadlock", (0, 1))]


# Who waits for whom, rank by rank, as a picture of the waits needs it.


def targets(*ranks, **more):
    return {number: set(whom) for number, whom in find_targets(build_job_state(job(*ranks, **more))).items()}


def in_group(number, name, members, seq, others):
    """A rank that waits in a group of its own, and has come as far as ``others`` say in the other groups."""
    groups = (group(0, 4), group(seq, 4, name, members), *(group(n, 4, other, who) for other, who, n in others))
    pending = call(seq=seq, group=name)
    return replace(
        rank(number, 4), open_calls=(pending,), groups=groups, samples=(sample(stack(line(20), C10D)),)
    )  # fmt: skip


def test_ranks_wait_for_the_one_that_has_not_come():
    assert targets(in_call(0), in_user(1), in_call(2)) == {0: {1}, 2: {1}}


def test_a_rank_in_the_call_before_is_waited_for_and_waits_itself():
    assert targets(in_call(0, seq=8, world=3), in_user(1), in_call(2, seq=7)) == {0: {1, 2}, 2: {1}}


def test_ranks_that_a_crash_threw_out_of_a_call_waited_for_the_crashed_one():
    lost = [failed_in(n, "all_reduce", 7, groups=(group(7, 3),)) for n in (0, 2)]
    assert targets(lost[0], crashed(1, groups=(group(6, 3),)), lost[1], ended=True) == {0: {1}, 2: {1}}


def test_two_groups_in_opposite_order_are_a_circle():
    one, other = ("1", (0, 1)), ("2", (0, 1))
    ranks = (in_group(0, *one, 1, [(*other, 0)]), in_group(1, *other, 1, [(*one, 0)]))
    assert targets(*ranks, world_size=2) == {0: {1}, 1: {0}}


def test_two_receives_are_a_circle():
    ranks = [in_call(n, "recv", None, peer=1 - n, world=2) for n in (0, 1)]
    assert targets(*ranks) == {0: {1}, 1: {0}}


def test_ranks_in_init_wait_for_those_that_never_came():
    assert targets(in_init(0, 4), in_init(1, 4), world_size=4) == {0: {2, 3}, 1: {2, 3}}
    never = rank(1, 2, life=Life.NEVER_STARTED, initialized=False)
    assert targets(in_init(0, 2), never) == {0: {1}}


def test_the_sides_of_a_conflict_wait_for_the_minority_and_without_one_for_each_other():
    assert targets(in_call(0), in_call(1, "broadcast"), in_call(2)) == {0: {1}, 2: {1}}
    assert targets(in_call(0, world=2), in_call(1, "broadcast", world=2)) == {0: {1}, 1: {0}}


def test_nobody_waits_where_all_run():
    assert targets(in_user(0), in_user(1), in_user(2)) == {}
