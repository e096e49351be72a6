"""The text for people: its order, its widths, and that nothing collected is ever markup."""

import copy
import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.consistency import Consistency, Difference, Stream, StreamClock, TensorRow, TensorSplit, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    Finding,
    JobStatus,
    JobSummary,
    Outcome,
    Place,
    RankRow,
    Report,
    Severity,
)
from ddpdoctor.report.formats import parse_report, render_json, render_junit, report_to_dict
from ddpdoctor.report.text.report import render_text

CWD = Path("/home/me/proj")
RUN_DIR = CWD / "ddpdoctor-report" / "now-train"
TRAIN = "/home/me/proj/train.py"


def place(rank, line, function="main", file=TRAIN):
    return Place(rank=rank, file=file, line=line, function=function)


def finding(code="DD601", kind="stuck", severity=Severity.ERROR, **more):
    base = {"summary": "Rank 3 waits in fetch.", "ranks": (3,), "where": (place(3, 33, "fetch"),)}
    more = {**base, "confidence": Confidence.HIGH, **more}
    return Finding(code=code, kind=kind, severity=severity, **more)


STUCK = finding(
    evidence=(
        "Rank 3 stood at /home/me/proj/train.py:33 in two looks, 0.5 s apart, and used no CPU time in between them.",
        "ranks 0-2, 4 wait in all_reduce, see [/dev/shm] [bold]loud[/bold] [/] :smile: \x1b[31m",
    ),
    fix="Let fetch return on every rank, or give the wait in it a time limit, so that it raises instead.",
    step=12,
    tensor="layers.0.weight",
)


def row(rank, state="in all_reduce", line=61, **more):
    return RankRow(rank=rank, local_rank=rank, host="h", pid=rank + 10, state=state, where=place(rank, line), **more)


ROWS = (row(0), row(1), row(2), row(3, "in fetch", 33), row(4))


def report(status=JobStatus.HUNG, verdict=STUCK, others=(), rows=ROWS, exit_status=124, checks=()):
    return Report(
        command=("ddpdoctor",),
        started_at="",
        ended_at="",
        job=JobSummary(world_size=len(rows), nnodes=1, status=status, exit_status=exit_status),
        verdict=verdict,
        findings=(*([verdict] if verdict else []), *others),
        checks=checks,
        ranks=rows,
    )


def render(one, *, width=None, color=False):
    return render_text(one, width=width, color=color, run_dir=RUN_DIR, cwd=CWD)


FINISHED = report(JobStatus.FINISHED, verdict=None, rows=ROWS[:2], exit_status=0)


STATUS = "  finished, 2 ranks; report in ddpdoctor-report/now-train"


def test_a_job_that_ended_well_takes_two_lines():
    assert render(FINISHED).splitlines() == ["ddpdoctor: no problem found", STATUS]


def stream(clock=StreamClock.STEP, compared=17, last=800, *, tensors=160, ranks=(0, 1, 2, 3), model=1, differences=()):
    return Stream(
        clock=clock,
        group="0",
        model=model,
        optimizer=1,
        ranks=ranks,
        compared=compared,
        last_number=last if compared else None,
        tensors=tensors,
        differences=differences,
    )


def with_streams(*streams, **changes):
    data = {"consistency": encode(Consistency(check_every=50, streams=streams))}
    return replace(FINISHED, data=data, **changes)


DRIFT = Difference(what=What.PARAMETER, number=50, last_equal=32, splits=(), differing=1, of=4)
EQUAL = "  replicas equal: 17 checks up to optimizer step 800 (160 tensors, 4 ranks)"


def test_a_distance_that_was_chosen_is_said_with_the_number_of_checks():
    text = render(with_streams(replace(stream(), every=512)))
    assert f"{EQUAL}; every 512 steps, to take less than 1 % of the time" in text.splitlines()
    assert EQUAL in render(with_streams(replace(stream(), every=64))).splitlines()


def test_ranks_without_cores_are_said_where_it_is_long():
    rows = tuple(replace(row, starved_s=seconds) for row, seconds in zip(ROWS[:2], (84.0, 9.9), strict=True))
    assert "  cores are short: without a core, rank 0 made no progress for up to 84 s; this time does not count as" in (
        render(replace(FINISHED, ranks=rows))
    )
    assert "cores" not in render(replace(FINISHED, ranks=(rows[1],)))


def test_replicas_that_stayed_equal_are_reported_in_one_line():
    text = render(with_streams(stream(), stream(StreamClock.SYNC, 3, 60)))
    assert text.splitlines() == ["ddpdoctor: no problem found", STATUS, EQUAL]
    assert render(with_streams(stream()), width=80).splitlines()[-1] == EQUAL
    assert "\x1b" not in render(with_streams(stream()), width=120, color=True)


