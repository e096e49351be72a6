import pytest

from ddpdoctor.probes.bandwidth.cases import DTYPES, REDOPS, reducible
from tests.unit.probes.bandwidth.ranks import run_ranks

RANKS = 3
"""Not a power of two: averages are rounded, and shares are not those of the backend's own chunks."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    return run_ranks("check", RANKS, tmp_path_factory.mktemp("check"))


def test_all_that_gloo_can_do_is_checked_and_right(checked):
    reduced = 4 * sum(reducible("gloo", dtype, redop) for dtype in DTYPES for redop in REDOPS)
    carried = 5 * len(DTYPES)
    large = 7 * 2

    assert checked[0]["everything"] == [reduced + carried + large, []]


def test_every_rank_knows_what_is_wrong_on_any(checked):
    assert checked[0]["seeded"] == checked[1]["seeded"] == checked[2]["seeded"]


@pytest.mark.parametrize(
    ("fault", "rank", "index", "off", "count"),
    [
        ("one element", 1, 777, 1.0, 1),
        ("bfloat16", 1, 777, 1.0, 1),
        ("max", 1, 777, 1.0, 1),
        ("min", 1, 777, 1.0, 1),
        ("prod", 1, 777, 1.0, 1),
        ("avg", 1, 777, 1.0, 1),
        ("large", 1, 777, 1.0, 1),
        ("broadcast", 2, 5, 1.0, 1),
    ],
)
def test_one_element_altered_on_one_rank_is_named(checked, fault, rank, index, off, count):
    if fault == "avg" and not reducible("gloo", "float32", "avg"):
        pytest.skip("Gloo of this torch has no average")
    (wrong,) = checked[0]["seeded"][fault]

    assert (wrong["rank"], wrong["host"], wrong["index"], wrong["count"]) == (rank, f"host{rank}", index, count)
    assert wrong["found"] - wrong["expected"] == pytest.approx(off)


def test_what_is_no_number_is_wrong_and_counted(checked):
    (wrong,) = checked[0]["seeded"]["not a number"]

    assert (wrong["rank"], wrong["index"], wrong["found"], wrong["count"]) == (0, 1021, "nan", 3)


@pytest.mark.parametrize(("fault", "ranks"), [("not reduced", [0, 1, 2]), ("stale output", [0, 1, 2])])
def test_a_call_that_moves_no_data_is_wrong_on_every_rank(checked, fault, ranks):
    wrong = checked[0]["seeded"][fault]

    assert [one["rank"] for one in wrong] == ranks
    assert all(one["count"] > 1000 for one in wrong)


def test_the_slots_of_other_ranks_are_distinguished(checked):
    (wrong,) = checked[0]["seeded"]["slots of others"]

    assert (wrong["rank"], wrong["index"]) == (0, 0)
    assert wrong["count"] > 1000


@pytest.mark.parametrize("fault", ["another size", "reduce elsewhere"])
def test_what_is_not_altered_or_not_said_to_hold_is_not_wrong(checked, fault):
    # A buffer too small to be altered; what a reduction leaves on ranks that it does not go to.
    assert checked[0]["seeded"][fault] == []


def test_one_rank_alone_is_checked_too(tmp_path):
    (alone,) = run_ranks("check", 1, tmp_path)

    assert alone["everything"][1] == []
