"""The pictures of each verb that are not about a hang: exact grids from small facts, and none from damaged reports."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.checkpoints import checkpoint_report
from ddpdoctor.diagnose.rendezvous.judging import rendezvous_data
from ddpdoctor.model.checkpoint import Checkpoints, Checksums, Contents, FileSeen, Form, OddValues, ReadState, StatePart
from ddpdoctor.model.codec import encode
from ddpdoctor.model.consistency import Consistency, StreamClock, What
from ddpdoctor.model.data import Drawn, LoaderTaken, Pass, PassTaken, RankPass, RankTaken
from ddpdoctor.model.diff import Kind
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    Finding,
    JobStatus,
    JobSummary,
    Outcome,
    Place,
    Report,
    Severity,
)
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.scaling import LaunchKind, ScalingKind, ScalingLaunch, ScalingResult, ScalingRow
from ddpdoctor.model.sharing import SamplingPlan, Sharing, share_out
from ddpdoctor.model.speed import Budget, PhaseRow
from ddpdoctor.model.trial import GradientErrors, OneProcess, Participant, ReferenceStep, Trial, TrialSettings
from ddpdoctor.model.tuning import RatioRange, TriedSetting, TuneOutcome, TuneResult, TuneVerdict
from ddpdoctor.report.blocks import ChartLine, Grid, GridCell, Series, Tone
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.grids import MAX_COLUMNS, MAX_ROWS, grid_by_member, linear_level, log_level
from tests import benches
from tests.rules.consistency import test_files as files
from tests.rules.consistency.build import difference, stream
from tests.rules.rendezvous.build import healthy, pair, with_pairs

FINISHED = JobSummary(world_size=4, nnodes=1, status=JobStatus.FINISHED, exit_status=0)


def report(*findings, job=None, checks=(), **data):
    return Report(
        command=("ddpdoctor",), started_at="2026-01-02T03:04:05.000+00:00", ended_at="2026-01-02T03:04:07.500+00:00",
        job=job, verdict=findings[0] if findings else None, findings=findings, checks=tuple(checks), ranks=(),
        data=data, tool_version="1.2.3",
    )  # fmt: skip


def finding(code, kind="", severity=Severity.ERROR, **more):
    return Finding(code=code, kind=kind, severity=severity, confidence=Confidence.HIGH, summary=f"{code} it is", **more)


def pictures(one):
    return [block for section in read_content(one).pictures for block in section]


def texts(grid):
    """The names of the columns, then each row with its name."""
    return [
        grid.columns,
        *((name, *(cell.text for cell in row)) for name, row in zip(grid.rows, grid.cells, strict=True)),
    ]


def only(one):
    (grid,) = pictures(one)
    assert isinstance(grid, Grid)
    assert all(len(row) == len(grid.columns) for row in grid.cells)
    return grid


def test_members_with_equal_cells_share_a_column_and_what_is_left_out_is_counted():
    rows = [
        ("one", {rank: GridCell(text=str(min(rank, 70))) for rank in range(80)}),
        ("other", {0: GridCell(text="x")}),
    ]
    grid = grid_by_member("a title", rows, range(80), lambda those: f"{those[0]}-{those[-1]}", axes=("thing", "rank"))
    assert len(grid.columns) == MAX_COLUMNS
    assert grid.legend == ("Not shown: 16 more ranks.",)
    assert [row[1].text for row in grid.cells] == ["1", ""]

    few = grid_by_member("a title", rows, range(69, 80), lambda those: str(list(those)), axes=("thing", "rank"))
    assert texts(few) == [("[69]", "[70, 71, 72, 73, 74, 75, 76, 77, 78, 79]"), ("one", "69", "70"), ("other", "", "")]


def test_levels_are_between_0_and_1_and_there_is_none_for_what_is_no_number():
    assert [linear_level(value, 4.0) for value in (-1.0, 1.0, 9.0)] == [0.0, 0.25, 1.0]
    assert [linear_level(1.0, high) for high in (0.0, float("nan"), float("inf"))] == [None] * 3
    assert [log_level(value, 1.0, 100.0) for value in (0.5, 10.0, 1e9)] == [0.0, 0.5, 1.0]
    assert [log_level(value, 1.0, 100.0) for value in (0.0, float("nan"))] == [None] * 2
    assert log_level(1.0, 1.0, 1.0) is None


def test_replicas_show_which_tensor_differs_where_and_how_many_are_equal():
    parameters = difference(What.PARAMETER, number=5, names=("0.weight", "1.bias"), sides=((0, 2, 3), (1,)))
    state = difference(What.STATE, number=6, part="exp_avg", sides=((0, 2), (1,), (3,)), absent_on=(3,))
    found = encode(Consistency(check_every=1, streams=(stream(parameters, state, ranks=4),)))
    grid = only(report(finding("DD501", ranks=(1,)), job=FINISHED, consistency=found))
    assert grid.title == "replicas that differ, compared at each optimizer step"
    assert (grid.row_name, grid.column_name) == ("tensor", "rank")
    assert texts(grid) == [
        ("ranks 0, 2", "rank 1", "rank 3"),
        ("0.weight (parameter), from step 5 on", "A", "B", "A"),
        ("1.bias (parameter), from step 5 on", "A", "B", "A"),
        ("0.weight exp_avg (optimizer state), from step 6 on", "A", "B", "none"),
        ("4 others (parameters)", "equal", "equal", "equal"),
        ("all gradients", "equal", "equal", "equal"),
        ("5 others (optimizer state)", "equal", "equal", "equal"),
    ]
    assert grid.cells[0][:2] == (
        GridCell(text="A", about="equal on ranks 0, 2, 3"), GridCell(text="B", tone=Tone.ERROR, about="equal on rank 1")
    )  # fmt: skip
    # No side has more than half, so that nobody is right.
    assert [cell.tone for cell in grid.cells[2]] == [Tone.ERROR] * 3
    assert grid.legend == ("Equal letters: equal contents. Most have A.",)


def test_of_many_differing_tensors_the_first_are_shown_and_all_are_counted():
    one = difference(What.PARAMETER, names=tuple(f"{number}.weight" for number in range(MAX_ROWS + 5)))
    one = replace(one, differing=100, of=100)
    grid = only(report(job=FINISHED, consistency=encode(Consistency(check_every=1, streams=(stream(one),)))))
    assert len(grid.rows) == MAX_ROWS + 2  # and the gradients and states, which are all equal
    assert grid.legend[-1] == "Not shown: 40 more differing tensors."
    assert grid.cells[0][1].tone is Tone.NOTE  # no rule calls it wrong


def test_of_several_models_the_title_says_which_and_by_what_clock():
    drifts = difference(What.PARAMETER, number=0, last_equal=None)
    synced = difference(What.BUFFER, number=3, last_equal=None, names=("1.running_mean",))
    streams = (
        stream(drifts, model=2, clock=StreamClock.END), stream(synced, clock=StreamClock.SYNC), stream(),
        stream(drifts, model=-1),
    )  # fmt: skip
    found = pictures(report(job=FINISHED, consistency=encode(Consistency(check_every=1, streams=streams))))
    assert [(one.title.partition(", compared at ")[2], one.rows[0]) for one in found] == [
        ("the end, model 2", "0.weight (parameter), at the end"),
        ("each sync of buffers, model 1", "1.running_mean (buffer), from backward 3 on"),
        ("each optimizer step, parameters outside DDP", "0.weight (parameter), from step 0 on"),
    ]


def test_a_report_of_a_job_without_a_comparison_or_with_a_damaged_one_has_no_picture():
    hung = replace(FINISHED, status=JobStatus.HUNG)
    for data in ({}, {"consistency": None}, {"consistency": encode(Consistency(check_every=1, streams=(stream(),)))},
                 {"steps": 3}, {"consistency": {"streams": 3}}, {"consistency": [1]}):  # fmt: skip
        assert pictures(report(job=hung, **data)) == []


def test_a_trial_shows_replicas_and_errors_beside_one_process():
    drift = difference(What.GRADIENT, number=2, sides=((0,), (1,)))
    steps = tuple(reference_step(number, ratios) for number, ratios in ((1, {"a": 2.0, "b": 1.0}), (3, {"b": 1000.0})))
    ranks = tuple(Participant(rank=n, local_rank=n, host="h", pid=n, device="cpu", torch="2") for n in range(2))
    trial = Trial(
        settings=TrialSettings(model="m:f"), models=(), participants=ranks,
        consistency=Consistency(check_every=1, streams=(stream(drift),)), reference=OneProcess(steps=steps),
    )  # fmt: skip
    from ddpdoctor.report.reference_grid import reference_pictures
    from ddpdoctor.report.replica_grid import consistency_pictures

    ((replicas,),) = consistency_pictures(trial.consistency, ())
    assert texts(replicas)[:2] == [("rank 0", "rank 1"), ("0.weight (gradient), from step 2 on", "A", "B")]
    ((errors,),) = reference_pictures(trial)
    assert texts(errors) == [("step 1", "step 3"), ("b", "1", "1e+03"), ("a", "2", "")]
    assert [cell.level for cell in errors.cells[0]] == [0.0, 1.0]
    assert errors.cells[0][1].about == "relative error 5.0e+02, rounding 5.0e-01"


def reference_step(number, ratios):
    tensors = tuple(
        GradientErrors(
            name=name, elements=4, norm=2.0, ddp_norm=2.0, rounding=1.0, exact=0.0, whole=ratio, parts=0.0, local=0.0,
            scaled=0.0, maths=0.0, weighted=0.0, without_batchnorm=None,
        )
        for name, ratio in ratios.items()
    )  # fmt: skip
    return ReferenceStep(
        step=number, scale=1.0, weights=(), samples=(), losses=(), part_losses=(), random_error=0.0, tensors=tensors
    )


def test_compared_files_show_by_how_much_their_contents_differ():
    weight = files.unequal(sides=((0, 2), (1,)), apart=(files.apart(file=1, largest=0.25, not_finite=1),))
    bias = files.unequal(name="model.fc.bias", sides=((0,),), seen=("float32[4]",), apart=(), absent_in=(1, 2))
    random = files.unequal(kind=Kind.RANDOM, name="rng")
    facts = files.facts(weight, bias, files.setting(sides=((0, 1), (2,))), random, files=3, tensors=9)
    grid = only(report(finding("DD507", severity=Severity.WARNING), diff=encode(facts)))
    assert texts(grid) == [
        ("file 1 (rank 0)", "file 2 (rank 1)", "file 3 (rank 2)"),
        ("model.fc.weight (parameter)", "A", "B, off by 0.25", "A"),
        ("model.fc.bias (parameter)", "A", "none", "none"),
        ("optimizer.param_groups.0.lr (optimizer setting)", "A", "A", "B"),
        ("7 others", "equal", "equal", "equal"),
    ]
    assert grid.cells[0][1] == GridCell(
        text="B, off by 0.25", tone=Tone.WARNING,
        about="float32[3, 4]; 2 of 12 elements differ from file 1, by 0.25 at most, relative 0.25, 1 not finite",
    )  # fmt: skip
    assert grid.cells[2][2].about == "0.2"
    assert pictures(report(diff=encode(files.facts()))) == []


def test_shares_of_an_epoch_show_what_two_ranks_both_get():
    grid = only(report(shares=encode(share_out(SamplingPlan(samples=10, world_size=3, batch_size=2)))))
    assert grid.title == "samples that two ranks both get in an epoch"
    # The sampler repeats samples 0 and 1, which ranks 0 and 1 have, on ranks 1 and 2.
    assert texts(grid) == [("0", "1", "2"), ("0", "4", "1", "0"), ("1", "1", "4", "1"), ("2", "0", "1", "4")]
    assert grid.cells[0] == (
        GridCell(text="4", tone=Tone.STRONG, about="rank 0: 4 samples"),
        GridCell(text="1", about="ranks 0 and 1: 1 of 4 samples", level=0.25),
        GridCell(text="0", about="ranks 0 and 2: 0 of 4 samples", level=0.0),
    )
    unknown = SamplingPlan(samples=10, world_size=2, batch_size=4, drop_last=True, sharing=Sharing.NONE)
    assert pictures(report(shares=encode(share_out(unknown)))) == []
    many = only(report(shares=encode(share_out(SamplingPlan(samples=1000, world_size=100, batch_size=2)))))
    assert (len(many.rows), many.legend[-1]) == (MAX_COLUMNS, "Not shown: 36 more ranks.")


def test_drawn_samples_show_what_two_ranks_both_drew_and_old_reports_nothing():
    rows = tuple(RankPass(rank=rank, drawn=8, repeated=0, batches=2, last_batch=4, complete=True) for rank in range(3))
    one = Pass(number=1, ranks=rows, unique=8, shared=8, missed=0, overlaps=((8, 8, 2), (8, 8, 2), (2, 2, 4)))
    old, damaged = replace(one, number=2, overlaps=()), replace(one, number=3, overlaps=((1,), (2, 3)))
    drawn = Drawn(
        world_size=3, function="m:f", samples=8, kind="DataLoader", dataset="D", sampler="", batch_size=4,
        passes=(one, old, damaged), set_epoch=True,
    )  # fmt: skip
    grid = only(report(drawn=encode(drawn)))
    assert grid.title == "samples that two ranks both drew in pass 1"
    assert texts(grid) == [("0", "1", "2"), ("0", "8", "8", "2"), ("1", "8", "8", "2"), ("2", "2", "2", "4")]
    assert [cell.level for cell in grid.cells[0]] == [None, 1.0, 0.5]


CHECKS = (
    Check(id="shm", code="DD121", group="limits", outcome=Outcome.FAILED, seen="64 MiB", hosts=("node2",)),
    Check(id="nofile", code="DD122", group="limits", outcome=Outcome.PASSED, seen="1048576"),
    Check(id="memlock", code="DD123", group="limits", outcome=Outcome.PASSED, seen="unlimited"),
    Check(id="xid", code="DD311", group="GPUs", outcome=Outcome.SKIPPED, reason="there is no GPU"),
    Check(id="ecc", code="DD312", group="GPUs", outcome=Outcome.PASSED, seen="none", hosts=("node0",)),
    Check(id="clocks", code="DD131", group="", outcome=Outcome.FAILED, seen="2 s apart"),
    Check(id="oom", code="DD132", group="", outcome=Outcome.INCONCLUSIVE, reason="no access"),
)


def test_machines_show_checks_by_host_and_mark_the_host_that_differs():
    shm = finding("DD121", "shm", hosts=("node2",))
    clocks = finding("DD131", "clocks", Severity.WARNING, hosts=("node2",))
    hosts = [f"node{number}" for number in range(5)]
    grid = only(report(shm, clocks, checks=CHECKS, nodes=[], hosts=[*hosts, "node1", 7]))
    assert grid.title == "checks by host"
    assert texts(grid) == [
        ("> node0", "node[1, 3, 4]", "> node2"),
        ("limits: DD121 shm", "-", "-", "error"),
        ("limits: 2 passed", "passed", "passed", "passed"),
        ("GPUs: DD312 ecc", "passed", "skipped", "skipped"),
        ("GPUs: 1 skipped", "skipped", "skipped", "skipped"),
        ("DD131 clocks", "-", "-", "warning"),
        ("DD132 oom", "could not tell", "could not tell", "could not tell"),
    ]
    assert grid.legend == ("> hosts with other results than most",)
    assert grid.cells[0][2] == GridCell(text="error", tone=Tone.ERROR, about="DD121 it is")
    assert grid.cells[1][0] == GridCell(text="passed", tone=Tone.GOOD, about="DD122 nofile, DD123 memlock")
    assert grid.cells[5][0] == GridCell(text="could not tell", tone=Tone.WARNING, about="no access")


def test_two_hosts_that_differ_are_not_marked_and_a_report_without_hosts_has_no_picture():
    two = only(report(checks=CHECKS[4:5], nodes=[], hosts=["node0", "node1"]))
    assert texts(two) == [("node0", "node1"), ("GPUs: DD312 ecc", "passed", "skipped")]
    for hosts in ([], "node0", None, [1]):
        assert pictures(report(checks=CHECKS, nodes=[], hosts=hosts)) == []


def test_a_finding_that_is_a_note_leaves_the_check_passed_on_other_hosts():
    check = Check(id="omp", code="DD126", group="limits", outcome=Outcome.PASSED, seen="1")
    note = finding("DD126", "omp", Severity.INFO, hosts=("node1",))
    grid = only(report(note, checks=(check,), nodes=[], hosts=["node0", "node1"]))
    assert [(cell.text, cell.tone) for cell in grid.cells[0]] == [("passed", Tone.GOOD), ("note", Tone.NOTE)]


def test_rendezvous_shows_each_pair_of_nodes_with_figures():
    facts = with_pairs(healthy(2), {(0, 1)}, lambda s, t: pair(s, t, Contact.REFUSED))
    (grid,) = pictures(report(checks=(), **rendezvous_data(facts)))
    assert texts(grid) == [("0", "1"), ("0 node0", "", "refuse"), ("1 node1", "ok", "")]
    assert grid.cells[0][1] == GridCell(text="refuse", tone=Tone.ERROR, about="refused Connection refused")
    assert grid.cells[1][0] == GridCell(
        text="ok", tone=Tone.GOOD,
        about="connected in 0.3 ms; 4 KiB arrived at 1 MB/s; 4 MiB arrived at 1049 MB/s",
    )  # fmt: skip
    assert grid.legend == ("refuse: refused",)


def test_of_many_nodes_those_come_first_whose_connections_fail():
    facts = with_pairs(healthy(70), {(69, 3)}, lambda s, t: pair(s, t, Contact.NO_ANSWER))
    (grid,) = pictures(report(checks=(), **rendezvous_data(facts)))
    assert len(grid.rows) == MAX_COLUMNS
    assert grid.rows[-1] == "69 node69"
    assert grid.cells[-1][3].text == "drop"
    assert grid.legend[-1] == "Not shown: 6 more nodes."


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


def test_checkpoints_show_what_could_be_read_and_which_parts_each_file_holds():
    def file(number, **more):
        fields = {"form": Form.ZIP, "state": ReadState.WHOLE, "checksums": Checksums.CHECKED, "values": (),
                  "contents": Contents(parts=(StatePart.MODEL, StatePart.OPTIMIZER))}  # fmt: skip
        return FileSeen(path=f"/runs/{number}.pt", size_bytes=9, **(fields | more))

    odd = OddValues(name="w", of=4, nan=1, above=0, below=0, plain=3)
    seen = Checkpoints(
        files=(file(0), file(1), file(2, contents=Contents(parts=(StatePart.MODEL,)), values=(odd,)),
               file(3, state=ReadState.CUT, contents=None, checksums=Checksums.NOT_READ, values=None)),
    )  # fmt: skip
    saved = checkpoint_report(seen, ("ddpdoctor",), "2026-01-01T00:00:00Z")
    grid = only(saved)
    assert texts(grid) == [
        ("0.pt, 1.pt", "2.pt", "3.pt"),
        ("read", "whole", "whole", "cut off"),
        ("checksums", "checked", "checked", "not read"),
        ("NaN and infinity", "none", "in 1 tensor", "not looked for"),
        ("tensors", "0", "0", "?"),
        ("model", "yes", "yes", "no"),
        ("optimizer state", "yes", "no", "no"),
    ]
    assert [cell.tone for cell in grid.cells[0]] == [Tone.GOOD, Tone.GOOD, Tone.ERROR]
    old = report(files=[{"path": "a/x.pt", "state": "whole", "parts": 3}, {"path": "b/x.pt", "state": "whole"}, 5])
    assert only(old).columns == ("a/x.pt, b/x.pt",)
    assert pictures(report(files=[])) == pictures(report(files="x")) == []


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


def test_a_loader_that_a_finding_names_shows_which_ranks_took_the_same():
    def taken(rank, order="x", batches=6, drawn=45, *, complete=True):
        return RankTaken(rank=rank, batches=batches, drawn=drawn, order=order, complete=complete)

    same = PassTaken(number=1, ranks=(taken(0), taken(1), taken(2, "y")))
    again = PassTaken(number=3, ranks=(taken(0), taken(1, "z", complete=False), taken(2, "", drawn=None)))
    loaders = [encode(LoaderTaken(file="/job/train.py", line=line, passes=(same, again))) for line in (12, 40)]
    place = Place(rank=0, file="/job/train.py", line=12, function="main")
    found = finding("DD701", ranks=(0, 1), where=(place,))
    grid = only(report(found, job=FINISHED, loaders=loaders))
    assert texts(grid) == [
        ("> rank 0", "> rank 1", "rank 2"),
        ("train.py:12, pass 1", "A 6", "A 6", "B 6"),
        ("train.py:12, pass 3", "A 6", "C 6", "6"),
    ]
    assert [[cell.tone for cell in row] for row in grid.cells] == [
        [Tone.ERROR, Tone.ERROR, Tone.PLAIN], [Tone.ERROR, Tone.PLAIN, Tone.PLAIN]
    ]  # fmt: skip
    assert [cell.about for cell in grid.cells[1]] == [
        "6 batches, 45 indices", "6 batches, 45 indices, not to the end", "6 batches"
    ]  # fmt: skip
    assert grid.legend[1] == "> a rank that a finding about data names"
    assert pictures(report(job=FINISHED, loaders=loaders)) == []
    assert pictures(report(found, job=FINISHED, loaders=[{"file": 3}])) == []
