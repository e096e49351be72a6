import pytest

from ddpdoctor.model.bandwidth import Collective
from tests.unit.probes.bandwidth.ranks import run_ranks

KIB = 2**10


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return run_ranks("sweep", 2, tmp_path_factory.mktemp("sweep"))


def test_every_case_is_checked_and_measured_from_small_to_large(swept):
    few = swept[0]["few"]

    sizes = [row["size_bytes"] for row in few["results"]]
    assert sizes == sorted(sizes)
    assert {(row["collective"], row["mode"], row["size_bytes"]) for row in few["results"]} == {
        (one.value, mode, size) for one in Collective for mode in ("latency", "throughput") for size in (KIB, 4 * KIB)
    }
    assert all(row["wrong"] == 0 and row["iterations"] == 3 for row in few["results"])
    assert few["left_out"] == few["wrong"] == few["notes"] == []


def test_all_ranks_have_the_same_in_their_logs(swept):
    for name, first in swept[0].items():
        second = swept[1][name]
        assert {**first, "reported": None} == {**second, "reported": None}, name


def test_what_there_is_no_time_for_is_left_out_and_said(swept):
    short = swept[0]["short"]

    (left_out,) = short["left_out"]
    measured = [row["size_bytes"] for row in short["results"]]
    assert measured + left_out["sizes_bytes"] == [KIB * 4**power for power in range(12)]
    assert measured
    assert left_out["reason"] == "the budget of 0.5 s is too short"


def test_what_there_is_no_memory_for_is_left_out_and_said(swept):
    huge = swept[0]["huge"]

    (left_out,) = huge["left_out"]
    assert [row["size_bytes"] for row in huge["results"]] == [KIB]
    assert left_out["sizes_bytes"] == [2**45]
    assert left_out["reason"].startswith("needs 32768 GiB of ")
    assert left_out["reason"].endswith((" free on rank 0", " free on rank 1"))


def test_one_element_altered_at_one_size_is_found_there_and_nowhere_else(swept):
    altered = swept[0]["altered"]

    (wrong,) = altered["wrong"]
    assert (wrong["rank"], wrong["size_bytes"], wrong["index"], wrong["count"]) == (1, 2 * KIB, 100, 1)
    assert wrong["found"] == wrong["expected"] - 1
    assert [(row["size_bytes"], row["wrong"]) for row in altered["results"]] == [
        (size, int(size == 2 * KIB)) for size in (KIB, KIB, 2 * KIB, 2 * KIB, 4 * KIB, 4 * KIB)
    ]


def test_in_place_is_where_there_is_such_a_form_and_elsewhere_it_is_said(swept):
    in_place = swept[0]["in place"]

    assert {row["collective"]: row["in_place"] for row in in_place["results"]} == {
        one.value: one not in {Collective.ALL_TO_ALL, Collective.SEND_RECV} for one in Collective
    }
    assert in_place["notes"] == ["all_to_all and send_recv: measured out of place, there is no form in place"]


def test_arrivals_are_those_of_all_ranks_by_the_calls_with_a_barrier(swept):
    few = swept[0]["few"]

    assert [(one["rank"], one["host"], one["calls"]) for one in few["arrivals"]] == [
        (rank, f"host{rank}", 3 * 7 * 2) for rank in range(2)
    ]


def test_progress_says_what_is_measured_how_far_it_is_and_what_is_left(swept):
    reported = swept[0]["few"]["reported"]

    assert reported[0][0] == "all_reduce float32 1 KiB"
    assert reported[0][2] is None
    assert reported[-1][0] == "send_recv float32 4 KiB"
    assert all(0 <= share <= 1 and (left_s is None or left_s >= 0) for _, share, left_s in reported)


def test_a_rank_is_inside_no_call_when_all_is_done(swept):
    assert all(rank["few"]["inside"] is False and rank["few"]["phase"] == "measure" for rank in swept)


def test_one_rank_alone_is_swept_and_what_takes_two_is_said(tmp_path):
    (alone,) = run_ranks("sweep", 1, tmp_path)

    few = alone["few"]
    (left_out,) = few["left_out"]
    assert left_out["collective"] == "send_recv"
    assert len(few["results"]) == 6 * 2 * 2
    assert all(row["busbw_gb_s"] is None for row in few["results"])
    assert few["arrivals"] == []


def test_what_a_call_raises_is_not_swallowed_on_the_rank_nor_on_the_others(tmp_path):
    other, culprit = run_ranks("raise", 2, tmp_path)

    assert culprit == "no route to host"
    assert other != "nothing was raised"
