"""Who waits for whom, rank by rank, as a picture of the waits needs it."""

from dataclasses import replace

from ddpdoctor.model.facts import Life
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.wait_links import find_targets
from tests.rules.build import (
    C10D,
    call,
    crashed,
    failed_in,
    group,
    in_call,
    in_init,
    in_user,
    job,
    line,
    rank,
    sample,
    stack,
)


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