@pytest.mark.parametrize(
    ("streams", "reported"),
    [
        ((stream(compared=1, last=1, tensors=1, ranks=(0, 1)),), "1 check up to optimizer step 1 (1 tensor, 2 ranks)"),
        (
            (stream(StreamClock.FORWARD, 9, 50), stream(StreamClock.END, 1)),
            "9 checks up to backward 50 (160 tensors, 4 ranks)",
        ),
        ((stream(StreamClock.END, 1), stream(StreamClock.SYNC, 5)), "1 check at the end (160 tensors, 4 ranks)"),
        ((stream(), stream(model=2)), "34 checks up to optimizer step 800 (2 models, 320 tensors, 4 ranks)"),
    ],
)
def test_what_was_compared_is_counted_by_the_best_clock(streams, reported):
    assert render(with_streams(*streams)).splitlines()[-1] == f"  replicas equal: {reported}"


def test_differences_that_no_rule_holds_for_wrong_do_not_read_like_equal():
    last = render(with_streams(stream(differences=(DRIFT,)))).splitlines()[-1]
    assert last.endswith("(160 tensors, 4 ranks); parameters differ, but no rule reports this as wrong")
    assert "equal" not in last


def test_nothing_is_said_of_replicas_that_were_not_compared_or_that_findings_tell_of():
    assert len(render(with_streams()).splitlines()) == 2
    assert len(render(with_streams(stream(compared=0))).splitlines()) == 2
    drift = finding("DD501", "param-drift", Severity.ERROR, summary="parameters differ")
    assert "replicas" not in render(with_streams(stream(differences=(DRIFT,)), verdict=drift, findings=(drift,)))
    assert "replicas" not in render(replace(with_streams(stream()), job=report().job))


def test_a_note_takes_nothing_from_replicas_that_are_equal():
    note = finding("DD507", "same-random", Severity.INFO, summary="ranks 0 and 1 have the same random state")
    assert EQUAL in render(with_streams(stream(), findings=(note,))).splitlines()


def test_damaged_facts_of_replicas_are_reported():
    with pytest.raises(UserError, match="replicas in the report cannot be read"):
        render(replace(FINISHED, data={"consistency": {"check_every": "x"}}))


def test_a_note_costs_one_line_and_is_counted():
    note = finding("DD901", "not-recorded", Severity.INFO, summary="Rank 3 had no ring.", fix="Free some space.")
    lines = render(replace(FINISHED, findings=(note,))).splitlines()
    assert lines == [
        "ddpdoctor: no problem found",
        "  finished, 2 ranks, 1 note; report in ddpdoctor-report/now-train",
        "",
        "  info    DD901 not-recorded, rank 3: Rank 3 had no ring.",
    ]


def test_a_job_that_failed_without_known_cause_never_reads_like_one_that_ended_well():
    text = render(report(JobStatus.FAILED, verdict=None, exit_status=3))
    assert text.startswith("ddpdoctor: no cause found\n  failed, 5 ranks, exit status 3; report in ")
    assert "ranks 0-2, 4  in all_reduce" in text


@pytest.mark.parametrize(
    ("exit_status", "words"),
    [(130, "Ctrl-C (SIGINT) interrupted the job"), (1, "the job was interrupted"), (None, "the job was interrupted")],
)
def test_an_interruption_is_told_from_a_failure(exit_status: int | None, words: str) -> None:
    text = render(report(JobStatus.INTERRUPTED, verdict=None, exit_status=exit_status))
    assert text.startswith(f"ddpdoctor: {words}, and no fault was found before\n  interrupted, 5 ranks")


@pytest.mark.parametrize(
    ("exit_status", "words"), [(1, "no rank ran: the launcher ended with status 1"), (0, "no problem found")]
)
def test_a_launcher_that_ran_no_rank_and_failed_is_no_healthy_job(exit_status, words):
    assert (
        render(report(JobStatus.NOT_RUN, verdict=None, exit_status=exit_status)).splitlines()[0]
        == f"ddpdoctor: {words}"
    )


@pytest.mark.parametrize(
    ("exit_status", "kind", "words"),
    [
        (1, "exit-abort", "Rank 1 died."),
        (0, "exit-abort", "no problem found"),
        (3, "not-recorded", "the ranks finished, but the launcher ended with status 3"),
    ],
)
def test_what_explains_a_bad_status_of_a_job_that_finished_is_said_first(exit_status, kind, words):
    note = finding("DD612", kind, Severity.INFO, summary="Rank 1 died.", fix="")
    ended = replace(FINISHED, job=replace(FINISHED.job, exit_status=exit_status), findings=(note,))
    assert render(ended).splitlines()[0] == f"ddpdoctor: {words}"


