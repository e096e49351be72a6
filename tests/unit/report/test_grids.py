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
    JobStatus,
    Outcome,
    Place,
    Severity,
)
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.scaling import ScalingKind, ScalingResult, ScalingRow
from ddpdoctor.model.sharing import SamplingPlan, Sharing, share_out
from ddpdoctor.model.trial import GradientErrors, OneProcess, Participant, ReferenceStep, Trial, TrialSettings
from ddpdoctor.model.tuning import RatioRange, TriedSetting, TuneOutcome, TuneResult, TuneVerdict
from ddpdoctor.report.blocks import GridCell, Tone
from ddpdoctor.report.grids.build import MAX_COLUMNS, MAX_ROWS, grid_by_member, linear_level, log_level
from ddpdoctor.report.text.report import render_text
from tests.pictures import FINISHED, finding, only, pictures, report, texts
from tests.rules.consistency import test_files as files
from tests.rules.consistency.build import difference, stream
from tests.rules.rendezvous.build import healthy, pair, with_pairs


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
