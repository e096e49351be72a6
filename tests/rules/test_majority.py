"""Who differs from the majority, and how that is said."""

import pytest

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.majority import Voice, compare, describe, voices_of
from tests.rules.environment.build import node, process


def voices(*values, by_rank=False):
    return [Voice(host=f"node{i // 2 if by_rank else i}", ranks=(i,), value=value) for i, value in enumerate(values)]


@pytest.mark.parametrize("values", [(), ("2.13",), ("2.13", "2.13"), ("2.13", None, "2.13"), (None, None)])
def test_those_who_agree(values):
    assert compare(voices(*values)) is None


def test_one_differs_from_fifteen():
    split = compare(voices("2.13.0", "2.13.0", "2.13.0", "2.11.0", *["2.13.0"] * 12))

    assert (split.hosts, split.ranks, split.confidence) == (("node3",), (3,), Confidence.HIGH)
    assert describe(split, "torch") == "torch 2.11.0 on node3, 2.13.0 on 15 others"


def test_several_minorities_the_smallest_first():
    split = compare(voices("b", "b", "c", *["a"] * 5))

    assert split.majority.value == "a"
    assert split.hosts == ("node2", "node0", "node1")
    assert describe(split, "kernel") == "kernel c on node2, b on node0 and node1, a on 5 others"


@pytest.mark.parametrize("values", [("a", "b"), ("a", "b", "a", "b"), ("a", "b", "c"), ("a", "a", "b", "c")])
def test_without_a_majority_all_sides_are_named_and_nobody_is_surely_to_blame(values):
    split = compare(voices(*values))

    assert (split.majority, split.confidence) == (None, Confidence.LOW)
    assert set(split.hosts) == {f"node{i}" for i in range(len(values))}


def test_two_hosts():
    assert describe(compare(voices("580.1", "570.2")), "driver") == "driver 580.1 on node0, 570.2 on node1"


def test_who_does_not_know_has_no_voice():
    split = compare(voices("a", None, None, None, "b", "b"))

    assert (split.majority.value, split.hosts) == ("b", ("node0",))
    assert describe(split, "x") == "x a on node0, b on 2 others"


def test_ranks_by_their_numbers():
    split = compare(voices("Tree", "Ring", "Tree", "Tree", by_rank=True))

    said = describe(split, "NCCL_ALGO", by_rank=True, sign="=")
    assert said == "NCCL_ALGO=Ring on rank 1, Tree on 3 others"
    assert split.hosts == ("node0",)


def test_a_majority_of_one_host_with_several_ranks_is_named():
    split = compare([Voice(host="a", ranks=(n,), value=1 + (n == 2)) for n in range(3)])
    assert describe(split, "x") == "x 2 on a, 1 on a"
    assert describe(split, "x", by_rank=True) == "x 2 on rank 2, 1 on 2 others"


def test_values_in_words():
    split = compare(voices(1, 2, 2))
    assert describe(split, "GPUs:", words=lambda count: f"{count} GB") == "GPUs: 1 GB on node0, 2 GB on 2 others"


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, "n0"), (2, "n0 and n1"), (4, "n0, n1, n2 and n3"), (5, "n0, n1, n2 and 2 more"), (9, "n0, n1, n2 and 6 more")],
)
def test_a_list_of_hosts_stays_short(count, said):
    assert name_list([f"n{i}" for i in range(count)]) == said


def test_one_voice_a_node():
    readings = ((node("a", processes=[process(0), process(1)]), "x"), (node("b", processes=[process(2)]), "yy"))
    assert voices_of(readings, len) == (
        Voice(host="a", ranks=(0, 1), value=1),
        Voice(host="b", ranks=(2,), value=2),
    )
