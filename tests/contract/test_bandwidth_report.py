"""The report of allreduce-bench in each of its forms. The screens are in tests/data/allreduce-bench."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.model.bandwidth import Assessment, Ending, Stop
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, Confidence, Finding, JobStatus, Outcome, Report, Severity
from ddpdoctor.report.formats import parse_report, render_json, render_junit
from ddpdoctor.report.lines import format_hosts
from ddpdoctor.report.markdown import render_markdown
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


# The report of check-env in each of its forms.


SCHEMA_CHECKUP_REPORT = json.loads((Path(__file__).parents[2] / "ddpdoctor" / "report" / "schema.json").read_text())
WARNING = Finding(
    code="DD121", kind="shm", severity=Severity.WARNING, confidence=Confidence.HIGH, hosts=("node0",),
    summary="[/dev/shm] holds 64 MiB only", evidence=("64 MiB in all | 60 MiB free",), fix="docker run --shm-size=8g",
)  # fmt: skip
ERROR = Finding(
    code="DD205", kind="master-numeric", severity=Severity.ERROR, confidence=Confidence.HIGH, hosts=("node0",),
    ranks=(0, 1), summary="MASTER_ADDR is a number", fix="export MASTER_ADDR=node0",
)  # fmt: skip
NOTE = Finding(
    code="DD126", kind="omp", severity=Severity.INFO, confidence=Confidence.HIGH, hosts=("node0",), summary="one thread"
)
CHECKS = (
    Check(id="shm", code="DD121", group="limits", outcome=Outcome.FAILED, seen="64 MiB"),
    Check(id="omp", code="DD126", group="limits", outcome=Outcome.FAILED, seen="1"),
    Check(id="master-numeric", code="DD205", group="launch", outcome=Outcome.FAILED, seen="6841231"),
    Check(id="nofile", code="DD122", group="limits", outcome=Outcome.PASSED, seen="soft limit 1048576"),
    Check(id="xid", code="DD311", group="GPUs", outcome=Outcome.SKIPPED, reason="there is no GPU"),
    Check(id="gpu-count", code="DD304", group="GPUs", outcome=Outcome.INCONCLUSIVE, reason="NVML hangs\x07"),
)


def report(findings=(ERROR, WARNING, NOTE), checks=CHECKS, hosts=("node0",), **data):
    return Report(
        command=("ddpdoctor", "check-env"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:07.500+00:00", job=None, verdict=findings[0] if findings else None,
        findings=tuple(findings), checks=tuple(checks), ranks=(), data={"hosts": list(hosts), **data},
        tool_version="1.2.3",
    )  # fmt: skip


def draw_checkup(one, *, width=None, verbose=False):
    return render_text(one, width=width, color=False, verbose=verbose, run_dir=None, cwd=None)


def test_the_worst_problem_is_the_first_line_and_the_last_block():
    text = draw_checkup(report())

    assert text.index("could not tell  DD304") < text.index("warning  DD121 shm") < text.index("error  DD205")
    assert text.splitlines()[:2] == [
        "ddpdoctor: MASTER_ADDR is a number",
        "  1 error, 1 warning, 1 note; checks: 1 passed, 1 skipped, 1 could not tell (-v shows each)",
    ]
    assert "DD126" not in text
    assert "DD122" not in text


def test_no_markup_of_a_machine_is_shown():
    text = draw_checkup(report())

    assert "[/dev/shm] holds" in text
    assert "\x07" not in text


def test_verbose_shows_every_check_in_its_group_with_what_it_saw():
    text = draw_checkup(report(), verbose=True)

    assert "\nlimits\n" in f"\n{text}"
    assert "  passed          DD122  nofile          soft limit 1048576" in text
    assert "  skipped         DD311  xid             there is no GPU" in text
    assert "  could not tell  DD304  gpu-count       NVML hangs" in text
    assert "note  DD126 omp" in text
    assert "  note            DD126  omp" in text
    assert "  warning         DD121  shm" in text


def test_nothing_wrong_takes_two_lines():
    assert draw_checkup(report(findings=(), checks=CHECKS[3:4])) == (
        "ddpdoctor: no problem found\n  checks: 1 passed, 0 skipped (-v shows each)\n"
    )


def test_hosts_are_named_where_there_are_several():
    text = draw_checkup(report(hosts=("node0", "node1"), world_size=16))

    assert "warning  DD121 shm, on node0" in text
    assert "error  DD205 master-numeric, ranks 0, 1 on node0" in text
    assert "\n  2 hosts, 16 ranks, 1 error" in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_a_checkup_is_wider_than_the_terminal(width):
    long = replace(ERROR, summary="much " * 60, evidence=("many " * 60,))
    assert max(map(len, draw_checkup(report((long,)), width=width, verbose=True).splitlines())) <= width


def test_a_command_is_never_broken_into_lines():
    fix = "export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7; unset NCCL_IB_DISABLE"
    assert f"  to do   {fix}\n" in draw_checkup(report((replace(ERROR, fix=fix),)), width=80)


def test_json_meets_the_schema_and_is_read_back():
    text = render_json(report())

    jsonschema.validate(json.loads(text), SCHEMA_CHECKUP_REPORT)
    assert parse_report(text) == report()


def test_junit_fails_at_the_level_that_was_asked_for():
    suite = ET.fromstring(render_junit(report(), Severity.ERROR)).find("testsuite")
    cases = {case.get("name"): case for case in suite}

    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "6", "failures": "1", "errors": "1", "skipped": "1", "time": "2.500",
    }  # fmt: skip
    failure = cases["DD205 master-numeric"].find("failure")
    assert failure.get("message") == "MASTER_ADDR is a number"
    assert "to do: export MASTER_ADDR=node0" in failure.text
    assert "64 MiB only" in cases["DD121 shm"].find("system-out").text
    assert cases["DD311 xid"].find("skipped").get("message") == "there is no GPU"
    assert cases["DD304 gpu-count"].find("error").get("message") == "NVML hangs\\x07"
    assert cases["DD122 nofile"].get("classname") == "ddpdoctor.limits"


def test_junit_with_warnings_as_failures_and_with_none():
    def failures(level):
        return ET.fromstring(render_junit(report(), level)).find("testsuite").get("failures")

    assert [failures(level) for level in (Severity.WARNING, Severity.INFO, None)] == ["2", "3", "0"]


def test_markdown_escapes_what_would_be_markup():
    text = render_markdown(report())

    assert text.startswith("## ddpdoctor: MASTER\\_ADDR is a number\n\n### error: DD205 master-numeric")
    assert "(confidence high)\n" in text
    assert "\\[/dev/shm\\] holds 64 MiB only" in text
    assert "64 MiB in all \\| 60 MiB free" in text
    assert "    docker run --shm-size=8g" in text
    assert "| passed | DD122 | `nofile` | soft limit 1048576 |" in text


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ((), ""),
        (("login",), "login"),
        (("node1", "node2", "node3", "node7", "login"), "node[1-3, 7], login"),
        (("node007", "node008"), "node007, node008"),
        (("10.0.0.1", "10.0.0.2"), "10.0.0.[1, 2]"),
        (tuple(f"{letter}x" for letter in "abcdefghij"), "ax, bx, cx, dx, ex, fx, gx, hx and 2 more"),
    ],
)
def test_hosts_are_drawn_together(hosts, text):
    assert format_hosts(hosts) == text
