"""Reports as people and programs read them: text, Markdown, CSV, JUnit, SARIF, commands of GitHub, nccl-tests.

What is drawn is kept whole, see tests/golden.py. The screens of allreduce-bench are in tests/data/allreduce-bench.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from ddpdoctor.cli import report as saved
from ddpdoctor.cli.output import render
from ddpdoctor.diagnose.files import read_page
from ddpdoctor.model.bandwidth import Assessment, BenchSettings, Collective, Ending, Mode, Stop
from ddpdoctor.model.codec import encode
from ddpdoctor.model.consistency import Consistency, Difference, Stream, StreamClock, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    FaultOrigin,
    Finding,
    JobStatus,
    JobSummary,
    Outcome,
    Place,
    RankRow,
    Severity,
)
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.model.steps import Budget, PhaseRow
from ddpdoctor.model.tuning import PredictedStep
from ddpdoctor.model.words import format_about, format_age, format_memory, format_rate, format_time
from ddpdoctor.report.bandwidth import measured
from ddpdoctor.report.bandwidth.content import render_nccl_tests
from ddpdoctor.report.bandwidth.figure import check_plot, choose_ticks, render_plot, spread_apart
from ddpdoctor.report.blocks import ChartLine, Column, Series
from ddpdoctor.report.formats import (
    parse_report,
    render_csv,
    render_github,
    render_json,
    render_junit,
    render_markdown,
    render_sarif,
)
from ddpdoctor.report.lines import format_hosts
from ddpdoctor.report.text import ROWS as CHART_ROWS
from ddpdoctor.report.text import TextPage, add_blocks, draw_chart, fit_columns, render_text
from tests import benches
from tests.golden import Cases, table, words
from tests.pictures import finding as small_finding
from tests.pictures import report as small_report

CASES = Cases(__name__)
test_kept = CASES.test()
SCREENS = Path(__file__).parents[2] / "data" / "allreduce-bench"
SCHEMA = json.loads((Path(__file__).parents[3] / "ddpdoctor" / "report" / "schema.json").read_text("utf-8"))
CWD = Path("/home/me/proj")
RUN_DIR = CWD / "ddpdoctor-report" / "now-train"
TRAIN = "/home/me/proj/train.py"


# The report of a job, at the widths of terminals and for a pipe.


def place(rank, line, function="main", file=TRAIN):
    return Place(rank=rank, file=file, line=line, function=function)


def finding(code="DD601", kind="stuck", severity=Severity.ERROR, **more):
    base = {"summary": "Rank 3 waits in fetch.", "ranks": (3,), "where": (place(3, 33, "fetch"),)}
    return Finding(code=code, kind=kind, severity=severity, **{**base, "confidence": Confidence.HIGH, **more})


STUCK = finding(
    evidence=(
        "Rank 3 stood at /home/me/proj/train.py:33 in two looks, 0.5 s apart, and used no CPU time in between them.",
        "ranks 0-2, 4 wait in all_reduce, see [/dev/shm] [bold]loud[/bold] [/] :smile: \x1b[31m",
    ),
    fix="Let fetch return on every rank, or give the wait in it a time limit, so that it raises instead.",
    step=12, tensor="layers.0.weight",
)  # fmt: skip


def row(rank, state="in all_reduce", line=61, **more):
    return RankRow(rank=rank, local_rank=rank, host="h", pid=rank + 10, state=state, where=place(rank, line), **more)


ROWS = (row(0), row(1), row(2), row(3, "in fetch", 33), row(4))


def report(status=JobStatus.HUNG, verdict=STUCK, others=(), rows=ROWS, exit_status=124, checks=()):
    job = JobSummary(world_size=len(rows), nnodes=1, status=status, exit_status=exit_status)
    made = small_report(*([verdict] if verdict else []), *others, job=job, checks=checks)
    return replace(made, verdict=verdict, ranks=rows)


def draw_job(one, *, width=None, color=False):
    return render_text(one, width=width, color=color, run_dir=RUN_DIR, cwd=CWD)


FINISHED = report(JobStatus.FINISHED, verdict=None, rows=ROWS[:2], exit_status=0)
FAILED = report(JobStatus.FAILED, verdict=None, exit_status=3)
DRIFT = Difference(what=What.PARAMETER, number=50, last_equal=32, splits=(), differing=1, of=4)
DRIFTS = finding("DD501", "param-drift", Severity.ERROR, summary="parameters differ")


def stream(clock=StreamClock.STEP, compared=17, last=800, *, tensors=160, ranks=(0, 1, 2, 3), model=1, differences=()):
    return Stream(
        clock=clock, group="0", model=model, optimizer=1, ranks=ranks, compared=compared,
        last_number=last if compared else None, tensors=tensors, differences=differences,
    )  # fmt: skip


def with_streams(*streams, **changes):
    data = {"consistency": encode(Consistency(check_every=50, streams=streams))}
    return replace(FINISHED, data=data, **changes)


def note(code="DD901", kind="not-recorded", summary="Rank 3 had no ring.", **more):
    return finding(code, kind, Severity.INFO, summary=summary, **more)


def ended(exit_status, kind):
    """A job that finished, whose launcher ended with this status, and what a note says of it."""
    said = note("DD612", kind, "Rank 1 died.", fix="")
    return replace(FINISHED, job=replace(FINISHED.job, exit_status=exit_status), findings=(said,))


def starved(*seconds):
    rows = [replace(one, starved_s=each) for one, each in zip(ROWS, seconds, strict=False)]
    return replace(FINISHED, ranks=tuple(rows))


END, SYNC, FORWARD = (stream(StreamClock.END, 1), stream(StreamClock.SYNC, 5), stream(StreamClock.FORWARD, 9, 50))
CRASHED = Check(id="stuck", code="DD601", outcome=Outcome.CRASHED, reason="KeyError")
UNTOLD = Check(id="missing", code="DD607", outcome=Outcome.INCONCLUSIVE, reason="no node 1")
SLOW = finding("DD610", "straggler", Severity.WARNING, summary="Rank 2 was slow.", ranks=(2,), where=())
NO_RING = tuple(note(summary="No ring.", ranks=(n,), where=()) for n in (0, 1, 2, 5))


@CASES
def a_job_that_hung_at_the_widths_of_terminals():
    drawn = {width: draw_job(report(others=(SLOW,)), width=width) for width in (80, 120)}
    assert all(max(map(len, one.splitlines())) <= width for width, one in drawn.items())
    return drawn


@CASES
def many_rows_do_not_flood_the_screen_and_many_ranks_fit_into_it():
    rows = tuple(row(n) if n % 2 else row(n, "in backward", 70) for n in range(200))
    lines = draw_job(report(rows=tuple(row(n, line=n + 1) for n in range(500))), width=80).splitlines()
    return len(lines), lines[-12:], draw_job(report(rows=rows), width=80)


@pytest.mark.parametrize("width", [40, 80, 120, None])
def test_a_long_path_keeps_its_line_number(width):
    file = "/" + "/".join(["a-long-folder-name"] * 9) + "/train.py"
    verdict = replace(STUCK, where=(place(3, 33, file=file),), evidence=(f"Rank 3 stood at {file}:33 for long.",))
    text = draw_job(report(verdict=verdict, rows=(row(0), replace(row(3), where=place(3, 33, file=file)))), width=width)
    assert text.count(f"{file}:33") == 3


def test_colors_change_nothing_but_colors_and_the_environment_has_no_say(monkeypatch):
    plain, colored = draw_job(report(), width=80), draw_job(report(), width=80, color=True)
    assert "\x1b[1;31m" in colored
    assert without_styles(colored) == plain
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "20", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert draw_job(report(), width=80) == plain


def without_styles(text):
    return re.sub(r"\x1b\[[\d;]*m|\x1b\]8;[^\x1b]*\x1b\\", "", text)


def test_a_terminal_opens_a_line_of_the_job_and_no_line_of_logs_from_elsewhere():
    """What is linked is the whole place: a file below the folder is shown without it, and line 6 is not in line 61."""
    spaced = replace(STUCK, where=(place(3, 6, file="/home/me/proj/my train.py"),))
    job = report(verdict=spaced, rows=ROWS[:1])
    links = re.findall(r"\x1b\]8;id=\d+;([^\x1b]+)\x1b\\(?:\x1b\[[\d;]*m)?([^\x1b]+)", draw_job(job, color=True))
    assert links == [
        ("file:///home/me/proj/train.py", "train.py:61"), ("file:///home/me/proj/my%20train.py", "my train.py:6"),
    ]  # fmt: skip
    for other in (
        replace(job, job=None),
        report(verdict=replace(STUCK, where=(place(3, 6, file="train.py"),)), rows=()),
    ):
        assert "\x1b]8" not in draw_job(other, color=True)
    assert "\x1b]8" not in draw_job(job, width=80)


LINES = ("    def fetch():", "        reply = dist.recv(buffer(9), src=0)  # " + "long " * 20, "        return reply")


def framed(*lines, blamed=33, first=32, file=TRAIN, summary="Rank 3 waits in recv.", **more):
    source = SourceExcerpt(file=file, first=first, lines=lines, blamed=blamed)
    one = report(verdict=replace(STUCK, summary=summary, evidence=()), rows=(), **more)
    return replace(one, data={"source": encode(source)})


@CASES
def a_verdict_has_its_line_below_it_with_a_mark_under_the_call():
    """The call that the verdict names, or the only one, else the first character. No frame without the line."""

    def frame(one, width=None):
        return draw_job(one, width=width).partition("where   ")[2].partition("  to do")[0]

    calls = (
        "x = a.b(1) + c(2)",
        "while(pending): pass",
        "loss.sum().backward()",
        "  if (x):  # f",
        "raise Broken()",
        "",
    )
    drawn = {"80": frame(framed(*LINES), 80), "a pipe": frame(framed(*LINES)), "40": frame(framed(*LINES), 40)}
    drawn |= {call: frame(framed(call, first=33, summary="backward")) for call in calls}
    drawn["a word of the verdict"] = frame(framed("model(x).mean(); optimizer.step()", first=33, summary="in step 11"))
    drawn["wide letters"] = frame(framed('x["\u91cd"] = f(1)', first=33))
    drawn["a tab and an escape"] = frame(framed("\tf(\x1b[31m)", first=33))
    drawn["another line"] = frame(framed(*LINES, blamed=34))
    drawn["another file"] = frame(framed(*LINES, file="/home/me/other.py"))
    drawn["damaged"] = frame(framed(*LINES, first=90))
    return drawn


# The report of check-env.


WARNING = replace(
    small_finding("DD121", "shm", Severity.WARNING, hosts=("node0",)), summary="[/dev/shm] holds 64 MiB only",
    evidence=("64 MiB in all | 60 MiB free",), fix="docker run --shm-size=8g",
)  # fmt: skip
ERROR = replace(
    small_finding("DD205", "master-numeric", hosts=("node0",), ranks=(0, 1)), summary="MASTER_ADDR is a number",
    fix="export MASTER_ADDR=node0",
)  # fmt: skip
NOTE = replace(small_finding("DD126", "omp", Severity.INFO, hosts=("node0",)), summary="one thread")
CHECKS = (
    Check(id="shm", code="DD121", group="limits", outcome=Outcome.FAILED, seen="64 MiB"),
    Check(id="omp", code="DD126", group="limits", outcome=Outcome.FAILED, seen="1"),
    Check(id="master-numeric", code="DD205", group="launch", outcome=Outcome.FAILED, seen="6841231"),
    Check(id="nofile", code="DD122", group="limits", outcome=Outcome.PASSED, seen="soft limit 1048576"),
    Check(id="xid", code="DD311", group="GPUs", outcome=Outcome.SKIPPED, reason="there is no GPU"),
    Check(id="gpu-count", code="DD304", group="GPUs", outcome=Outcome.INCONCLUSIVE, reason="NVML hangs\x07"),
)


def checkup(findings=(ERROR, WARNING, NOTE), checks=CHECKS, hosts=("node0",), **data):
    made = small_report(*findings, checks=checks, hosts=list(hosts), **data)
    return replace(made, command=("ddpdoctor", "check-env"))


def draw_checkup(one, **more):
    return render_text(one, **{"width": None, "color": False, "run_dir": None, "cwd": None, **more})


@CASES
def a_checkup_in_each_form():
    """A command is never broken into lines."""
    fix = "export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7; unset NCCL_IB_DISABLE"
    return {
        "text": draw_checkup(checkup()),
        "text, verbose": draw_checkup(checkup(), verbose=True),
        "nothing wrong": draw_checkup(checkup(findings=(), checks=CHECKS[3:4])),
        "not all told": draw_checkup(checkup(findings=(), checks=(*CHECKS[3:], CHECKS[5], CRASHED)), color=True),
        "two hosts": draw_checkup(checkup(hosts=("node0", "node1"), world_size=16)),
        "a long command at 80": draw_checkup(checkup((replace(ERROR, fix=fix),)), width=80),
        "Markdown": render_markdown(checkup()),
        "JUnit, errors fail": render_junit(checkup(), Severity.ERROR),
        "GitHub": render_github(checkup(), CWD),
        "SARIF": json.loads(render_sarif(checkup(), {"DD121": "shm is small"}, CWD)),
    }


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_a_checkup_is_wider_than_the_terminal(width):
    long = replace(ERROR, summary="much " * 60, evidence=("many " * 60,))
    assert max(map(len, draw_checkup(checkup((long,)), width=width, verbose=True).splitlines())) <= width


def test_json_meets_the_schema_and_is_read_back():
    for one in (checkup(), benches.everything()):
        text = render_json(one)
        jsonschema.validate(json.loads(text), SCHEMA)
        assert render_json(parse_report(text)) == text
    assert parse_report(render_json(checkup())) == checkup()


# Of a job: annotations of GitHub, JUnit and SARIF. Nothing that was collected becomes a command, a link or a place.


REPO = Path("/home/me/repo")
MAIN = Place(rank=1, file="/home/me/repo/train.py", line=61, function="main")
AT_MAIN = replace(
    small_finding("DD601", "stuck", ranks=(1,), hosts=("node3",), where=(MAIN,)), summary="rank 1 is stuck", step=12,
    evidence=("it sleeps",), fix="Look at line 61.", origin=FaultOrigin.SCRIPT,
)  # fmt: skip
SHM = replace(AT_MAIN, code="DD121", kind="shm", severity=Severity.WARNING, ranks=(), hosts=(), where=(), fix="")
CRASH = replace(AT_MAIN, code="DD604", kind="crash")
BARE = small_report()
HOSTILE = "100%\n::set-output name=x::y\r##[error]z [a](https://b) {0} {x} \x1b"


UNREAD = Check(id="shm", code="DD121", outcome=Outcome.INCONCLUSIVE, reason="/dev/shm cannot be read")


def forms(*findings, **changes):
    """The form of SARIF was validated with the schema of the standard, its errata 01."""
    one = replace(BARE, findings=findings, **changes)
    commands, sarif = render_github(one, REPO), json.loads(render_sarif(one, {"DD601": "A rank is stuck"}, REPO))
    assert not re.search(r"[\r\x1b]", commands)
    return {"GitHub": commands, "SARIF": sarif["runs"][0]}


def test_paths_are_relative_to_where_the_command_runs_and_titles_are_those_of_rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = replace(AT_MAIN, where=(replace(MAIN, file=str(tmp_path / "train.py")),))
    later = replace(here, code="DD999", kind="later")
    assert render(replace(BARE, findings=(here,)), "github").startswith("::error file=train.py,line=61,")
    run = json.loads(render(replace(BARE, findings=(here, later)), "sarif"))["runs"][0]
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "train.py"
    rules = run["tool"]["driver"]["rules"]
    assert [one["shortDescription"]["text"] for one in rules] == [read_page("DD601").summary, "later"]
    assert (Path(__file__).parents[3] / rules[0]["helpUri"].partition("/blob/main/")[2]).exists()


def job_report(status, *found, exit_status=0):
    """A job, and what its rules found. Notes are no failures, and the job itself is a case."""
    kinds = {"DD601": "stuck", "DD610": "straggler", "DD612": "exit-abort"}
    return replace(
        BARE, job=JobSummary(world_size=2, nnodes=1, status=status, exit_status=exit_status),
        findings=tuple(replace(SHM, code=code, kind=kinds[code], severity=severity) for code, severity in found),
        checks=tuple(Check(id=kind, code=code, outcome=Outcome.PASSED) for code, kind in kinds.items()),
    )  # fmt: skip


def failures(*asked):
    root = ET.fromstring(render_junit(*asked))
    names = [case.get("name") for case in root.iter("testcase") if case.find("failure") is not None]
    return root.find("testsuite").get("failures"), names


# The report of allreduce-bench.


def draw(one, *, width=None, color=False, run_dir=Path("run")):
    return render_text(one, width=width, color=color, run_dir=run_dir, cwd=None)


@pytest.mark.parametrize(
    ("name", "seen", "width"),
    [
        ("everything-80", benches.everything(), 80), ("everything-120", benches.everything(), 120),
        ("everything-pipe", benches.everything(), None), ("hung-80", benches.hung(), 80),
        ("one-rank-80", benches.one_rank(), 80),
    ],
)  # fmt: skip
def test_the_whole_screen(name, seen, width):
    drawn = draw(seen, width=width)
    assert drawn == (SCREENS / f"{name}.txt").read_text(encoding="utf-8")
    assert max(map(len, drawn.splitlines())) <= (width or 10_000)


THREE = tuple(
    benches.curve(dtype=dtype, assessment=assessment)
    for dtype, assessment in (
        ("float32", Assessment.HEALTHY), ("bfloat16", Assessment.BELOW), ("float16", Assessment.NO_REFERENCE),
    )
)  # fmt: skip
NOISY = replace(benches.SLOW_LINK, severity=Severity.INFO, code="DD406", kind="too-noisy", summary="Noisy.")
BY_SIGINT = Stop(ending=Ending.INTERRUPTED, phase="measure", signal="SIGINT")
LATE = replace(benches.ARRIVALS[3], rank=3)
CHANGES = tuple(replace(benches.change(1024, ratio), below=ratio == 0.8) for ratio in (1.01, 0.5, 1.5, 0.8))


def beside(one, **more):
    """Return the lines of a bench that the results of a healthy one have not."""
    common = set(draw(benches.report()).splitlines()[3:])
    return "\n".join(line for line in draw(one, **more).splitlines() if line not in common)


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (JobStatus.HUNG, "crash", "hung after the crash, 5 ranks, exit status 1"),
        (JobStatus.INTERRUPTED, "crash", "interrupted after the crash, 5 ranks, exit status 1"),
        (JobStatus.FAILED, "crash", "failed, 5 ranks, exit status 1"),
        (JobStatus.HUNG, "stuck", "hung, 5 ranks, exit status 1"),
    ],
)
def test_how_a_job_ended_does_not_hide_that_it_crashed_first(status, kind, words):
    one = report(status, replace(STUCK, kind=kind, summary="Rank 3 raised KeyError."), exit_status=1)
    assert draw_job(one).startswith(f"ddpdoctor: Rank 3 raised KeyError.\n  {words}; report in")


AMBER = "\x1b[1;33mddpdoctor: "
NO_PLATEAU = benches.curve(
    plateau_gb_s=None, assessment=Assessment.NO_REFERENCE, verdict="1.35 GB/s at 8 MiB, no plateau."
)  # fmt: skip
NOISE = benches.curve(assessment=Assessment.NOISY)
TOO_SHORT = replace(benches.LEFT_OUT, reason="the budget of 2 s is too short")


@pytest.mark.parametrize(
    ("seen", "first_line"),
    [
        (benches.report(curves=(NO_PLATEAU,), left_out=(TOO_SHORT,)), "no full bandwidth was measured: {left_out}"),
        (benches.report(curves=(NO_PLATEAU,)), "no full bandwidth was measured: 1.35 GB/s at 8 MiB, no plateau"),
        (benches.report(rows=(), curves=(), left_out=(TOO_SHORT,)), "nothing was measured: {left_out}"),
        (benches.report(curves=(NOISE,)), "no full bandwidth was measured: {noisy}"),
        (benches.report(curves=(benches.curve(assessment=Assessment.NO_REFERENCE),), left_out=(TOO_SHORT,)), ""),
        (benches.report(curves=(benches.latency_curve(),)), ""),
        (benches.report(rows=(), curves=(), pairs=benches.pair_matrix()), ""),
        (benches.one_rank(), ""),
    ],
)  # fmt: skip
def test_a_bench_that_measured_no_full_bandwidth_is_a_warning_and_says_what_was_left_out(seen, first_line):
    """Not one that was not meant to: of latencies, of pairs, of one rank."""
    drawn = draw(seen, color=True)
    left_out = "all_reduce float32, 2 sizes from 4 GiB to 16 GiB: the budget of 2 s is too short"
    said = first_line.format(left_out=left_out, noisy=NOISE.verdict.removesuffix("."))
    assert drawn.startswith(f"{AMBER}{said}\x1b[0m") if said else not drawn.startswith(AMBER)


def paced(communication=0.05, waiting=0.02, loading=0.0, *, asked=True, reason="", **changes):
    """A job whose ranks train so, and what a prediction is refused for."""
    phase = PhaseRow(phase="data loading", critical_ms=loading, median_ms=loading, worst_ms=loading, worst_rank=0)
    budget = Budget(
        phases=(phase,), wall_ms=1.0, steps=9, count=9, communication_share=communication, waiting_share=waiting
    )  # fmt: skip
    refused = [encode(PredictedStep(setting="bucket_cap=1048576", change="buckets", reason=reason))]
    data = {"speed": {"asked": asked, "budget": encode(budget), "predictions": refused if reason else []}}
    return replace(FINISHED, data=data, **changes)


QUEUED = "rank 0 waited for a core for 45% of the time"


@pytest.mark.parametrize(
    ("seen", "first_line", "is_amber"),
    [
        (paced(0.6, 0.16), "communication takes 60% of a step, {most}; scaling efficiency is at most 24%", True),
        (paced(0.15, 0.16), "waiting for slower ranks takes 16% of a step, {most}; {bound} 69%", True),
        (paced(0.3, 0.2, reason=QUEUED), f"the cores are contended: {QUEUED}; {{bound}} 50%", True),
        (paced(0.15, 0.14), "no problem found; communication takes 15% of a step, {most}", False),
        (paced(loading=0.4), "no problem found; data loading takes 40% of a step, {most}", False),
        (paced(reason=QUEUED), f"no problem found, but the cores are contended: {QUEUED}", False),
        (paced(0.04), "no problem found; less than 5% of a step could be won back", False),
        (paced(0.6, asked=False), "no problem found", False),
        (paced(0.6, verdict=SLOW, findings=(SLOW,)), "Rank 2 was slow.", True),
    ],
)  # fmt: skip
def test_the_speed_of_a_job_is_headed_by_what_could_be_won_back(seen, first_line, is_amber):
    """It is a warning where the efficiency is below 70 %. A verdict comes first; and who did not ask is not told."""
    most, bound = "the largest part that could be won back", "scaling efficiency is at most"
    assert draw_job(seen).startswith(f"ddpdoctor: {first_line.format(most=most, bound=bound)}\n")
    assert draw_job(seen, color=True).startswith(AMBER) is is_amber


@CASES
def a_bench_as_markdown_escapes_markup():
    found = (replace(benches.SLOW_LINK, evidence=("a | b <c>",)),)
    return render(replace(benches.everything(), findings=found), "markdown")


def test_a_saved_run_is_drawn_again_in_every_form(tmp_path, capsys):
    (tmp_path / "report.json").write_text(render_json(benches.everything()))
    for form in ("text", "csv", "nccl-tests", "markdown"):
        assert saved.run(saved.Options(run_dir=tmp_path, format=form)) == 0
        expected = (
            draw(benches.everything(), run_dir=tmp_path) if form == "text" else render(benches.everything(), form)
        )
        assert capsys.readouterr() == (expected, "")
    saved.run(saved.Options(run_dir=tmp_path, plot=tmp_path / "a.html"))
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(UserError, match=r"a plot cannot be written as a\.pdf"):
        saved.run(saved.Options(run_dir=tmp_path, plot=tmp_path / "a.pdf"))


@CASES
def a_bench_as_csv():
    """A row is a measurement with all its digits, and what has no value is empty."""
    alone = benches.report(rows=[benches.measurement(1024, ranks=1, wrong=None)], ranks=1)
    return [render_csv(one) for one in (benches.report(), alone, benches.report(rows=()))]


# What reads the output of nccl-tests reads that of --format nccl-tests. Expressions of public tools read its lines.


NUMBER = r"(\d+\.?\d*)"
CSV_CONVERTER = (
    r"^\s*(\d+)\s+(\d+)\s+(float|double|int|half)\s+(sum|prod|max|min|none)\s+(-?\d+)\s+"
    rf"{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(\d+|N/A)\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(\d+|N/A)"
)
OUT_OF_PLACE_BUSBW = r"\s+(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)"
AVERAGE = r"^\s*#\s*Avg bus bandwidth\s*:\s*(\S+)\s*$"
OUT_OF_BOUNDS = r"^\s*#\s*Out of bounds values\s*:\s*(\d+)\s*(OK|FAILED)"


def as_nccl_tests(rows=None, **keywords):
    rows = benches.results(modes=(Mode.THROUGHPUT,)) if rows is None else rows
    return render_nccl_tests(benches.report(rows=rows, **keywords))


def read_busbw_as_superbench_does(text):
    """Columns are found by their place from the end of the head; the largest out-of-place busbw is the result."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if "out-of-place" in line)
    end = next(at for at, line in enumerate(lines) if "Out of bounds values" in line)
    head = lines[start + 1][1:].split()
    busbw = head.index("busbw") - len(head)
    return max(float(line.split()[busbw]) for line in lines[start + 3 : end])


