"""Grids of ranks, of speed, of nodes that meet, and the history of a job."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ddpdoctor.diagnose.files import checkpoint_report
from ddpdoctor.diagnose.history import sum_up
from ddpdoctor.diagnose.rendezvous import rendezvous_data
from ddpdoctor.model.codec import encode
from ddpdoctor.model.consistency import Consistency, StreamClock, What
from ddpdoctor.model.data import (
    Drawn,
    LoaderTaken,
    Pass,
    PassTaken,
    RankPass,
    RankTaken,
    SamplingPlan,
    Sharing,
    share_out,
)
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import NodeSeen, Presence
from ddpdoctor.model.findings import Check, JobStatus, Outcome, Place, Report, Severity
from ddpdoctor.model.live import Blamed, JobNow, Liveness, PassSeen, RankNow, ReplicasNow, Start, WaitNow
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.saved import (
    Checkpoints,
    Checksums,
    Contents,
    FileSeen,
    Form,
    Kind,
    OddValues,
    ReadState,
    StatePart,
)
from ddpdoctor.model.steps import Budget, PhaseRow
from ddpdoctor.model.trial import GradientErrors, OneProcess, Participant, ReferenceStep, Trial, TrialSettings
from ddpdoctor.model.tuning import (
    LaunchKind,
    RatioRange,
    ScalingKind,
    ScalingLaunch,
    ScalingResult,
    ScalingRow,
    TriedSetting,
    TuneOutcome,
    TuneResult,
    TuneVerdict,
)
from ddpdoctor.report.blocks import (
    MAX_COLUMNS,
    MAX_ROWS,
    ChartLine,
    GridCell,
    Series,
    Tone,
    grid_by_member,
    linear_level,
    log_level,
)
from ddpdoctor.report.lines import clean, format_ranks, wrap
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.text.report import render_text
from ddpdoctor.report.verbs.live import fold, plain_histories, render_history, render_status
from tests import benches
from tests.doc_pages import DOCS
from tests.pictures import FINISHED, finding, only, pictures, report, texts
from tests.rules.consistency import test_files as files
from tests.rules.consistency.build import difference, stream
from tests.rules.rendezvous.build import LARGE, absent, column, healthy, pair, transfer, view, with_pairs, with_visits

# The pictures of each verb that are not about a hang: exact grids from small facts, and none from damaged reports.


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


def test_of_many_sets_of_ranks_the_first_have_letters():
    one = difference(What.GRADIENT, sides=tuple((rank,) for rank in range(100)))
    found = encode(Consistency(check_every=1, streams=(stream(one, ranks=100),)))
    grid = only(report(job=FINISHED, consistency=found))
    assert grid.columns[-2:] == ("rank 25", "ranks 26-99")
    assert [cell.text for cell in grid.cells[0][-2:]] == ["Z", "other"]


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
    from ddpdoctor.report.verbs.job import consistency_pictures
    from ddpdoctor.report.verbs.trial import reference_pictures

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


def span(ratio):
    return RatioRange(ratio=ratio, low=ratio, high=ratio)


def damaged_reports():
    """Reports whose data has the right form, and does not fit together."""
    shares = share_out(SamplingPlan(samples=10, world_size=3, batch_size=2))
    renamed = replace(shares, ranks=tuple(replace(one, rank=one.rank + 7) for one in shares.ranks))
    row = TriedSetting(setting="a", title="a", measured=span(float("inf")), predicted=span(1e308))
    tuned = TuneResult(
        step_ms=1.0, rounds=1, noise=span(1.0), rows=(row,), verdict=TuneVerdict.NOTHING, conclusion="nothing"
    )
    scaled = ScalingRow(
        ranks=4, kind=ScalingKind.WEAK, step_ms=10.0, rows=8.0, efficiency=0.5, threads=1.0, contention=0.6,
        communication=0.8, noise=0.01,
    )  # fmt: skip
    return {
        "ranks that are none": {"shares": encode(renamed)},
        "changes without a number": {"tune": encode(TuneOutcome(result=tuned))},
        "no launch alone": {"scaling": encode(ScalingResult(launches=(), rows=(scaled,)))},
        "contents of no side": {"diff": encode(files.facts(files.unequal(seen=())))},
        "a speed that is a text": {"speed": "fast"},
    }


@pytest.mark.parametrize("name", damaged_reports())
def test_a_damaged_report_is_drawn_nevertheless(name):
    assert render_text(report(job=FINISHED, **damaged_reports()[name]), width=None, color=False, run_dir=None)


# What a document draws of times and bandwidths: of the bench, of a step by phase and rank, and of tune.


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


# The report of check-rendezvous as text: who came, the store, and the matrix.


def report_rendezvous(seen, **more):
    return Report(
        command=("ddpdoctor", "check-rendezvous"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:07.500+00:00", job=None, verdict=None, findings=(), checks=(), ranks=(),
        data={**rendezvous_data(seen), **more}, tool_version="1.2.3",
    )  # fmt: skip


def lines(one):
    """What stands below the status."""
    text = render_text(one, width=None, color=False, run_dir=None)
    return text.splitlines()[3:]


def test_nodes_that_are_well_take_a_line_each_and_one_for_all_pairs():
    assert lines(report_rendezvous(healthy(2))) == [
        "  node  host   publishes         store at node0:29500",
        "  0     node0  10.0.0.10 (eth0)  serves it",
        "  1     node1  10.0.0.11 (eth0)  reached in 0.3 ms",
        "",
        "all 2 ordered pairs of nodes connect, and large payloads arrive at 1049 to 1049 MB/s",
    ]


def test_an_address_of_ipv6_stands_in_brackets_before_its_port():
    one = healthy(1)
    visits = (replace(one.visits[0], store_view=replace(one.visits[0].store_view, host="fd00:77::a")),)
    assert lines(report_rendezvous(replace(one, visits=visits)))[0].endswith("store at [fd00:77::a]:29500")


def test_the_matrix_shows_which_pairs_fail_and_how():
    facts = with_pairs(healthy(3), column(1, 3), lambda s, t: pair(s, t, Contact.NO_ANSWER))
    facts = with_pairs(facts, {(2, 0)}, lambda s, t: pair(s, t, large=transfer(LARGE, contact=Contact.NO_ANSWER)))
    assert lines(report_rendezvous(facts))[-6:] == [
        "connections, from the node of the row to that of the column:",
        "         0     1   2",
        "  0      .  drop  ok",
        "  1     ok     .  ok",
        "  2  stall  drop   .",
        "drop: nothing came back; stall: it connects, but a payload does not arrive",
    ]


def test_nodes_that_did_not_come_and_stores_that_were_not_reached():
    facts = with_visits(healthy(3), n0=view(0, not_served="Address already in use"), n1=view(1, Contact.REFUSED))
    facts = replace(facts, visits=(*facts.visits[:2], absent(2)), pairs=(), trust="the token of DDPDOCTOR_TOKEN")
    assert lines(report_rendezvous(facts))[1:] == [
        "  0     node0  10.0.0.10 (eth0)  cannot serve it: Address already in use",
        "  1     node1  10.0.0.11 (eth0)  refused: Connection refused",
        "  2     ?      -                 did not come",
        "",
        "trusted: the token of DDPDOCTOR_TOKEN",
    ]


def test_of_many_nodes_one_line_stands_for_the_matrix():
    facts = with_pairs(healthy(9), column(1, 9), lambda s, t: pair(s, t, Contact.REFUSED))
    assert lines(report_rendezvous(facts))[-1] == "8 of 72 ordered pairs of nodes do not work"


def test_eight_nodes_fit_into_80_columns_and_into_markdown():
    facts = with_pairs(healthy(8), column(1, 8), lambda s, t: pair(s, t, Contact.UNREACHABLE))
    text = render_text(report_rendezvous(facts), width=80, color=False, verbose=False, run_dir=None, cwd=None)
    assert "  7  ok  unreach  ok" in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("ddpdoctor: no problem found\n  8 hosts; ")
    assert "connections, from the node of the row" in render_markdown(report_rendezvous(facts))


def test_a_node_that_did_not_judge_has_no_table():
    one = report_rendezvous(healthy(2), rendezvous=None)
    text = render_text(one, width=None, color=False, run_dir=None)
    assert text.startswith("ddpdoctor: no problem found\n  2 hosts; ")


def test_a_damaged_file_is_said_to_be_one():
    with pytest.raises(UserError, match="cannot be read"):
        lines(report_rendezvous(healthy(2), rendezvous={"nnodes": "two", "visits": []}))


# The history of a job, as text at 80 columns.


ZERO = datetime(2026, 3, 14, 10, tzinfo=timezone.utc)


def start(minutes, **changes):
    began = ZERO + timedelta(minutes=minutes)
    one = Start(
        run="run", attempt=0, status=JobStatus.FAILED, began_at=began, first_step_at=began + timedelta(minutes=1),
        last_progress_at=began + timedelta(minutes=40), ended_at=began + timedelta(minutes=41), steps=1200, hosts=2,
        passes=(PassSeen(epoch=0, steps=1000), PassSeen(epoch=1, steps=200)), first_epoch=0, code="DD605",
        kind="killed", summary="rank 3 was killed by SIGKILL", blamed=(Blamed(rank=3, host="node7"),),
    )  # fmt: skip
    return replace(one, **changes)


def history():
    stopped = start(180, status=JobStatus.INTERRUPTED, code="", summary="", blamed=(), first_epoch=1, steps=7)
    starts = [start(0), start(50), start(100, status=JobStatus.HUNG, code="DD601", kind="stuck"), stopped]
    return sum_up(("ddpdoctor", "wrap", "train.py"), starts, ZERO)


def test_one_sentence_a_table_and_the_reasons():
    shown = render_history([history()], [], width=80, color=False)
    assert shown == (
        "ddpdoctor: 4 starts in 3 h 41 min, 3 failures; rank 3 on node7 was to blame in 3\n"
        "of them; mean time between failures 55 min\n"
        "\n"
        "  #  started            ran  step  ended                           lost    lost\n"
        "     UTC                                                          steps    time\n"
        "  1  03-14 10:00:00  41 min  1200  DD605 killed, rank 3 on node7   1200  11 min\n"
        "  2  03-14 10:50:00  41 min  1200  DD605 killed, rank 3 on node7   1200  11 min\n"
        "  3  03-14 11:40:00  41 min  1200  DD601 stuck, rank 3 on node7     200  41 min\n"
        "  4  03-14 13:00:00  41 min     7  interrupted\n"
        "  lost: steps made again at most, and time from the last step to the next\n"
        "  start's first; ?: not known\n"
        "\n"
        "  1: DD605 killed, rank 3 on node7: rank 3 was killed by SIGKILL\n"
        "  2: DD605 killed, rank 3 on node7: rank 3 was killed by SIGKILL\n"
        "  3: DD601 stuck, rank 3 on node7: rank 3 was killed by SIGKILL\n"
    )
    assert f"```\n{shown.partition(chr(10) * 2 + '  1: ')[0]}\n```" in (DOCS / "history.md").read_text()


def test_as_an_object_it_has_what_each_start_cost():
    plain = plain_histories([history()], ["x: damaged"])
    assert (plain["format"], plain["version"], plain["unread"]) == ("ddpdoctor-history", 1, ["x: damaged"])
    (job,) = plain["jobs"]
    assert [one["lost_s"] for one in job["starts"]] == [660.0, 660.0, 41 * 60.0, None]
    assert [one["lost_steps"] for one in job["starts"]] == [1200, 1200, 200, None]
    assert job["starts"][0]["began_at"] == "2026-03-14T10:00:00+00:00"
    assert job["returning"] == [{"rank": 3, "host": "node7", "times": 3}]


def test_several_jobs_have_their_command_lines_and_what_was_not_read_is_said():
    shown = render_history([history(), history()], ["runs/x: it is \x1b damaged"], width=None, color=False)
    assert shown.count("ddpdoctor wrap train.py\n") == 2
    assert shown.endswith("not read: runs/x: it is \\x1b damaged\n")


# What was collected, made safe to print.


CWD = Path("/home/me/proj")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at /home/me/proj/train.py:3", "at train.py:3"),
        ("(/home/me/proj/a/b.py:3)", "(a/b.py:3)"),
        ("/home/me/project/train.py:3", "/home/me/project/train.py:3"),
        ("/mnt/home/me/proj/train.py:3", "/mnt/home/me/proj/train.py:3"),
        ("cd /home/me/proj/", "cd /home/me/proj/"),
    ],
)
def test_paths_below_the_working_directory_are_relative(text, shown):
    assert clean(text, CWD) == shown


def test_the_root_as_working_directory_shortens_nothing():
    assert clean("/a/train.py:3", Path("/")) == "/a/train.py:3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x07", "a\\rb\\x07"),
        ("a\udcffb", "a\\udcffb"),
        ("right\u202eleft", "right\\u202eleft"),
        ("größe\n[/dev/shm]", "größe\n[/dev/shm]"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "\\x1b]8;;http://x\\x07link\\x1b]8;;\\x07"),
        ("\x9b31m \u2066x\u2069 \u200b", "\\x9b31m \\u2066x\\u2069 \\u200b"),
        ("::error::x", "\\x3a:error::x"),
        ("seen\n  ::Warning file=a::b, ::group::c", "seen\n  \\x3a:Warning file=a::b, \\x3a:group::c"),
        ("::add-mask::e ::stop-commands::f", "\\x3a:add-mask::e \\x3a:stop-commands::f"),
        ("/home/me/proj/::error::x", "\\x3a:error::x"),
        ("a ##vso[task.setvariable]b ##[error]c", "a \\x23#vso[task.setvariable]b \\x23#[error]c"),
        ("c10::Error ::1 [::]:29500 ::testing::x std::debug, ## a title #[x]",) * 2,
    ],
)
def test_nothing_that_a_terminal_or_a_runner_would_act_on_is_left(text, shown):
    assert clean(text, CWD) == shown


def test_a_word_is_never_broken():
    place = "/" + "x" * 60 + "/train-loop.py:61"
    lines = wrap(f"rank 3 stands at {place} and waits", 40, first="  ")
    assert any(place in line for line in lines)


def test_line_breaks_stay_and_all_lines_hang_under_the_first():
    assert wrap("one\ntwo", None, first="- ") == ["- one", "  two"]
    assert wrap("", 80, first="  x ") == ["  x"]


# Lists of ranks in words.


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), ""),
        ((4,), "rank 4"),
        ((1, 0), "ranks 0, 1"),
        ((0, 1, 2), "ranks 0-2"),
        ((9, *range(7)), "ranks 0-6, 9"),
        ((0, 1, 2, 5), "ranks 0-2, 5"),
        ((3, 3), "rank 3"),
        ((0, 2, 4, 5), "ranks 0, 2, 4, 5"),
    ],
)
def test_ranks(ranks, words):
    assert format_ranks(ranks) == words


# What a job does, as text: ranks that do the same are one row, whatever is collected is escaped.


def rank(number, **changes):
    one = RankNow(
        rank=number, host="n0", pid=100 + number, lives=True, trains=True, state="trains", since_s=None, where=None,
        step=1040, step_ms=41.2, waits_share=0.03, epoch=2, batch=88, memory_bytes=2**30,
    )  # fmt: skip
    return replace(one, **changes)


def still(number, state, line, **changes):
    place = Place(rank=number, file="/w/train.py", line=line, function="main")
    return rank(number, trains=False, state=state, since_s=12.0, where=place, **changes)


def status(*ranks, **changes):
    one = JobNow(
        run="run", state=Liveness.RUNNING, host="n0", started_at=None, running_s=723.0, exit_status=None, attempt=0,
        world_size=len(ranks) or None, ranks=ranks, waits=(), waited_for=(), replicas=None, unseen=(), reported="",
    )  # fmt: skip
    return replace(one, **changes)


def draw(one, width=80):
    return render_status(one, width=width, color=False)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"step": 1042, "step_ms": 43.0, "waits_share": 0.1, "batch": 90, "memory_bytes": 2**31}, 1),
        ({"step": 1043}, 2),
        ({"step_ms": 60.0}, 2),
        ({"waits_share": 0.4}, 2),
        ({"lives": False, "trains": False, "state": "exit status 1"}, 2),
    ],
)
def test_ranks_that_train_alike_are_one_row(changes, rows):
    assert len(fold([rank(0), rank(1, **changes)])) == rows


def test_ranks_that_stand_still_are_one_row_at_the_same_line_and_step_only():
    ranks = [still(0, "in all_reduce", 7), still(1, "in all_reduce", 7), still(2, "in all_reduce", 8)]
    assert [[one.rank for one in those] for those in fold([*ranks, still(3, "in all_reduce", 7, step=1)])] == [
        [0, 1], [2], [3],
    ]  # fmt: skip


def test_a_job_that_trains():
    shown = draw(status(*map(rank, range(8)), replicas=ReplicasNow(equal_up_to=1000, at="optimizer step", compared=12)))
    assert shown == (
        "ddpdoctor: the job runs for 12 min, 8 ranks; run folder run\n"
        "  ranks  step  step time  waits  epoch  batch   memory  does\n"
        "                      ms\n"
        "  0-7    1040       41.2     3%      2     88  1.0 GiB  trains\n"
        "\n"
        "replicas equal up to optimizer step 1000, in 12 checks\n"
    )


def test_who_waits_for_whom():
    waits = (WaitNow(ranks=(0, 2, 3), call="all_reduce of float32[1]", since_s=12.0),)
    ranks = (
        still(0, "in all_reduce", 7),
        still(1, "in the script", 9),
        *(still(n, "in all_reduce", 7) for n in (2, 3)),
    )
    shown = draw(status(*ranks, waits=waits, waited_for=(1,), reported="DD601 stuck, rank 1: rank 1 stands still"))
    assert "ranks 0, 2, 3 have waited for rank 1 for 12 s, in all_reduce of float32[1]\n" in shown
    assert "\nranks 0, 2, 3 are at /w/train.py:7 in main\nrank 1 is at /w/train.py:9 in main\n" in shown
    assert "`wrap` has reported DD601 stuck, rank 1: rank 1 stands still\n  report  ddpdoctor report run\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_page_shows_what_is_drawn():
    seen = {"trains": False, "since_s": 26.0, "step": 300, "step_ms": 38.7, "epoch": 0, "batch": 0}
    memory = {"memory_bytes": 311 * 2**20}
    at, stuck = (
        Place(rank=1, file="train.py", line=line, function=name) for line, name in ((12, "main"), (6, "fetch_settings"))
    )
    ranks = [rank(n, state="in backward", where=at, waits_share=0.4, **seen, **memory) for n in range(8)]
    ranks[1] = rank(1, state="in the script", where=stuck, waits_share=0.41, **seen, **memory)
    waits = (WaitNow(ranks=(0, 2, 3, 4, 5, 6, 7), call="backward", since_s=26.0),)
    compared = ReplicasNow(equal_up_to=300, at="optimizer step", compared=12)
    run = "ddpdoctor-report/20261124-131805-train"
    shown = draw(status(*ranks, run=run, running_s=95.0, waits=waits, waited_for=(1,), replicas=compared), width=100)
    assert f"```\n{shown}```" in (DOCS / "status.md").read_text()


def test_for_whom_they_wait_is_left_out_where_it_is_not_known():
    waits = (WaitNow(ranks=(0, 1), call="backward", since_s=3.0),)
    assert "ranks 0 and 1 have waited for 3.0 s, in backward\n" in draw(status(rank(0), rank(1), waits=waits))


def test_replicas_that_differ():
    found = ReplicasNow(equal_up_to=64, at="optimizer step", compared=9, differing=("parameter",))
    assert "replicas equal up to optimizer step 64 only: parameter differ\n" in draw(status(rank(0), replicas=found))


def test_nodes_that_cannot_be_seen_are_named_with_what_their_wrap_says():
    nodes = (
        NodeSeen(number=1, host="n1", presence=Presence.HERE, ranks=(1, 2), alive=2, waits_s=12.0),
        NodeSeen(number=2, host="", presence=Presence.ABSENT),
    )
    shown = draw(status(rank(0), unseen=nodes, world_size=4), width=None)
    assert (
        "ranks 1 and 2 on node 1 (n1) cannot be seen from here: run `ddpdoctor status` there; its `wrap` says: "
        "2 living ranks, one has waited for 12 s\n"
    ) in shown
    assert "the ranks on node 2 cannot be seen from here: its `wrap` has not come yet\n" in shown


def test_ranks_of_which_nobody_knows_are_named():
    assert "ranks 1-3 cannot be seen from here" in draw(status(rank(0), world_size=4))


def test_a_job_that_has_ended_names_the_report():
    ended = status(state=Liveness.ENDED, exit_status=1)
    assert draw(ended, None) == ("ddpdoctor: the job has ended with exit status 1\n  report  ddpdoctor report run\n")
    assert "left no word of how" in draw(replace(ended, exit_status=None), None)


def test_a_job_before_its_first_rank():
    assert "no rank has started yet" in draw(status(world_size=2))


def test_what_is_collected_cannot_control_the_terminal():
    place = Place(rank=0, file="/w/\x1b[2J.py", line=7, function="main")
    shown = draw(status(still(0, "in \x1b[31mx", 7, host="\x07"), rank(1, host="b")))
    assert "\x1b" not in shown + draw(status(replace(still(0, "in x", 7), where=place)))
    assert "\x07" not in shown