def test_a_crashed_check_is_said_even_of_a_job_that_ended_well():
    crashed = Check(id="stuck", code="DD601", outcome=Outcome.CRASHED, reason="KeyError")
    shown = render(replace(FINISHED, checks=(crashed,)))
    assert shown.splitlines()[0] == "ddpdoctor: no problem found, but 1 check crashed"


def test_could_not_tell_does_not_read_like_passed():
    checks = (
        Check(id="killed", code="DD605", outcome=Outcome.PASSED),
        Check(id="missing", code="DD607", outcome=Outcome.INCONCLUSIVE, reason="no node 1"),
    )
    text = render(report(checks=checks))
    assert "  DD607 missing: could not tell: no node 1\n" in text
    assert "DD605" not in text


@pytest.mark.parametrize("width", [80, 120, None])
def test_the_verdict_comes_first_in_one_sentence_and_last_with_its_evidence(width):
    other = finding("DD610", "straggler", Severity.WARNING, summary="Rank 2 was slow.", ranks=(2,), where=())
    text = render(report(others=(other,)), width=width)
    marks = [
        "ddpdoctor: Rank 3 waits in fetch.\n  hung, 5 ranks, exit status 124; report in ",
        "ranks 0-2, 4",
        "> rank 3",
        "DD610",
        "DD601 stuck, rank 3 (confidence high)",
    ]
    marks += ["where ", "train.py:33 in fetch\n", "layers.0.weight", "seen ", "to do ", "raises instead."]
    marks += ["more "]
    spots = []
    for mark in marks:
        spots.append(text.index(mark, spots[-1] if spots else 0))
    assert text.rstrip().endswith("ddpdoctor explain DD601")
    assert text.count(STUCK.summary) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(width):
    lines = render(report(), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width - 25


def test_a_pipe_gets_each_sentence_on_one_line():
    lines = render(report()).splitlines()
    assert any(line.endswith("and used no CPU time in between them.") for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120, None])
def test_a_long_path_keeps_its_line_number(width):
    file = "/" + "/".join(["a-long-folder name".replace(" ", "-")] * 9) + "/train.py"
    verdict = replace(STUCK, where=(place(3, 33, file=file),), evidence=(f"Rank 3 stood at {file}:33 for long.",))
    rows = (row(0), replace(row(3), where=place(3, 33, file=file)))
    text = render(report(verdict=verdict, rows=rows), width=width)
    assert text.count(f"{file}:33") == 3


@pytest.mark.parametrize("color", [True, False])
def test_what_was_collected_is_never_markup(color):
    text = render(report(), color=color)
    assert "see [/dev/shm] [bold]loud[/bold] [/] :smile: \\x1b[31m" in text


def test_no_color_means_no_escape_at_all():
    assert "\x1b" not in render(report(), width=80)


def test_colors_change_nothing_but_colors():
    colored = render(report(), width=80, color=True)
    assert "\x1b[1;31m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == render(report(), width=80)


def test_the_environment_has_no_say(monkeypatch):
    plain = render(report(), width=80)
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "20", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert render(report(), width=80) == plain


def test_equal_findings_of_several_ranks_are_one_line():
    others = [
        finding("DD901", "not-recorded", Severity.INFO, summary="No ring.", ranks=(n,), where=()) for n in (0, 1, 2, 5)
    ]
    text = render(report(others=tuple(others)))
    assert "  info    DD901 not-recorded, ranks 0-2, 5: No ring.\n" in text
    assert text.count("No ring.") == 1


def test_equal_places_of_several_ranks_are_one_line():
    verdict = replace(STUCK, ranks=(0, 1, 2), where=tuple(place(n, 61) for n in range(3)))
    assert "  where   ranks 0-2: train.py:61 in main\n" in render(report(verdict=verdict))


def test_a_large_job_does_not_flood_the_screen():
    rows = tuple(row(n, line=n + 1) for n in range(500))
    text = render(report(rows=rows), width=80)
    assert "and 460 more rows in report.json" in text
    assert len(text.splitlines()) < 70


