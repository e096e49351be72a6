"""What a document draws of times and bandwidths: of the bench, of a step by phase and rank, and of tune."""

from dataclasses import replace

import pytest

from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import (
    Severity,
)
from ddpdoctor.model.scaling import LaunchKind, ScalingKind, ScalingLaunch, ScalingResult, ScalingRow
from ddpdoctor.model.speed import Budget, PhaseRow
from ddpdoctor.model.tuning import RatioRange, TriedSetting, TuneOutcome, TuneResult, TuneVerdict
from ddpdoctor.report.blocks import ChartLine, GridCell, Series, Tone
from ddpdoctor.report.grids.build import MAX_COLUMNS
from tests import benches
from tests.pictures import FINISHED, finding, only, pictures, report, texts


def test_the_bench_shows_curves_with_the_reference_and_matrices_with_figures():
    busbw, time, pairs, nodes = pictures(benches.everything())
    assert isinstance(busbw, Series)
    assert busbw.title == "busbw in GB/s over size"
    assert [line.name for line in busbw.lines] == ["throughput", "throughput, baseline", "latency"]
    assert busbw.reference == ChartLine(
        name="8 H100 over NVLink4, NVLS", points=((256 * benches.MIB, 460.0), (benches.GIB, 460.0))
    )
    assert (time.title, time.reference) == ("time of a call in us over size (median)", None)
    assert time.lines[0].points[0] == (1024, pytest.approx(20.0, abs=0.01))

    assert pairs.title == "pairs of ranks: busbw in GB/s, several at once"
    assert pairs.rows == ("0 node0", "1 node1", "> 2 node2", "> 3 node3")
    assert [cell.text for cell in pairs.cells[2]] == ["12.00", "11.80", "", "1.25"]
    assert pairs.cells[2][3] == GridCell(
        text="1.25", tone=Tone.WARNING, level=pytest.approx(0.02, abs=0.02),
        about="rank 2 node2 - 3 node3: busbw 1.25 GB/s, latency 31.0 us, variation 2%",
    )  # fmt: skip
    assert pairs.cells[0][2].level == 1.0
    assert pairs.legend == ("The paler, the slower.", "> a rank that a finding names")
    assert nodes.cells[0][0] == GridCell(
        text="38.00", about="host node0: busbw 38.0 GB/s, latency 9.00 us, variation 2%"
    )


def test_each_reference_has_a_chart_and_one_rank_has_none():
    other = replace(benches.H100, gb_s=100.0, text="--expect")
    two = benches.report(curves=(benches.curve(), benches.curve(dtype="bfloat16", reference=other)))
    assert [one.reference and one.reference.name for one in pictures(two)] == [benches.H100.text, "--expect", None]
    assert [one.title for one in pictures(benches.one_rank())] == ["time of a call in us over size (median)"]


def test_of_a_wide_matrix_the_ends_of_the_slowest_pairs_are_shown():
    wide = benches.report(ranks=70, pairs=benches.pair_matrix(70, slow=(66, 68)))
    grid = pictures(wide)[-1]
    assert len(grid.rows) == MAX_COLUMNS
    assert {"66 node66", "68 node68"} <= set(grid.rows)
    assert grid.legend[-1] == "Not shown: 6 more ranks."


def budget():
    return Budget(
        wall_ms=100.0, steps=90, count=100, communication_share=0.1, waiting_share=0.1,
        phases=(PhaseRow(phase="forward", critical_ms=50.0, median_ms=25.0, worst_ms=50.0, worst_rank=3),
                PhaseRow(phase="loss", critical_ms=0.01, median_ms=0.0, worst_ms=0.0, worst_rank=0)),
    )  # fmt: skip


def pace(rank, step_ms=100.0, waited_ms=10.0, **more):
    busy = dict.fromkeys(("before_forward_ms", "forward_ms", "between_ms", "backward_ms"), (step_ms - waited_ms) / 4)
    return (
        {"rank": rank, "steps": 90, "end_with": "optimizer", "step_ms": step_ms, "waited_ms": waited_ms} | busy | more
    )


