import pytest

from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.probes.bandwidth.collectives import bus_factor
from tests.unit.probes.bandwidth.rank_jobs import LATE_S
from tests.unit.probes.bandwidth.ranks import run_ranks

RANKS = 3
CALLS = 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks("measure", RANKS, tmp_path_factory.mktemp("measure"))


def test_every_collective_is_measured_in_both_modes_warm_and_cold(measured):
    rows = [one for one, _, _ in measured[0]["measured"]]

    seen = {(row["collective"], row["mode"], row["warm"]) for row in rows}
    assert seen == {
        (one.value, mode, warm) for one in Collective for mode in ("latency", "throughput") for warm in (True, False)
    }
    assert all(row["iterations"] == CALLS and row["wrong"] is None for row in rows)


def test_all_ranks_come_to_the_same_figures(measured):
    assert measured[0]["measured"] == measured[1]["measured"] == measured[2]["measured"]


def test_times_and_bandwidths_fit_together(measured):
    for row, _, note in measured[0]["measured"]:
        assert 0 < row["min_us"] <= row["p50_low_us"] <= row["p50_us"] <= row["p50_high_us"]
        assert row["p50_us"] <= row["p95_us"]
        assert row["first_us"] > 0
        assert row["algbw_gb_s"] == pytest.approx(row["size_bytes"] / row["p50_us"] / 1e3)
        factor = bus_factor(Collective(row["collective"]), RANKS)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)
        assert not note


def test_the_waits_before_each_call_are_kept_by_rank(measured):
    for row, waits, _ in measured[0]["measured"]:
        assert waits == ([CALLS] * RANKS if row["mode"] == "latency" else [])


def test_the_first_rank_decides_how_many_calls_are_made(measured):
    # Ranks that decided by themselves would wait for each other for ever.
    assert measured[0]["agreed"] == measured[1]["agreed"] == measured[2]["agreed"]


@pytest.mark.parametrize("where", ["barrier", "all_reduce"])
def test_a_rank_that_comes_late_is_reported_before_the_barrier_and_after_it(measured, where):
    late = measured[0]["late"][where]

    assert late[1]["late_us"] > 0.8 * LATE_S * 1e6
    assert late[1]["share"] > 0.8
    assert all(one["late_us"] < 0.5 * LATE_S * 1e6 for one in (late[0], late[2]))


def test_where_nobody_is_held_up_nobody_is_late_by_as_much(measured):
    assert all(one["late_us"] < 0.5 * LATE_S * 1e6 for one in measured[0]["late"]["nobody"])


@pytest.mark.parametrize(
    ("collective", "offset"),
    [("all_reduce", 0), ("broadcast", 0), ("reduce", 0), ("all_gather", 1360), ("reduce_scatter", 1360)],
)
def test_in_place_the_output_is_the_input_or_the_own_part_of_it(measured, collective, offset):
    # 4080 bytes are shared out over three ranks.
    by_rank = [one["memory"][f"{collective} True"] for one in measured]
    sign = -1 if collective == "reduce_scatter" else 1

    assert by_rank == [[True, True, sign * offset * rank] for rank in range(RANKS)]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all", "send_recv"])
def test_out_of_place_input_and_output_share_nothing(measured, collective):
    assert all(one["memory"][f"{collective} False"] == [False, False, None] for one in measured)


def test_one_rank_alone_is_measured_and_has_no_bus_bandwidth(tmp_path):
    (alone,) = run_ranks("measure", 1, tmp_path)

    rows = [row for row, _, _ in alone["measured"]]
    assert {row["collective"] for row in rows} == {one.value for one in Collective} - {"send_recv"}
    assert all(row["busbw_gb_s"] is None and row["algbw_gb_s"] > 0 for row in rows)