def test_public_parsers_read_every_row():
    text = as_nccl_tests()
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(rows) == len(benches.SIZES)
    assert all(re.match(CSV_CONVERTER, line) for line in rows)
    assert [match[0] for match in re.findall(OUT_OF_PLACE_BUSBW, text)] == [str(size) for size in benches.SIZES]
    assert read_busbw_as_superbench_does(text) == 470.14
    assert float(re.search(AVERAGE, text, re.MULTILINE)[1]) == pytest.approx(185.535)
    assert re.search(OUT_OF_BOUNDS, text, re.MULTILINE).groups() == ("0", "OK")
    assert as_nccl_tests(benches.results()) == text  # throughput is preferred


@CASES
def a_bench_in_the_form_of_nccl_tests():
    """Heads and rows are those of nccl-tests 2.13 to the letter, and so are its names."""
    row = benches.measurement(536870912, in_place=True, p50_us=5202.31, algbw_gb_s=103.204, busbw_gb_s=193.504, wrong=0)
    settings = BenchSettings(backend="nccl", iterations=20, warmup=5, factor=4)
    whole = {
        "out of place": as_nccl_tests(settings=settings),
        "both": as_nccl_tests((replace(row, in_place=False, p50_us=10314.2), row)),
    }
    seen = {
        "in place": benches.results((1024,), modes=(Mode.THROUGHPUT,), in_place=True),
        "latency alone": benches.results((1024,), modes=(Mode.LATENCY,)),
        "wrong": [benches.measurement(1024, wrong=3), benches.measurement(4096)],
        "unchecked": [benches.measurement(1024, wrong=None)],
        **{one.value: benches.results((1024,), collective=one) for one in Collective},
        **{name: [benches.measurement(1024, dtype=name)] for name in ("float64", "float16", "bfloat16", "int32")},
    }
    one_rank = as_nccl_tests(benches.results((1024,), modes=(Mode.THROUGHPUT,), ranks=1), ranks=1)
    texts = {name: as_nccl_tests(rows) for name, rows in seen.items()} | {"one rank": one_rank}
    return whole | {name: cut(text, whole["out of place"]) for name, text in texts.items()}