def test_speed_shows_phases_on_the_critical_median_and_worst_rank_and_on_each_rank():
    slow = finding("DD610", "straggler", Severity.WARNING, ranks=(1,))
    speed = {"asked": True, "budget": encode(budget())}
    steps = [pace(1, waited_ms=0.0), pace(0, waited_ms=20.0), pace(2) | {"step_ms": "x"}, pace("0"), 5]
    phases, ranks = pictures(report(slow, job=FINISHED, speed=speed, steps=steps))
    assert texts(phases) == [("critical rank", "median rank", "worst rank"), ("forward", "50.0", "25.0", "50.0")]
    assert phases.cells[0][2] == GridCell(text="50.0", about="50.0 ms, 50.0% of the step on rank 3", level=0.5)
    assert texts(ranks) == [
        ("0", "> 1"), ("before forward", "20.0", "25.0"), ("forward", "20.0", "25.0"),
        ("between forward and backward", "20.0", "25.0"), ("backward", "20.0", "25.0"),
        ("waits for other ranks", "20.0", "0.00"), ("the whole step", "100", "100"),
    ]  # fmt: skip
    assert ranks.cells[0][1] == GridCell(text="25.0", about="25.0 ms", level=0.25)
    assert ranks.legend == ("> a rank that a finding about speed names",)
    # Without --speed, only a straggler makes the ranks worth a picture.
    quiet = {"asked": False, "budget": encode(budget())}
    assert [one.title for one in pictures(report(slow, job=FINISHED, speed=quiet, steps=steps))] == [ranks.title]
    assert pictures(report(job=FINISHED, speed=quiet, steps=steps)) == []


def test_of_many_ranks_those_are_shown_that_compute_for_longest():
    steps = [pace(rank, waited_ms=0.0 if rank == 69 else 10.0) for rank in range(70)]
    slow = finding("DD610", "straggler", Severity.WARNING, ranks=(69,))
    grid = only(report(slow, job=FINISHED, speed={}, steps=steps))
    assert grid.columns[-1] == "> 69"
    assert len(grid.columns) == 2  # equal ranks share a column
    assert grid.legend[-1] == "Not shown: 6 more ranks."


def test_tune_shows_the_change_by_each_setting():
    def span(ratio, low, high):
        return RatioRange(ratio=ratio, low=low, high=high)

    rows = (
        TriedSetting(setting="a", title="cap=50", predicted=span(0.95, 0.9, 1.0), measured=span(0.8, 0.75, 0.85)),
        TriedSetting(setting="b", title="static_graph", measured=span(1.1, 1.05, 1.2)),
        TriedSetting(setting="c", title="workers", reason="there is no loader"),
    )  # fmt: skip
    result = TuneResult(
        step_ms=10.0,
        rounds=6,
        noise=span(1.0, 0.99, 1.01),
        rows=rows,
        verdict=TuneVerdict.NOTHING,
        conclusion="nothing",
    )
    grid = only(report(tune=encode(TuneOutcome(result=result))))
    assert texts(grid) == [
        ("predicted", "measured"), ("cap=50", "-5%", "-20%"), ("static_graph", "-", "+10%"), ("workers", "-", "-")
    ]  # fmt: skip
    assert grid.cells[0][1] == GridCell(text="-20%", tone=Tone.GOOD, about="-25.0% to -15.0%", level=1.0)
    assert grid.cells[1][1].tone is Tone.WARNING
    assert grid.cells[2][1] == GridCell(text="-", tone=Tone.SKIPPED, about="there is no loader")


def test_scaling_shows_the_factors_of_the_efficiency():
    row = ScalingRow(
        ranks=4, kind=ScalingKind.WEAK, step_ms=10.0, rows=8.0, efficiency=0.5, threads=1.0, contention=0.625,
        communication=0.8, noise=0.01,
    )  # fmt: skip
    alone = ScalingLaunch(kind=LaunchKind.ALONE, ranks=1, step_ms=5.0, unreduced_ms=5.0)
    grid = only(report(scaling=encode(ScalingResult(launches=(alone,), rows=(row,)))))
    assert texts(grid) == [
        ("efficiency", "threads", "contention", "communication"),
        ("4", "0.50", "1.00", "0.62", "0.80"),
    ]
    assert grid.cells[0][0] == GridCell(text="0.50", about="50.0%", level=0.5)
