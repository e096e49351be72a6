"""The report of check-env in each of its forms."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from ddpdoctor.model.findings import Check, Confidence, Finding, Outcome, Report, Severity
from ddpdoctor.report.formats import parse_report, render_json, render_junit
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.names import format_hosts
from ddpdoctor.report.text.report import render_text

SCHEMA = json.loads((Path(__file__).parents[2] / "ddpdoctor" / "report" / "schema.json").read_text())
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


def draw(one, *, width=None, verbose=False):
    return render_text(one, width=width, color=False, verbose=verbose, run_dir=None, cwd=None)


def test_the_worst_problem_is_the_first_line_and_the_last_block():
    text = draw(report())

    assert text.index("could not tell  DD304") < text.index("warning  DD121 shm") < text.index("error  DD205")
    assert text.splitlines()[:2] == [
        "ddpdoctor: MASTER_ADDR is a number",
        "  1 error, 1 warning, 1 note; checks: 1 passed, 1 skipped, 1 could not tell (-v shows each)",
    ]
    assert "DD126" not in text
    assert "DD122" not in text


def test_what_was_collected_is_never_markup_nor_a_control_character():
    text = draw(report())

    assert "[/dev/shm] holds" in text
    assert "\x07" not in text


def test_verbose_shows_every_check_in_its_group_with_what_it_saw():
    text = draw(report(), verbose=True)

    assert "\nlimits\n" in f"\n{text}"
    assert "  passed          DD122  nofile          soft limit 1048576" in text
    assert "  skipped         DD311  xid             there is no GPU" in text
    assert "  could not tell  DD304  gpu-count       NVML hangs" in text
    assert "note  DD126 omp" in text
    assert "  note            DD126  omp" in text
    assert "  warning         DD121  shm" in text


def test_nothing_wrong_takes_two_lines():
    assert draw(report(findings=(), checks=CHECKS[3:4])) == (
        "ddpdoctor: no problem found\n  checks: 1 passed, 0 skipped (-v shows each)\n"
    )


def test_hosts_are_named_where_there_are_several():
    text = draw(report(hosts=("node0", "node1"), world_size=16))

    assert "warning  DD121 shm, on node0" in text
    assert "error  DD205 master-numeric, ranks 0, 1 on node0" in text
    assert "\n  2 hosts, 16 ranks, 1 error" in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    long = replace(ERROR, summary="much " * 60, evidence=("many " * 60,))
    assert max(map(len, draw(report((long,)), width=width, verbose=True).splitlines())) <= width


def test_a_command_is_never_broken_into_lines():
    fix = "export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7; unset NCCL_IB_DISABLE"
    assert f"  to do   {fix}\n" in draw(report((replace(ERROR, fix=fix),)), width=80)


def test_json_meets_the_schema_and_is_read_back():
    text = render_json(report())

    jsonschema.validate(json.loads(text), SCHEMA)
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