def cut(text, other):
    """Leave out lines that another text has."""
    return "\n".join(line for line in text.splitlines() if line not in other.splitlines())


# Plots of allreduce-bench: what is drawn, and what cannot be.


def plotted(**keywords):
    found = measured.list_plotted(measured.read_bandwidth(benches.report(**keywords)))
    return [f"{one.label}, {one.mode.value}, {one.busbw_gb_s[-1]:.2f}" + ", baseline" * one.baseline for one in found]


def test_curves_of_one_reference_have_one_line_of_it():
    two = benches.report(curves=(benches.curve(), benches.curve(dtype="bfloat16")))
    assert measured.list_references(measured.read_bandwidth(two)) == (benches.H100,)


@pytest.mark.full
def test_whatever_was_measured_can_be_drawn_and_an_svg_is_the_same_every_time():
    one_size = benches.report(rows=benches.results((1024,)))
    many = benches.report(rows=(), curves=(), pairs=benches.pair_matrix(40, per_host=8))
    for one in (benches.one_rank(), benches.report(rows=(), curves=()), many, benches.hung()):
        assert render_plot(one, ".png").startswith(b"\x89PNG")
    svg = render_plot(one_size, ".svg")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert svg == render_plot(one_size, ".svg")


class Links(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self):
        super().__init__()
        self.loaded, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        loading = {name: value for name, value in attrs if name in {"src", "href", "xlink:href"}}
        self.loaded += [value for value in loading.values() if not value.startswith(("#", "data:"))]

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_needs_nothing_else_has_the_numbers_as_a_table_and_what_was_collected_is_no_markup():
    seen = benches.everything()
    text = render_plot(replace(seen, data={**seen.data, "notes": ["<script>alert(1)</script>"]}), ".html").decode()
    page = Links()
    page.feed(text)
    assert page.loaded == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert "svg" in page.tags
    assert page.tags.count("script") == 1
    assert "<li>&lt;script&gt;" in text
    results, comparison, pairs, hosts = len(benches.SIZES) + 2, 2, 5, 4
    assert page.tags.count("tr") == results + comparison + pairs + hosts + len(seen.checks) + 1
    assert {"470.14", "Test the cable and the switch port between node0 and node1."} <= set(page.text)


