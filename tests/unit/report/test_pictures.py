"""What reports draw: pictures of a job, grids, and the screens of status, history and check-rendezvous."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ddpdoctor.diagnose.live import sum_up
from ddpdoctor.diagnose.rendezvous import rendezvous_data
from ddpdoctor.model.codec import encode
from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.data import Drawn, LoaderTaken, Pass, PassTaken, RankPass, RankTaken, SamplingPlan, share_out
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, JobStatus, JobSummary, Outcome, Place, RankRow, Severity
from ddpdoctor.model.launch import Contact
from ddpdoctor.model.live import Blamed, JobNow, Liveness, PassSeen, RankNow, Start, WaitNow
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
from ddpdoctor.model.saved import Checksums, Contents, FileSeen, Form, ReadState, StatePart
from ddpdoctor.model.steps import Budget, PhaseRow
from ddpdoctor.model.trial import GradientErrors, OneProcess, ReferenceStep, Trial, TrialSettings
from ddpdoctor.model.tuning import RatioRange, ScalingKind, ScalingRow, TuneOutcome, TuneResult, TuneVerdict
from ddpdoctor.report.blocks import Bars, linear_level, log_level, read_content
from ddpdoctor.report.formats import draw_tree, render_markdown
from ddpdoctor.report.lines import clean, format_ranks, wrap
from ddpdoctor.report.text import render_text
from ddpdoctor.report.verbs.job import MOST_FRAMES, consistency_pictures, job_content, stack_tree
from ddpdoctor.report.verbs.live import plain_histories, render_history, render_status
from ddpdoctor.report.verbs.trial import reference_pictures
from tests import benches
from tests.golden import Cases, table, words
from tests.pictures import FINISHED, finding, only, pictures, report  # noqa: F401 - of the rows
from tests.rules.consistency import test_files as files  # noqa: F401 - of the rows
from tests.rules.consistency.build import difference, stream
from tests.rules.rendezvous.build import column, healthy, pair, with_pairs

CASES = Cases(__name__)
test_kept = CASES.test()


HUNG = replace(FINISHED, status=JobStatus.HUNG)


def compared(*streams):
    return {"consistency": encode(Consistency(check_every=1, streams=streams))}


def at_ends(grid, columns=2):
    """What is worth seeing of a large grid."""
    return {
        "rows": (len(grid.rows), *grid.rows[-2:]), "columns": (len(grid.columns), *grid.columns[-columns:]),
        "legend": grid.legend, "first row": [*grid.cells[0][:2], *grid.cells[0][-2:]],
    }  # fmt: skip


@CASES
def a_trial_shows_replicas_and_errors_beside_one_process():
    drift = difference(What.GRADIENT, number=2, sides=((0,), (1,)))
    steps = tuple(reference_step(number, ratios) for number, ratios in ((1, {"a": 2.0, "b": 1.0}), (3, {"b": 1000.0})))
    trial = Trial(
        settings=TrialSettings(model="m:f"), models=(), participants=(), reference=OneProcess(steps=steps),
        consistency=Consistency(check_every=1, streams=(stream(drift),)),
    )  # fmt: skip
    return [*consistency_pictures(trial.consistency, ())], [*reference_pictures(trial)]


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
def a_loader_that_a_finding_names_shows_which_ranks_took_the_same():
    def taken(rank, order="x", batches=6, drawn=45, *, complete=True):
        return RankTaken(rank=rank, batches=batches, drawn=drawn, order=order, complete=complete)

    same = PassTaken(number=1, ranks=(taken(0), taken(1), taken(2, "y")))
    again = PassTaken(number=3, ranks=(taken(0), taken(1, "z", complete=False), taken(2, "", drawn=None)))
    loaders = [encode(LoaderTaken(file="/job/train.py", line=line, passes=(same, again))) for line in (12, 40)]
    found = finding("DD701", ranks=(0, 1), where=(Place(rank=0, file="/job/train.py", line=12, function="main"),))
    unnamed, damaged = report(job=FINISHED, loaders=loaders), report(found, job=FINISHED, loaders=[{"file": 3}])
    return pictures(report(found, job=FINISHED, loaders=loaders)), len(pictures(unnamed)), len(pictures(damaged))


def file(number, **more):
    fields = {"form": Form.ZIP, "state": ReadState.WHOLE, "checksums": Checksums.CHECKED, "values": (),
              "contents": Contents(parts=(StatePart.MODEL, StatePart.OPTIMIZER))}  # fmt: skip
    return FileSeen(path=f"/runs/{number}.pt", size_bytes=9, **(fields | more))


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


@CASES
def the_bench_shows_curves_with_the_reference_and_matrices_with_figures():
    busbw, time, pairs, nodes = pictures(benches.everything())
    return [
        replace(one, lines=tuple(replace(line, points=line.points[::5]) for line in one.lines)) for one in (busbw, time)
    ], pairs, nodes  # fmt: skip


BUDGET = Budget(
    wall_ms=100.0, steps=90, count=100, communication_share=0.1, waiting_share=0.1, ranks=(0, 1),
    phases=(PhaseRow(phase="forward", critical_ms=50.0, median_ms=25.0, worst_ms=50.0, worst_rank=0,
                     ranks_ms=(50.0, 20.0)),
            PhaseRow(phase="waiting for ranks", critical_ms=0.0, median_ms=15.0, worst_ms=30.0, worst_rank=1,
                     ranks_ms=(0.0, 30.0)),
            PhaseRow(phase="loss", critical_ms=0.01, median_ms=0.0, worst_ms=0.0, worst_rank=0, ranks_ms=(0.0, 0.0))),
)  # fmt: skip


def pace(rank, step_ms=100.0, waited_ms=10.0):
    busy = dict.fromkeys(("before_forward_ms", "forward_ms", "between_ms", "backward_ms"), (step_ms - waited_ms) / 4)
    return {"rank": rank, "steps": 90, "end_with": "optimizer", "step_ms": step_ms, "waited_ms": waited_ms} | busy


def bars(one):
    """The bars of a report, in its pictures and in its sections."""
    content = read_content(one)
    blocks = [*content.pictures, *(block for section in content.sections for block in section)]
    return [block for block in blocks if isinstance(block, Bars)]


@CASES
def speed_is_a_bar_for_each_rank_if_it_is_asked_for_or_a_rank_is_slow():
    """A report of an older version, and a job without a budget, have the medians of each rank."""
    slow = finding("DD610", "straggler", Severity.WARNING, ranks=(1,))
    steps = [pace(1, waited_ms=0.0), pace(0, waited_ms=20.0), pace(2) | {"step_ms": "x"}, pace("0"), 5]
    asked, quiet, older = (
        {"asked": one, "budget": encode(budget)}
        for one, budget in ((True, BUDGET), (False, BUDGET), (True, replace(BUDGET, ranks=())))
    )
    return {
        "asked": bars(report(slow, job=FINISHED, speed=asked, steps=steps)),
        "slow": bars(report(slow, job=FINISHED, speed=quiet, steps=steps)),
        "neither": bars(report(job=FINISHED, speed=quiet, steps=steps)),
        "hung": bars(report(slow, job=HUNG, speed=quiet, steps=steps)),
        "older": bars(report(slow, job=FINISHED, speed=older, steps=steps)),
        "without a budget": bars(report(slow, job=FINISHED, speed={"asked": True, "reason": "too few"}, steps=steps)),
    }


@CASES
def of_many_ranks_the_named_and_the_busiest_have_a_bar():
    steps = [pace(rank, waited_ms=10.0 if rank in {3, 69} else 20.0) for rank in range(70)]
    slow = finding("DD610", "straggler", Severity.WARNING, ranks=(68,))
    (only_one,) = bars(report(slow, job=FINISHED, speed={}, steps=steps))
    return {"ranks": [name for name, _, _ in only_one.rows], "legend": only_one.legend}


# The report of check-rendezvous as text: who came, the store, and the matrix.


def report_rendezvous(seen, **more):
    return replace(report(**{**rendezvous_data(seen), **more}), command=("ddpdoctor", "check-rendezvous"))


def screen(one, width=None):
    return render_text(one, width=width, color=False, run_dir=None)


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
    """Raw: a byte that a terminal acts on would be seen as one that is not printable."""
    drawn = render_status(one, width=width, color=False)
    assert all(line.isprintable() and len(line) <= width for line in drawn.splitlines())
    return drawn


ALIKE = ({}, {"step": 1042, "step_ms": 43.0, "waits_share": 0.1, "batch": 90, "memory_bytes": 2**31})
OTHERS = ({"step": 1043}, {"step_ms": 60.0}, {"waits_share": 0.4}, {"lives": False, "trains": False, "state": "exit 1"})
WAIT = WaitNow(ranks=(0, 2, 3), call="all_reduce of float32[1]", since_s=12.0)


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
        timeline=encode(TIMELINE), waits=encode(GRAPH), source=encode(SOURCE),
    ),
    ranks=ROWS, command=("ddpdoctor", "wrap", "train.py"), started_at="2026-01-01T00:00:00.000+00:00", ended_at="",
    tool_version="",
)  # fmt: skip


@CASES
def a_job_that_hung_has_four_pictures_of_which_text_and_markdown_draw_some():
    timeline, *others = job_content(REPORT).pictures
    assert timeline == TIMELINE
    assert screen(REPORT).isascii()
    return others, screen(REPORT), render_markdown(REPORT)


@CASES
def a_report_of_an_earlier_version_has_the_stacks_alone_and_damage_costs_its_picture():
    old = replace(REPORT, data={})
    damaged = [replace(REPORT, data={**REPORT.data, name: {"lanes": 3}}) for name in ("timeline", "waits", "source")]
    for one in damaged:
        assert "rank 1 is stuck" in screen(one, 80)
    found = [job_content(one).pictures for one in (old, replace(old, ranks=()), *damaged)]
    return [tuple(type(block).__name__ for block in one) for one in found], screen(old)


@CASES
def stacks_are_merged_from_the_outermost_frame_and_the_line_is_blamed_on_the_blamed_rank_alone():
    same = (replace(ROWS[1], rank=2), replace(ROWS[0], stack=(f"{SCRIPT}:8 read",)))
    odd = replace(ROWS[0], stack=("no frame", "/a.py:" + "9" * 5000 + " f", "\x1b[31m:1 \n"))
    assert stack_tree((replace(ROWS[0], stack=()),), None) is None
    odd_lines = [line[:60] for line in draw_tree(stack_tree((odd,), None))]
    deep = stack_tree((replace(ROWS[0], stack=tuple(f"/a.py:{n} f" for n in range(5000))),), None)
    assert [len(draw_tree(deep)), draw_tree(deep)[-1].endswith("/a.py:4999 in f")] == [MOST_FRAMES, True]
    return ["\n".join(draw_tree(stack_tree(rows, VERDICT))) for rows in (ROWS, same)], odd_lines


test_rows = table(
    "pictures",
    "ddpdoctor.diagnose.files ddpdoctor.diagnose.rendezvous ddpdoctor.model.codec ddpdoctor.report.blocks",
    "ddpdoctor.model.consistency ddpdoctor.model.data ddpdoctor.model.facts ddpdoctor.model.findings",
    "ddpdoctor.model.live ddpdoctor.model.launch ddpdoctor.model.saved ddpdoctor.model.tuning",
    "ddpdoctor.report.text tests.pictures tests.rules.rendezvous.build tests.rules.consistency.build",
    globals(),
)
