"""What reports draw: pictures of a job, grids, and the screens of status, history and check-rendezvous."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ddpdoctor.diagnose.files import checkpoint_report
from ddpdoctor.diagnose.history import sum_up
from ddpdoctor.diagnose.job import encode_timeline
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
from ddpdoctor.model.findings import Check, JobStatus, JobSummary, Outcome, Place, RankRow, Severity
from ddpdoctor.model.live import Blamed, JobNow, Liveness, PassSeen, RankNow, ReplicasNow, Start, WaitNow
from ddpdoctor.model.pictures import (
    Lane,
    RankWaits,
    SourceExcerpt,
    Span,
    SpanKind,
    Timeline,
    TimelineEvent,
    WaitingRanks,
)
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
from ddpdoctor.model.trial import GradientErrors, OneProcess, ReferenceStep, Trial, TrialSettings
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
from ddpdoctor.report.blocks import MAX_ROWS, ChartLine, GridCell, Series, grid_by_member, linear_level, log_level
from ddpdoctor.report.lines import clean, format_ranks, wrap
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.text.pictures import MOST_ROWS, draw_sparks, draw_strip
from ddpdoctor.report.text.report import render_text
from ddpdoctor.report.tree import MOST_FRAMES, draw_tree, stack_tree
from ddpdoctor.report.verbs.job import consistency_pictures, job_content
from ddpdoctor.report.verbs.live import plain_histories, render_history, render_status
from ddpdoctor.report.verbs.trial import reference_pictures
from tests import benches
from tests.doc_pages import DOCS
from tests.golden import Cases, words
from tests.pictures import FINISHED, finding, only, pictures, report
from tests.rules.consistency import test_files as files
from tests.rules.consistency.build import difference, stream
from tests.rules.rendezvous.build import LARGE, absent, column, healthy, pair, transfer, view, with_pairs, with_visits

CASES = Cases(__name__)
test_kept = CASES.test()


def compared(*streams):
    return {"consistency": encode(Consistency(check_every=1, streams=streams))}


def at_ends(grid, columns=2):
    """What is worth seeing of a large grid."""
    return {
        "rows": (len(grid.rows), *grid.rows[-2:]), "columns": (len(grid.columns), *grid.columns[-columns:]),
        "legend": grid.legend, "first row": [*grid.cells[0][:2], *grid.cells[0][-2:]],
    }  # fmt: skip


@CASES
def members_with_equal_cells_share_a_column_and_what_is_left_out_is_counted():
    rows = [
        ("one", {rank: GridCell(text=str(min(rank, 70))) for rank in range(80)}),
        ("other", {0: GridCell(text="x")}),
    ]
    grid = grid_by_member("a title", rows, range(80), lambda those: f"{those[0]}-{those[-1]}", axes=("thing", "rank"))
    few = grid_by_member("a title", rows, range(69, 80), lambda those: str(list(those)), axes=("thing", "rank"))
    return at_ends(grid), few


@CASES
def replicas_show_which_tensor_differs_where_and_how_many_are_equal():
    """No side of the state has more than half, so that nobody is right."""
    parameters = difference(What.PARAMETER, number=5, names=("0.weight", "1.bias"), sides=((0, 2, 3), (1,)))
    state = difference(What.STATE, number=6, part="exp_avg", sides=((0, 2), (1,), (3,)), absent_on=(3,))
    data = compared(stream(parameters, state, ranks=4))
    return pictures(report(finding("DD501", ranks=(1,)), job=FINISHED, **data))


@CASES
def of_many_differing_tensors_the_first_are_shown_and_all_are_counted():
    one = difference(What.PARAMETER, names=tuple(f"{number}.weight" for number in range(MAX_ROWS + 5)))
    return at_ends(only(report(job=FINISHED, **compared(stream(replace(one, differing=100, of=100))))))


@CASES
def of_many_sets_of_ranks_the_first_have_letters():
    one = difference(What.GRADIENT, sides=tuple((rank,) for rank in range(100)))
    return at_ends(only(report(job=FINISHED, **compared(stream(one, ranks=100)))))


@CASES
def of_several_models_the_title_says_which_and_by_what_clock():
    drifts = difference(What.PARAMETER, number=0, last_equal=None)
    synced = difference(What.BUFFER, number=3, last_equal=None, names=("1.running_mean",))
    return pictures(
        report(job=FINISHED, **compared(
            stream(drifts, model=2, clock=StreamClock.END), stream(synced, clock=StreamClock.SYNC), stream(),
            stream(drifts, model=-1),
        ))
    )  # fmt: skip


@CASES
def reports_with_nothing_to_draw_or_with_damage_have_no_picture():
    hung = replace(FINISHED, status=JobStatus.HUNG)
    alone = compared(stream())["consistency"]
    data = [{"consistency": one} for one in (None, alone, {"streams": 3}, [1])]
    none = [pictures(report(job=hung, **one)) for one in ({}, *data, {"steps": 3})]
    none += [pictures(report(checks=CHECKS, nodes=[], hosts=hosts)) for hosts in ([], "node0", None, [1])]
    none += [pictures(report(files=found)) for found in ([], "x")]
    none += [pictures(report(diff=encode(files.facts())))]
    unknown = SamplingPlan(samples=10, world_size=2, batch_size=4, drop_last=True, sharing=Sharing.NONE)
    return [len(one) for one in [*none, pictures(report(shares=encode(share_out(unknown))))]]


@CASES
def a_trial_shows_replicas_and_errors_beside_one_process():
    drift = difference(What.GRADIENT, number=2, sides=((0,), (1,)))
    steps = tuple(reference_step(number, ratios) for number, ratios in ((1, {"a": 2.0, "b": 1.0}), (3, {"b": 1000.0})))
    trial = Trial(
        settings=TrialSettings(model="m:f"), models=(), participants=(), reference=OneProcess(steps=steps),
        consistency=Consistency(check_every=1, streams=(stream(drift),)),
    )  # fmt: skip
    return consistency_pictures(trial.consistency, ()), reference_pictures(trial)


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


@CASES
def compared_files_show_by_how_much_their_contents_differ():
    weight = files.unequal(sides=((0, 2), (1,)), apart=(files.apart(file=1, largest=0.25, not_finite=1),))
    bias = files.unequal(name="model.fc.bias", sides=((0,),), seen=("float32[4]",), apart=(), absent_in=(1, 2))
    random = files.unequal(kind=Kind.RANDOM, name="rng")
    facts = files.facts(weight, bias, files.setting(sides=((0, 1), (2,))), random, files=3, tensors=9)
    return pictures(report(finding("DD507", severity=Severity.WARNING), diff=encode(facts)))


@CASES
def shares_of_an_epoch_show_what_two_ranks_both_get():
    """The sampler repeats samples 0 and 1, which ranks 0 and 1 have, on ranks 1 and 2."""
    shares = [share_out(SamplingPlan(samples=s, world_size=w, batch_size=2)) for s, w in ((10, 3), (1000, 100))]
    few, many = (only(report(shares=encode(one))) for one in shares)
    return few, at_ends(many)


@CASES
def drawn_samples_show_what_two_ranks_both_drew_and_old_reports_nothing():
    rows = tuple(RankPass(rank=rank, drawn=8, repeated=0, batches=2, last_batch=4, complete=True) for rank in range(3))
    one = Pass(number=1, ranks=rows, unique=8, shared=8, missed=0, overlaps=((8, 8, 2), (8, 8, 2), (2, 2, 4)))
    drawn = Drawn(
        world_size=3, function="m:f", samples=8, kind="DataLoader", dataset="D", sampler="", batch_size=4,
        passes=(one, replace(one, number=2, overlaps=()), replace(one, number=3, overlaps=((1,), (2, 3)))),
        set_epoch=True,
    )  # fmt: skip
    return pictures(report(drawn=encode(drawn)))


CHECKS = (
    Check(id="shm", code="DD121", group="limits", outcome=Outcome.FAILED, seen="64 MiB", hosts=("node2",)),
    Check(id="nofile", code="DD122", group="limits", outcome=Outcome.PASSED, seen="1048576"),
    Check(id="memlock", code="DD123", group="limits", outcome=Outcome.PASSED, seen="unlimited"),
    Check(id="xid", code="DD311", group="GPUs", outcome=Outcome.SKIPPED, reason="there is no GPU"),
    Check(id="ecc", code="DD312", group="GPUs", outcome=Outcome.PASSED, seen="none", hosts=("node0",)),
    Check(id="clocks", code="DD131", group="", outcome=Outcome.FAILED, seen="2 s apart"),
    Check(id="oom", code="DD132", group="", outcome=Outcome.INCONCLUSIVE, reason="no access"),
)


@CASES
def machines_show_checks_by_host_and_mark_the_host_that_differs():
    shm = finding("DD121", "shm", hosts=("node2",))
    clocks = finding("DD131", "clocks", Severity.WARNING, hosts=("node2",))
    hosts = [f"node{number}" for number in range(5)]
    return pictures(report(shm, clocks, checks=CHECKS, nodes=[], hosts=[*hosts, "node1", 7]))


@CASES
def two_hosts_that_differ_are_not_marked_and_a_note_leaves_the_check_passed_elsewhere():
    check = Check(id="omp", code="DD126", group="limits", outcome=Outcome.PASSED, seen="1")
    note = finding("DD126", "omp", Severity.INFO, hosts=("node1",))
    return [
        pictures(report(checks=CHECKS[4:5], nodes=[], hosts=["node0", "node1"])),
        pictures(report(note, checks=(check,), nodes=[], hosts=["node0", "node1"])),
    ]


@CASES
def rendezvous_shows_each_pair_of_nodes_with_figures():
    facts = with_pairs(healthy(2), {(0, 1)}, lambda s, t: pair(s, t, Contact.REFUSED))
    return pictures(report(checks=(), **rendezvous_data(facts)))


@CASES
def of_many_nodes_those_come_first_whose_connections_fail():
    facts = with_pairs(healthy(70), {(69, 3)}, lambda s, t: pair(s, t, Contact.NO_ANSWER))
    (grid,) = pictures(report(checks=(), **rendezvous_data(facts)))
    return at_ends(grid), grid.cells[-1][3]


@CASES
def checkpoints_show_what_could_be_read_and_which_parts_each_file_holds():
    def file(number, **more):
        fields = {"form": Form.ZIP, "state": ReadState.WHOLE, "checksums": Checksums.CHECKED, "values": (),
                  "contents": Contents(parts=(StatePart.MODEL, StatePart.OPTIMIZER))}  # fmt: skip
        return FileSeen(path=f"/runs/{number}.pt", size_bytes=9, **(fields | more))

    odd = OddValues(name="w", of=4, nan=1, above=0, below=0, plain=3)
    seen = Checkpoints(
        files=(file(0), file(1), file(2, contents=Contents(parts=(StatePart.MODEL,)), values=(odd,)),
               file(3, state=ReadState.CUT, contents=None, checksums=Checksums.NOT_READ, values=None)),
    )  # fmt: skip
    old = report(files=[{"path": "a/x.pt", "state": "whole", "parts": 3}, {"path": "b/x.pt", "state": "whole"}, 5])
    return pictures(checkpoint_report(seen, ("ddpdoctor",), "2026-01-01T00:00:00Z")), only(old).columns


@CASES
def a_loader_that_a_finding_names_shows_which_ranks_took_the_same():
    def taken(rank, order="x", batches=6, drawn=45, *, complete=True):
        return RankTaken(rank=rank, batches=batches, drawn=drawn, order=order, complete=complete)

    same = PassTaken(number=1, ranks=(taken(0), taken(1), taken(2, "y")))
    again = PassTaken(number=3, ranks=(taken(0), taken(1, "z", complete=False), taken(2, "", drawn=None)))
    loaders = [encode(LoaderTaken(file="/job/train.py", line=line, passes=(same, again))) for line in (12, 40)]
    found = finding("DD701", ranks=(0, 1), where=(Place(rank=0, file="/job/train.py", line=12, function="main"),))
    unnamed, damaged = report(job=FINISHED, loaders=loaders), report(found, job=FINISHED, loaders=[{"file": 3}])
    return pictures(report(found, job=FINISHED, loaders=loaders)), len(pictures(unnamed)), len(pictures(damaged))


def span(ratio, low=None, high=None):
    return RatioRange(ratio=ratio, low=low or ratio, high=high or ratio)


def tuned(*rows, noise=None):
    result = TuneResult(
        step_ms=10.0, rounds=6, noise=noise or span(1.0), rows=rows, verdict=TuneVerdict.NOTHING, conclusion="nothing"
    )
    return encode(TuneOutcome(result=result))


SCALED = ScalingRow(
    ranks=4, kind=ScalingKind.WEAK, step_ms=10.0, rows=8.0, efficiency=0.5, threads=1.0, contention=0.625,
    communication=0.8, noise=0.01,
)  # fmt: skip
SHARES = share_out(SamplingPlan(samples=10, world_size=3, batch_size=2))
DAMAGED = {
    "ranks that are none": {
        "shares": encode(replace(SHARES, ranks=tuple(replace(one, rank=one.rank + 7) for one in SHARES.ranks)))
    },
    "changes without a number": {
        "tune": tuned(TriedSetting(setting="a", title="a", measured=span(float("inf")), predicted=span(1e308)))
    },
    "no launch alone": {"scaling": encode(ScalingResult(launches=(), rows=(SCALED,)))},
    "contents of no side": {"diff": encode(files.facts(files.unequal(seen=())))},
    "a speed that is a text": {"speed": "fast"},
}
"""Data that has the right form, and does not fit together."""


@CASES
def a_damaged_report_is_drawn_nevertheless():
    return {name: screen(report(job=FINISHED, **data)) for name, data in DAMAGED.items()}


@CASES
def the_bench_shows_curves_with_the_reference_and_matrices_with_figures():
    busbw, time, pairs, nodes = pictures(benches.everything())
    return [
        replace(one, lines=tuple(replace(line, points=line.points[::5]) for line in one.lines)) for one in (busbw, time)
    ], pairs, nodes  # fmt: skip


@CASES
def each_reference_has_a_chart_and_one_rank_has_none():
    other = replace(benches.H100, gb_s=100.0, text="--expect")
    two = benches.report(curves=(benches.curve(), benches.curve(dtype="bfloat16", reference=other)))
    return [(one.title, one.reference and one.reference.name) for each in (two, benches.one_rank())
            for one in pictures(each)]  # fmt: skip


@CASES
def of_a_wide_matrix_the_ends_of_the_slowest_pairs_are_shown():
    grid = pictures(benches.report(ranks=70, pairs=benches.pair_matrix(70, slow=(66, 68))))[-1]
    return at_ends(grid), [row for row in grid.rows if row.startswith("6")]


BUDGET = Budget(
    wall_ms=100.0, steps=90, count=100, communication_share=0.1, waiting_share=0.1,
    phases=(PhaseRow(phase="forward", critical_ms=50.0, median_ms=25.0, worst_ms=50.0, worst_rank=3),
            PhaseRow(phase="loss", critical_ms=0.01, median_ms=0.0, worst_ms=0.0, worst_rank=0)),
)  # fmt: skip


def pace(rank, step_ms=100.0, waited_ms=10.0):
    busy = dict.fromkeys(("before_forward_ms", "forward_ms", "between_ms", "backward_ms"), (step_ms - waited_ms) / 4)
    return {"rank": rank, "steps": 90, "end_with": "optimizer", "step_ms": step_ms, "waited_ms": waited_ms} | busy


@CASES
def speed_shows_phases_on_the_critical_median_and_worst_rank_and_on_each_rank():
    """Without --speed, only a straggler makes the ranks worth a picture."""
    slow = finding("DD610", "straggler", Severity.WARNING, ranks=(1,))
    steps = [pace(1, waited_ms=0.0), pace(0, waited_ms=20.0), pace(2) | {"step_ms": "x"}, pace("0"), 5]
    asked, quiet = ({"asked": one, "budget": encode(BUDGET)} for one in (True, False))
    return [pictures(report(slow, job=FINISHED, speed=asked, steps=steps)), *(
        [one.title for one in pictures(report(*found, job=FINISHED, speed=quiet, steps=steps))]
        for found in ((slow,), ())
    )]  # fmt: skip


@CASES
def of_many_ranks_those_are_shown_that_compute_for_longest_and_equal_ones_share_a_column():
    steps = [pace(rank, waited_ms=0.0 if rank == 69 else 10.0) for rank in range(70)]
    slow = finding("DD610", "straggler", Severity.WARNING, ranks=(69,))
    return at_ends(only(report(slow, job=FINISHED, speed={}, steps=steps)))


@CASES
def tune_shows_the_change_by_each_setting_and_scaling_the_factors_of_the_efficiency():
    rows = (
        TriedSetting(setting="a", title="cap=50", predicted=span(0.95, 0.9, 1.0), measured=span(0.8, 0.75, 0.85)),
        TriedSetting(setting="b", title="static_graph", measured=span(1.1, 1.05, 1.2)),
        TriedSetting(setting="c", title="workers", reason="there is no loader"),
    )  # fmt: skip
    alone = ScalingLaunch(kind=LaunchKind.ALONE, ranks=1, step_ms=5.0, unreduced_ms=5.0)
    scaling = encode(ScalingResult(launches=(alone,), rows=(SCALED,)))
    return pictures(report(tune=tuned(*rows, noise=span(1.0, 0.99, 1.01)))), pictures(report(scaling=scaling))


# The report of check-rendezvous as text: who came, the store, and the matrix.


def report_rendezvous(seen, **more):
    return replace(report(**{**rendezvous_data(seen), **more}), command=("ddpdoctor", "check-rendezvous"))


def screen(one, width=None):
    return render_text(one, width=width, color=False, run_dir=None)


@CASES
def the_screen_of_check_rendezvous():
    one = healthy(1)
    visits = (replace(one.visits[0], store_view=replace(one.visits[0].store_view, host="fd00:77::a")),)
    dropped = with_pairs(healthy(3), column(1, 3), lambda s, t: pair(s, t, Contact.NO_ANSWER))
    stalled = lambda s, t: pair(s, t, large=transfer(LARGE, contact=Contact.NO_ANSWER))  # noqa: E731
    late = with_visits(healthy(3), n0=view(0, not_served="Address already in use"), n1=view(1, Contact.REFUSED))
    late = replace(late, visits=(*late.visits[:2], absent(2)), pairs=(), trust="the token of DDPDOCTOR_TOKEN")
    seen = {
        "two that are well": healthy(2), "an address of IPv6": replace(one, visits=visits),
        "pairs that fail": with_pairs(dropped, {(2, 0)}, stalled), "nodes that did not come": late,
        "nine": with_pairs(healthy(9), column(1, 9), lambda s, t: pair(s, t, Contact.REFUSED)),
    }  # fmt: skip
    unjudged = report_rendezvous(healthy(2), rendezvous=None)
    return {name: screen(report_rendezvous(one)) for name, one in seen.items()} | {"not judged": screen(unjudged)}


@CASES
def eight_nodes_fit_into_80_columns_and_into_markdown():
    facts = with_pairs(healthy(8), column(1, 8), lambda s, t: pair(s, t, Contact.UNREACHABLE))
    return screen(report_rendezvous(facts), 80), render_markdown(report_rendezvous(facts))


def test_a_damaged_file_is_said_to_be_one():
    with pytest.raises(UserError, match="cannot be read"):
        screen(report_rendezvous(healthy(2), rendezvous={"nnodes": "two", "visits": []}))


# The history of a job.


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


STOPPED = start(180, status=JobStatus.INTERRUPTED, code="", summary="", blamed=(), first_epoch=1, steps=7)
STARTS = [start(0), start(50), start(100, status=JobStatus.HUNG, code="DD601", kind="stuck"), STOPPED]
HISTORY = sum_up(("ddpdoctor", "wrap", "train.py"), STARTS, ZERO)


@CASES
def a_history_is_one_sentence_a_table_and_the_reasons_and_an_object():
    several = render_history([HISTORY, HISTORY], ["runs/x: it is \x1b damaged"], width=None, color=False)
    return plain_histories([HISTORY], ["x: damaged"]), several


def test_the_page_of_history_shows_what_is_drawn():
    shown = render_history([HISTORY], [], width=80, color=False)
    assert f"```\n{shown.partition(chr(10) * 2 + '  1: ')[0]}\n```" in (DOCS / "history.md").read_text()


# What was collected, made safe to print.


CWD = Path("/home/me/proj")


def test_lines_break_between_words_only_stay_where_they_are_and_hang_under_the_first():
    place = "/" + "x" * 60 + "/train-loop.py:61"
    assert any(place in line for line in wrap(f"rank 3 stands at {place} and waits", 40, first="  "))
    assert (wrap("one\ntwo", None, first="- "), wrap("", 80, first="  x ")) == (["- one", "  two"], ["  x"])


test_words = words(
    __name__,
    clean=lambda text: clean(text, CWD), clean_below_the_root=lambda text: clean(text, Path("/")),
    format_ranks=format_ranks, linear_level=lambda row: linear_level(*row), log_level=lambda row: log_level(*row),
)  # fmt: skip


# What a job does, as text: ranks that do the same are one row, whatever is collected is escaped.


def rank(number, **changes):
    one = RankNow(
        rank=number, host="n0", pid=100 + number, lives=True, trains=True, state="trains", since_s=None, where=None,
        step=1040, step_ms=41.2, waits_share=0.03, epoch=2, batch=88, memory_bytes=2**30,
    )  # fmt: skip
    return replace(one, **changes)


def still(number, state, line, *, file="/w/train.py", **changes):
    place = Place(rank=number, file=file, line=line, function="main")
    return rank(number, trains=False, state=state, since_s=12.0, where=place, **changes)


def status(*ranks, **changes):
    one = JobNow(
        run="run", state=Liveness.RUNNING, host="n0", started_at=None, running_s=723.0, exit_status=None, attempt=0,
        world_size=len(ranks) or None, ranks=ranks, waits=(), waited_for=(), replicas=None, unseen=(), reported="",
    )  # fmt: skip
    return replace(one, **changes)


def draw(one, width=80):
    return render_status(one, width=width, color=False)


ALIKE = ({}, {"step": 1042, "step_ms": 43.0, "waits_share": 0.1, "batch": 90, "memory_bytes": 2**31})
OTHERS = ({"step": 1043}, {"step_ms": 60.0}, {"waits_share": 0.4}, {"lives": False, "trains": False, "state": "exit 1"})
WAIT = WaitNow(ranks=(0, 2, 3), call="all_reduce of float32[1]", since_s=12.0)
SITUATIONS = {
    "it trains": status(*map(rank, range(8)), replicas=ReplicasNow(equal_up_to=1000, at="optimizer step", compared=12)),
    "the first two train alike": status(*(rank(n, **changes) for n, changes in enumerate((*ALIKE, *OTHERS)))),
    "still at two lines and two steps": status(
        *(still(n, "in all_reduce", line) for n, line in ((0, 7), (1, 7), (2, 8))), still(3, "in all_reduce", 7, step=1)
    ),
    "who waits for whom": status(
        *(still(n, "in the script" if n == 1 else "in all_reduce", 9 if n == 1 else 7) for n in range(4)),
        waits=(WAIT,), waited_for=(1,), reported="DD601 stuck, rank 1: rank 1 stands still",
    ),
    "for whom is not known": status(
        rank(0), rank(1), waits=(WaitNow(ranks=(0, 1), call="backward", since_s=3.0),)
    ),
    "replicas differ": status(
        rank(0),
        replicas=ReplicasNow(equal_up_to=64, at="optimizer step", compared=9, differing=("parameter",)),
    ),
    "nodes that cannot be seen": status(
        rank(0), world_size=4, unseen=(
            NodeSeen(number=1, host="n1", presence=Presence.HERE, ranks=(1, 2), alive=2, waits_s=12.0),
            NodeSeen(number=2, host="", presence=Presence.ABSENT),
        ),
    ),
    "ranks that nobody knows": status(rank(0), world_size=4),
    "it has ended": status(state=Liveness.ENDED, exit_status=1),
    "it has ended without a word": status(state=Liveness.ENDED),
    "before the first rank": status(world_size=2),
    "what would control a terminal": status(
        still(0, "in \x1b[31mx", 7, host="\x07", file="/w/\x1b[2J.py"), rank(1, host="b")
    ),
}  # fmt: skip


@CASES
def the_screen_of_status():
    """Raw: a byte that a terminal acts on would be seen as one that is not printable."""
    drawn = {name: draw(one) for name, one in SITUATIONS.items()}
    assert all(line.isprintable() and len(line) <= 80 for one in drawn.values() for line in one.splitlines())
    return drawn


def test_the_page_of_status_shows_what_is_drawn():
    seen = {"trains": False, "since_s": 26.0, "step": 300, "step_ms": 38.7, "epoch": 0, "batch": 0}
    at, stuck = (
        Place(rank=1, file="train.py", line=line, function=name) for line, name in ((12, "main"), (6, "fetch_settings"))
    )
    seen |= {"memory_bytes": 311 * 2**20}
    ranks = [rank(n, state="in backward", where=at, waits_share=0.4, **seen) for n in range(8)]
    ranks[1] = rank(1, state="in the script", where=stuck, waits_share=0.41, **seen)
    waits = (WaitNow(ranks=(0, 2, 3, 4, 5, 6, 7), call="backward", since_s=26.0),)
    equal = ReplicasNow(equal_up_to=300, at="optimizer step", compared=12)
    run = "ddpdoctor-report/20261124-131805-train"
    shown = draw(status(*ranks, run=run, running_s=95.0, waits=waits, waited_for=(1,), replicas=equal), width=100)
    assert f"```\n{shown}```" in (DOCS / "status.md").read_text()


# A job that hung: the four pictures, and what text and Markdown draw of them.


TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
SCRIPT = "/home/me/train.py"


def span_of(kind, start, end, label="x"):
    return Span(kind=kind, start_ms=float(start), end_ms=None if end is None else float(end), label=label)


def lane(rank, *detail, blamed=False):
    return Lane(rank=rank, host="h", state="s", blamed=blamed, coarse=(), detail=detail)


BEFORE = tuple(
    span_of(kind, at + start, at + end)
    for at in range(0, 480, 20)
    for kind, start, end in ((SpanKind.FORWARD, 0, 10), (SpanKind.BACKWARD, 10, 20))
)
STUCK = (*BEFORE, span_of(SpanKind.HOST, 480, None))
WAITS = (*BEFORE, span_of(SpanKind.FORWARD, 480, 500), span_of(SpanKind.WAIT, 500, None))
FAULT = TimelineEvent(at_ms=480.0, label="DD601 stuck", ranks=(1,), fault=True)
TIMELINE = Timeline(
    started_at="2026-01-01T00:00:00+00:00", length_ms=60_000.0, detail_from_ms=0.0,
    lanes=(lane(0, *WAITS), lane(1, *STUCK, blamed=True), lane(2)), classes=((0, 2), (1,)), events=(FAULT,),
)  # fmt: skip
ROWS = tuple(
    RankRow(
        rank=n, local_rank=n, host="h", pid=n, state="in the script" if n == 1 else "in backward",
        where=Place(rank=n, file=SCRIPT, line=8 if n == 1 else 17, function="read" if n == 1 else "main"),
        stack=(f"{SCRIPT}:30 <module>",
               *((f"{SCRIPT}:16 main", f"{SCRIPT}:8 read") if n == 1
                 else (f"{SCRIPT}:17 main", f"{TORCH}/_tensor.py:623 backward"))),
    )
    for n in range(3)
)  # fmt: skip
VERDICT = replace(finding("DD601", "stuck", ranks=(1,), where=(ROWS[1].where,)), summary="rank 1 is stuck")
GRAPH = RankWaits(
    classes=(
        WaitingRanks(ranks=(0, 2), state="in backward", place=f"{SCRIPT}:17 in main", blamed=False),
        WaitingRanks(ranks=(1,), state="in the script", place=f"{SCRIPT}:8 in read", blamed=True),
    ),
    links=((0, 1), (0, 7)),
)
SOURCE = SourceExcerpt(file=SCRIPT, first=7, lines=("def read():", "    `sleep`(9)  # <b>", "    return 1"), blamed=8)
REPORT = replace(
    report(
        VERDICT, job=JobSummary(world_size=3, nnodes=1, status=JobStatus.HUNG, exit_status=124),
        timeline=encode_timeline(TIMELINE), waits=encode(GRAPH), source=encode(SOURCE),
    ),
    ranks=ROWS, command=("ddpdoctor", "wrap", "train.py"), started_at="2026-01-01T00:00:00.000+00:00", ended_at="",
    tool_version="",
)  # fmt: skip


@CASES
def a_job_that_hung_has_four_pictures_of_which_text_and_markdown_draw_some():
    (lanes,), *others = job_content(REPORT).pictures
    assert lanes.timeline == TIMELINE
    assert screen(REPORT).isascii()
    return others, screen(REPORT), render_markdown(REPORT)


@CASES
def a_report_of_an_earlier_version_has_the_stacks_alone_and_damage_costs_its_picture():
    old = replace(REPORT, data={})
    damaged = [replace(REPORT, data={**REPORT.data, name: {"lanes": 3}}) for name in ("timeline", "waits", "source")]
    for one in damaged:
        assert "rank 1 is stuck" in screen(one, 80)
    found = [job_content(one).pictures for one in (old, replace(old, ranks=()), *damaged)]
    return [tuple(type(block).__name__ for section in one for block in section) for one in found], screen(old)


@CASES
def the_strip_marks_the_fault_is_narrow_on_a_narrow_terminal_and_has_few_rows():
    lanes = tuple(lane(n, *STUCK, blamed=n == 11) for n in range(12))
    many = draw_strip(replace(TIMELINE, lanes=lanes, classes=tuple((n,) for n in range(12))), 80)
    assert len(many) == 1 + MOST_ROWS + 2
    nested = (*BEFORE[:-1], span_of(SpanKind.BACKWARD, 240, 480), span_of(SpanKind.COLLECTIVE, 300, 420))
    inner = replace(TIMELINE, lanes=(lane(1, *nested, blamed=True),), classes=((1,),), length_ms=480.0)
    drawn = {40: draw_strip(TIMELINE, 40), "many": many, "the inner one of nested spans": draw_strip(inner, 80)}
    return {name: "\n".join(lines) for name, lines in drawn.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"events": ()}, {"lanes": ()}, {"classes": ()}, {"classes": ((77,),)}, {"length_ms": float("nan")},
        {"events": (replace(FAULT, at_ms=float("inf")),)}, {"events": (replace(FAULT, at_ms=0.0),)},
    ],
)  # fmt: skip
def test_without_a_fault_or_calls_before_it_there_is_no_strip(changes):
    assert draw_strip(replace(TIMELINE, **changes), 80) == []


@CASES
def stacks_are_merged_from_the_outermost_frame_and_the_line_is_blamed_on_the_blamed_rank_alone():
    same = (replace(ROWS[1], rank=2), replace(ROWS[0], stack=(f"{SCRIPT}:8 read",)))
    odd = replace(ROWS[0], stack=("no frame", "/a.py:" + "9" * 5000 + " f", "\x1b[31m:1 \n"))
    assert stack_tree((replace(ROWS[0], stack=()),), None) is None
    odd_lines = [line[:60] for line in draw_tree(stack_tree((odd,), None))]
    deep = stack_tree((replace(ROWS[0], stack=tuple(f"/a.py:{n} f" for n in range(5000))),), None)
    assert [len(draw_tree(deep)), draw_tree(deep)[-1].endswith("/a.py:4999 in f")] == [MOST_FRAMES, True]
    return ["\n".join(draw_tree(stack_tree(rows, VERDICT))) for rows in (ROWS, same)], odd_lines


@CASES
def sparks_have_a_line_for_each_curve():
    points = tuple((4**n, float(2**n)) for n in range(8))
    curves = {"all_reduce": points, "barrier": points[:1], "gather": tuple((x, 3.0) for x, _ in points)}
    lines = tuple(ChartLine(name=name, points=those) for name, those in curves.items())
    assert draw_sparks(Series(title="", lines=())) == []
    return "\n".join(draw_sparks(Series(title="busbw in GB/s over size", lines=lines)))