def test_many_scattered_ranks_are_listed_within_the_width():
    rows = tuple(row(n) if n % 2 else row(n, "in backward", 70) for n in range(200))
    text = render(report(rows=rows), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "198" in text


def test_steps_of_a_class_are_drawn_together():
    rows = tuple(row(n, step=10 + n) for n in range(3))
    assert "train.py:61 in main, steps 10-12\n" in render(report(rows=rows))


def test_without_folder_and_job_there_is_still_a_line():
    bare = replace(FINISHED, job=None)
    text = render_text(bare, width=80, color=False, run_dir=None)
    assert text == "ddpdoctor: no problem found\n  checks: 0 passed, 0 skipped (-v shows each)\n"


def test_ranks_that_stand_together_are_named_with_their_host_where_there_are_several():
    rows = tuple(replace(one, host="node0" if one.rank < 3 else "node1") for one in ROWS)
    shown = render(report(rows=rows))
    assert re.search(r"^  ranks 0-2, 4 +in all_reduce", shown, re.MULTILINE)
    assert re.search(r"^> rank 3 on node1 +in fetch", shown, re.MULTILINE)
    assert " on h" not in render(report())


# The form of report.json: what is written is held to the schema, and what is no report is refused.


STUCK_REPORT = Finding(
    code="DD601",
    kind="stuck",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    summary="Rank 1 waits in fetch.",
    ranks=(1,),
    hosts=("node3",),
    where=(Place(rank=1, file="/home/me/größe.py", line=3, function="fetch"),),
    step=12,
    tensor="layers.0.weight",
    evidence=("seen [/dev/shm]", "\x1b[31m\udcff"),
    fix="Do this.",
)
ROW = RankRow(
    rank=1,
    local_rank=1,
    host="node3",
    pid=77,
    state="in fetch",
    where=STUCK_REPORT.where[0],
    step=12,
    gpu=0,
    stack=("a.py:1 main", "a.py:3 fetch"),
)
FULL = Report(
    command=("ddpdoctor", "wrap", "train.py"),
    started_at="2026-01-02T03:04:05.123+00:00",
    ended_at="2026-01-02T03:04:09Z",
    job=JobSummary(world_size=2, nnodes=1, status=JobStatus.HUNG, exit_status=124),
    verdict=STUCK_REPORT,
    findings=(STUCK_REPORT,),
    checks=(
        Check(id="stuck", code="DD601", outcome=Outcome.FAILED),
        Check(id="crash", code="DD604", outcome=Outcome.SKIPPED, reason="no end"),
    ),
    ranks=(ROW, RankRow(rank=0, local_rank=None, host="node3", pid=None, state="never came")),
    data={"table": [1, 2.5, None, {"a": "b"}]},
    tool_version="0.1.0",
)
EMPTY = Report(
    command=(),
    started_at="2026-01-02T03:04:05Z",
    ended_at="2026-01-02T03:04:05Z",
    job=None,
    verdict=None,
    findings=(),
    checks=(),
    ranks=(),
    tool_version="0.1.0",
)


@pytest.fixture(scope="module")
def validator():
    schema = json.loads((files("ddpdoctor.report") / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("report", [FULL, EMPTY], ids=["full", "empty"])
def test_what_is_written_fits_the_schema_and_reads_back_the_same(validator, report):
    text = render_json(report)
    validator.validate(json.loads(text))
    assert parse_report(text) == report


def test_what_was_found_of_replicas_fits_the_schema(validator):
    row = TensorRow(what=What.STATE, name="w", part="exp_avg", shape=(2, 3), dtype="float32")
    split = TensorSplit(row=row, sides=((0, 2), (1,)), absent_on=(1,))
    difference = Difference(what=What.STATE, number=2, last_equal=None, splits=(split,), differing=1, of=4)
    compared = Stream(
        clock=StreamClock.SYNC, group="0", model=1, optimizer=0, ranks=(0, 1, 2), compared=2, last_number=2,
        differences=(difference,), unpaired=(3,),
    )  # fmt: skip
    alone = replace(compared, ranks=(), compared=0, last_number=None, differences=())
    for found in (None, Consistency(check_every=0), Consistency(check_every=50, streams=(compared, alone))):
        data = {"consistency": None if found is None else encode(found)}
        body = json.loads(render_json(replace(FULL, data=data)))
        validator.validate(body)
        assert found is None or decode(Consistency, body["data"]["consistency"]) == found
    body["data"]["consistency"]["streams"][0]["clock"] = "sundial"
    assert not validator.is_valid(body)


def test_the_text_is_ascii_so_that_any_stream_can_carry_it():
    assert render_json(FULL).isascii()
    assert render_json(FULL).endswith("}\n")


def test_a_check_of_an_older_report_whose_id_is_its_code_is_read():
    body = json.loads(render_json(FULL))
    body["checks"] = [{"id": "DD601", "outcome": "crashed", "reason": "KeyError"}]
    report = parse_report(json.dumps(body))
    assert report.checks == (Check(id="DD601", outcome=Outcome.CRASHED, reason="KeyError"),)
    assert 'name="DD601"' in render_junit(report, None)


def test_the_version_of_the_tool_is_never_missing():
    assert report_to_dict(replace(EMPTY, tool_version=""))["tool"]["version"]


def test_what_json_has_no_number_for_becomes_null():
    report = replace(EMPTY, data={"ratio": math.nan, "peak": [math.inf]})
    assert json.loads(render_json(report))["data"] == {"ratio": None, "peak": [None]}


def test_fields_of_a_newer_minor_version_are_passed_over(validator):
    body = report_to_dict(FULL)
    body["later"] = 1
    body["findings"][0]["later"] = 1
    validator.validate(body)
    assert parse_report(json.dumps(body)) == FULL


def walk(value, path=()):
    """All paths into a JSON value, save into ``data``, which is free."""
    if path[:1] == ("data",):
        return
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from walk(child, (*path, key))


PATHS = sorted(walk(report_to_dict(FULL)), key=str)


def at(body, path):
    for key in path:
        body = body[key]
    return body


LATER = {("checks", name) for name in ("code", "group", "seen", "hosts")}
"""Fields that came after the first reports had been saved."""


def is_later(path):
    return (path[0], path[-1]) in LATER


def test_a_report_from_before_a_field_was_added_is_read(validator):
    body = report_to_dict(FULL)
    for path in filter(is_later, PATHS):
        del at(body, path[:-1])[path[-1]]
    validator.validate(body)
    without = replace(FULL, checks=tuple(replace(check, code="") for check in FULL.checks))
    assert parse_report(json.dumps(body)) == without


REQUIRED = {
    "report": {
        "schema_version",
        "tool",
        "command",
        "started_at",
        "ended_at",
        "job",
        "verdict",
        "findings",
        "checks",
        "ranks",
    },
    "tool": {"name", "version"},
    "job": {"world_size", "nnodes", "status", "exit_status"},
    "verdict": {"code", "kind", "severity", "confidence", "summary"},
    "findings": {"code", "kind", "severity", "confidence", "summary"},
    "where": {"rank", "file", "line", "function"},
    "checks": {"id", "outcome"},
    "ranks": {"rank", "local_rank", "host", "pid", "state"},
}
"""Fields by the object that they stand in. The schema asks for more: fields that ddpdoctor has always written."""


def is_required(path):
    *outer, name = path
    holder = next((one for one in reversed(outer) if isinstance(one, str)), "report")
    return name in REQUIRED[holder]


@pytest.mark.parametrize("path", [path for path in PATHS if isinstance(path[-1], str) and not is_later(path)], ids=str)
def test_a_missing_field_is_refused_by_the_schema_and_takes_its_default_where_it_has_one(validator, path):
    body = copy.deepcopy(report_to_dict(FULL))
    del at(body, path[:-1])[path[-1]]
    assert not validator.is_valid(body)
    if not is_required(path):
        assert parse_report(json.dumps(body)).command == FULL.command
        return
    with pytest.raises(UserError) as error:
        parse_report(json.dumps(body))
    assert error.value.status == 2
    assert path[0] in error.value.message or "not a report" in error.value.message


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_value_of_another_kind_is_refused_by_reader_and_schema(validator, path):
    body = copy.deepcopy(report_to_dict(FULL))
    at(body, path[:-1])[path[-1]] = True
    assert not validator.is_valid(body)
    with pytest.raises(UserError):
        parse_report(json.dumps(body))


def test_a_report_that_was_cut_short_is_refused_wherever_it_was_cut():
    text = render_json(FULL).rstrip()
    for length in range(0, len(text), 7):
        with pytest.raises(UserError, match="cannot be read"):
            parse_report(text[:length])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a report of ddpdoctor"),
        ("{}", "not a report of ddpdoctor"),
        ('{"name": "my-package", "version": "1.0"}', "not a report of ddpdoctor"),
        ('{"schema_version": 1, "tool": {"name": "other", "version": "1"}}', "'other'"),
        ('{"schema_version": 2, "tool": {"name": "ddpdoctor", "version": "9"}}', "schema version 2"),
        ("[" * 100_000, "nested too deeply"),
        ("cos\nsystem\n(S'true'\ntR.", "not complete JSON"),
    ],
)
def test_what_is_foreign_is_refused_with_the_reason(text, said):
    with pytest.raises(UserError, match="cannot be read") as error:
        parse_report(text)
    assert said in error.value.message
    assert error.value.help


def test_an_info_is_no_verdict(validator):
    body = report_to_dict(FULL)
    body["verdict"] = {**body["verdict"], "severity": "info"}
    assert not validator.is_valid(body)
