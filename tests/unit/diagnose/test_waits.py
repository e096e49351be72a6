"""Waits folded by class: a circle stays a circle, and many classes become few."""

from ddpdoctor.diagnose.pictures.waits import MOST_CLASSES, fold_waits
from ddpdoctor.model.findings import Place, RankRow


def row(number, state="in all_reduce", line=20):
    place = Place(rank=number, file="/home/me/train.py", line=line, function="main")
    return RankRow(rank=number, local_rank=None, host="h", pid=None, state=state, where=place)


def test_ranks_that_wait_for_the_same_at_one_line_are_one_class():
    rows = {n: row(n) for n in range(4)} | {1: row(1, "in the script", 9)}
    found = fold_waits({n: frozenset({1}) for n in (0, 2, 3)}, rows, frozenset({1}))
    assert [(one.ranks, one.state, one.place, one.blamed) for one in found.classes] == [
        ((0, 2, 3), "in all_reduce", "/home/me/train.py:20 in main", False),
        ((1,), "in the script", "/home/me/train.py:9 in main", True),
    ]
    assert found.links == ((0, 1),)


def test_a_circle_at_one_line_is_not_folded():
    found = fold_waits({0: frozenset({1}), 1: frozenset({0})}, {0: row(0), 1: row(1)}, frozenset({0, 1}))
    assert [one.ranks for one in found.classes] == [(0,), (1,)]
    assert found.links == ((0, 1), (1, 0))


def test_a_large_circle_becomes_a_class_that_waits_for_itself():
    world = MOST_CLASSES + 1
    found = fold_waits(
        {n: frozenset({(n + 1) % world}) for n in range(world)}, {n: row(n) for n in range(world)}, frozenset()
    )
    assert [one.ranks for one in found.classes] == [tuple(range(world))]
    assert found.links == ((0, 0),)


def test_ranks_that_nobody_has_seen_never_started():
    found = fold_waits({0: frozenset({1, 2})}, {0: row(0)}, frozenset({1, 2}))
    assert (found.classes[1].ranks, found.classes[1].state, found.classes[1].place) == ((1, 2), "never started", "")
    assert fold_waits({}, {0: row(0)}, frozenset()) is None
