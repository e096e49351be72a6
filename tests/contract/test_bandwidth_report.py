"""The report of allreduce-bench in each of its forms. The screens are in tests/data/allreduce-bench."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.bandwidth import Assessment, Ending, Stop
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, JobStatus, Outcome, Severity
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.report.text.report import render_text
from tests import benches, forking

SCREENS = Path(__file__).parents[1] / "data" / "allreduce-bench"
SCHEMA = json.loads((files("ddpdoctor.report") / "schema.json").read_text(encoding="utf-8"))


def draw(report, *, width=None, color=False, run_dir=Path("run")):
    return render_text(report, width=width, color=color, run_dir=run_dir, cwd=None)


@pytest.mark.parametrize(
    ("name", "report", "width"),
    [
        ("everything-80", benches.everything(), 80),
        ("everything-120", benches.everything(), 120),
        ("everything-pipe", benches.everything(), None),
        ("hung-80", benches.hung(), 80),
        ("one-rank-80", benches.one_rank(), 80),
    ],
)
def test_the_whole_screen(name, report, width):
    assert draw(report, width=width) == (SCREENS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(map(len, draw(benches.everything(), width=width).splitlines())) <= width


def test_a_report_from_disk_is_drawn_as_the_one_in_memory():
    saved = parse_report(render_json(benches.everything()))
    jsonschema.validate(json.loads(render_json(benches.everything())), SCHEMA)

    assert draw(saved, width=80) == draw(benches.everything(), width=80)
    assert [render(saved, form) for form in ("csv", "nccl-tests", "markdown")] == [
        render(benches.everything(), form) for form in ("csv", "nccl-tests", "markdown")
    ]


def test_without_color_there_is_no_escape_and_with_it_the_text_is_the_same():
    plain, colored = draw(benches.everything(), width=80), draw(benches.everything(), width=80, color=True)

    assert "\x1b" not in plain
    assert "\x1b" in colored
    assert without_colors(colored) == plain


def without_colors(text):
    from rich.text import Text

    return Text.from_ansi(text).plain


def test_what_was_collected_is_never_markup_nor_a_control_character():
    report = benches.report(notes=("[bold]\x1b[31m",))
    assert "[bold]\\x1b[31m" in draw(report, width=80)


def test_the_curve_is_a_chart_on_a_terminal_and_a_line_elsewhere():
    assert "busbw in GB/s over size\no all_reduce float32 sum\n" in draw(benches.report(), width=80)
    line = "busbw in GB/s over size, 1 KiB to 1 GiB\nall_reduce float32 sum  _.:-=**####  0.0896 to 470\n"
    assert line in draw(benches.report())
    assert line in draw(benches.report(), width=25)


THREE = tuple(
    benches.curve(dtype=dtype, assessment=assessment)
    for dtype, assessment in (
        ("float32", Assessment.HEALTHY),
        ("bfloat16", Assessment.BELOW),
        ("float16", Assessment.NO_REFERENCE),
    )
)
FIRST = {
    "no problem found: all_reduce float32 sum: 466 GB/s at the plateau: healthy, 101 % of the reference (8 H100 over "
    "NVLink4, NVLS: 460-480 GB/s)": benches.report(),
    "The link between ranks 2 and 3 gives 1.25 GB/s, the others 11.8 GB/s": benches.everything(),
    "Rank 3 is stopped (state T); the others wait for it in all_reduce": benches.hung(),
    "no problem found; of 3 curves 1 below the reference, 1 healthy, 1 without a reference": benches.report(
        curves=THREE
    ),
    "no problem found; all 2 curves healthy": benches.report(curves=(benches.curve(), benches.curve(dtype="bfloat16"))),
    "nothing was measured": benches.report(rows=(), curves=()),
}


@pytest.mark.parametrize(("first", "report"), FIRST.items())
def test_the_first_line_has_the_verdict(first, report):
    assert draw(report).splitlines()[0] == f"ddpdoctor: {first}"


def test_the_second_line_says_how_it_ended_and_what_was_found():
    assert draw(benches.hung()).splitlines()[1] == "  8 ranks, hung, results partial, 1 error; report in run"
    assert draw(benches.report()).splitlines()[1] == "  8 ranks; report in run"


def test_a_note_is_shown_and_is_no_problem():
    note = replace(benches.SLOW_LINK, severity=Severity.INFO, code="DD406", kind="too-noisy", summary="Noisy.")
    text = draw(benches.report(findings=(note,)))

    assert "note  DD406 too-noisy, ranks 2, 3\n  note    Noisy." in text
    assert text.startswith("ddpdoctor: no problem found: all_reduce float32 sum: 466 GB/s")
    assert "\n  8 ranks, 1 note; report in run\n" in text


def test_an_interrupted_run_says_by_what_and_that_it_is_partial():
    stop = Stop(ending=Ending.INTERRUPTED, phase="measure", signal="SIGINT")
    text = draw(benches.report(rows=benches.results(benches.SIZES[:2]), status=JobStatus.INTERRUPTED, stop=stop))

    assert (
        "interrupted by SIGINT in phase measure: the results are partial; the results above were measured before"
        in text
    )
    assert text.startswith("ddpdoctor: no cause found")
    assert "\n  8 ranks, interrupted, results partial; report in run\n" in text


def test_what_could_not_be_judged_never_reads_like_passed():
    check = Check(id="slow-rank", code="DD402", outcome=Outcome.INCONCLUSIVE, reason="2 ranks cannot be distinguished")
    text = draw(replace(benches.report(), checks=(check,)))

    assert "could not tell  DD402 slow-rank: 2 ranks cannot be distinguished" in text


def test_reasons_stand_as_an_explanation_only_beside_a_low_number():
    assert "what could explain it\n  - NCCL_P2P_DISABLE=1" in draw(
        benches.report(curves=(benches.curve(assessment=Assessment.BELOW),), reasons=(benches.REASON,))
    )
    assert "seen on the machines\n  - NCCL_P2P_DISABLE=1" in draw(benches.report(reasons=(benches.REASON,)))


def test_a_rank_that_comes_late_is_named_only_where_it_matters():
    late = replace(benches.ARRIVALS[3], rank=3)

    def named(arrival):
        return "is last in" in draw(benches.report(arrivals=(arrival,)))

    assert named(late)
    assert not named(replace(late, share=0.4))
    assert not named(replace(late, late_us=5.0))


def test_markdown_starts_with_the_verdict_and_escapes_markup():
    report = replace(benches.everything(), findings=(replace(benches.SLOW_LINK, evidence=("a | b <c>",)),))
    text = render(report, "markdown")

    assert text.startswith("## ddpdoctor allreduce-bench: The link between ranks 2 and 3 gives 1.25 GB/s")
    assert "### warning: DD403 slow-link, ranks 2, 3 on node\\[0, 1\\]" in text
    assert "- a \\| b \\<c\\>" in text
    assert "| 1 GiB |" in text


def test_a_report_of_another_verb_cannot_be_drawn_in_these_columns():
    for form, said in (("csv", "no table"), ("nccl-tests", "not a report of `ddpdoctor allreduce-bench`")):
        with pytest.raises(UserError, match=said):
            render(replace(benches.report(), data={}), form)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"results": [{"collective": "all_reduce"}]}, r"data\.results\[0\]\.dtype: it is missing"),
        ({"members": None}, r"data\.members: a list was expected, and it is nothing"),
        ({"curves": [{"collective": "gossip"}]}, r"data\.curves\[0\]\.collective: one of all_reduce, "),
        ({"pairs": [{"ranks": [1], "hosts": ["a", "b"]}]}, r"data\.pairs\[0\]\.ranks: 2 values were expected"),
    ],
)
def test_a_damaged_file_is_a_clear_error(damage, said):
    report = benches.report()
    with pytest.raises(UserError, match=said):
        draw(replace(report, data={**report.data, **damage}))


def run_report(*arguments):
    return forking.run("-m", "ddpdoctor", "report", *arguments)


@pytest.mark.parametrize("form", ["text", "csv", "nccl-tests", "markdown"])
def test_a_saved_run_is_drawn_again_in_every_form(tmp_path, form):
    (tmp_path / "report.json").write_text(render_json(benches.everything()))
    ran = run_report(tmp_path, "--format", form, "--plot", tmp_path / "a.html")

    expected = draw(benches.everything(), run_dir=tmp_path) if form == "text" else render(benches.everything(), form)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, expected, "")
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_a_plot_that_cannot_be_drawn_is_an_error_before_anything_is_shown(tmp_path):
    (tmp_path / "report.json").write_text(render_json(benches.everything()))
    ran = run_report(tmp_path, "--plot", tmp_path / "a.pdf")

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "a plot cannot be written as a.pdf" in ran.stderr


def test_what_could_not_be_determined_does_not_read_as_no_problem():
    untold = Check(id="slow-node", outcome=Outcome.INCONCLUSIVE, reason="it takes two hosts")
    healthy = benches.report(verdict=None, findings=())

    assert "no problem found" in draw(healthy).splitlines()[0]
    assert "could not tell about slow-node" in draw(replace(healthy, checks=(untold,))).splitlines()[0]