def test_matplotlib_is_loaded_to_draw_only_and_without_it_the_error_says_how_to_install_it():
    code = (
        "import sys; from pathlib import Path\n"
        "from ddpdoctor.report.bandwidth import measured\n"
        "from ddpdoctor.report.bandwidth.figure import check_plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "sys.path = [place for place in sys.path if 'site-packages' not in place]\n"
        "check_plot(Path('a.png'))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert "UserError: plots need matplotlib, which is not installed here" in ran.stderr


# Tables, matrices and the small curve.


def drawn(*blocks, width=80):
    page = TextPage(width=width, cwd=None)
    add_blocks(page, blocks)
    return "\n".join(line.plain for line in page.lines)


def draw_matrix(matrix, width=80):
    return drawn(*measured.matrix_section(matrix)[1:], width=width)


def column(name, *cells, weight=1, group="", unit=""):
    return Column(group=group, name=name, unit=unit, cells=cells, weight=weight)


def test_the_lightest_column_goes_first_and_one_always_stays():
    columns = tuple(column(name, "12345678", weight=weight) for name, weight in (("a", 3), ("b", 1), ("c", 2)))
    shown = ["".join(one.name for one in fit_columns(columns, width)) for width in (None, 28, 27, 17, 1)]
    assert shown == ["abc", "abc", "ac", "a", "a"]


def curves(*those, reference=None, width=80):
    lines = [ChartLine(name=f"curve {number}", points=points) for number, points in enumerate(those)]
    drawn = draw_chart(Series(title="busbw in GB/s over size", lines=lines, reference=reference), width)
    assert not drawn or sum("|" in line for line in drawn) == CHART_ROWS
    return "\n".join(drawn)


test_rows = table(
    "texts",
    "ddpdoctor.model.bandwidth ddpdoctor.model.consistency ddpdoctor.model.findings",
    "ddpdoctor.report.bandwidth.measured ddpdoctor.report.text",
    globals(),
)
FORMATS = (
    measured.format_us, measured.format_gb_s, measured.format_share, format_about, format_memory, format_age,
    format_rate, format_time,
)  # fmt: skip
test_words = words(
    __name__,
    **{one.__name__: lambda text, one=one: one(None if text == "none" else float(text)) for one in FORMATS},
    spread_apart=lambda places: spread_apart(places, 0.1), choose_ticks=choose_ticks, format_hosts=format_hosts,
    check_plot=lambda name: check_plot(Path(name)),
    draw_a_damaged_bench=lambda damage: draw(replace(benches.report(), data={**benches.report().data, **damage})),
    draw_a_damaged_job=lambda damage: draw_job(replace(FINISHED, data=damage)),
    a_report_of_another_verb_as=lambda form: render(replace(benches.report(), data={}), form),
)  # fmt: skip
