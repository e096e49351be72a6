"""The form of report.json: what is written is held to the schema, and what is no report is refused."""

import copy
import json
import math
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest

from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.consistency import Consistency, Difference, Stream, StreamClock, TensorRow, TensorSplit, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, Outcome, Place, RankRow
from ddpdoctor.report.formats import parse_report, render_json, render_junit, report_to_dict
from tests import pages, pictures

STUCK = replace(
    pages.STUCK, where=(Place(rank=1, file="/home/me/größe.py", line=3, function="fetch"),), tensor="layers.0.weight",
    evidence=("seen [/dev/shm]", "\x1b[31m\udcff"),
)  # fmt: skip
ROW = RankRow(
    rank=1, local_rank=1, host="node3", pid=77, state="in fetch", where=STUCK.where[0], step=12, gpu=0,
    stack=("a.py:1 main", "a.py:3 fetch"),
)  # fmt: skip
FULL = replace(
    pages.report({"table": [1, 2.5, None, {"a": "b"}]}), verdict=STUCK, findings=(STUCK,),
    ranks=(ROW, RankRow(rank=0, local_rank=None, host="node3", pid=None, state="never came")),
    checks=(
        Check(id="stuck", code="DD601", outcome=Outcome.FAILED),
        Check(id="crash", code="DD604", outcome=Outcome.SKIPPED, reason="no end"),
    ),
)  # fmt: skip
EMPTY = replace(pictures.report(), command=())


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


def test_the_text_is_ascii_the_tool_has_a_version_and_what_is_no_number_becomes_null():
    assert render_json(FULL).isascii()
    assert render_json(FULL).endswith("}\n")
    assert report_to_dict(replace(EMPTY, tool_version=""))["tool"]["version"]
    report = replace(EMPTY, data={"ratio": math.nan, "peak": [math.inf]})
    assert json.loads(render_json(report))["data"] == {"ratio": None, "peak": [None]}


def test_a_check_of_an_older_report_whose_id_is_its_code_is_read():
    body = json.loads(render_json(FULL))
    body["checks"] = [{"id": "DD601", "outcome": "crashed", "reason": "KeyError"}]
    report = parse_report(json.dumps(body))
    assert report.checks == (Check(id="DD601", outcome=Outcome.CRASHED, reason="KeyError"),)
    assert 'name="DD601"' in render_junit(report, None)


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
        "schema_version", "tool", "command", "started_at", "ended_at", "job", "verdict", "findings", "checks", "ranks",
    },
    "tool": {"name", "version"},
    "job": {"world_size", "nnodes", "status", "exit_status"},
    "verdict": {"code", "kind", "severity", "confidence", "summary"},
    "findings": {"code", "kind", "severity", "confidence", "summary"},
    "where": {"rank", "file", "line", "function"},
    "checks": {"id", "outcome"},
    "ranks": {"rank", "local_rank", "host", "pid", "state"},
}  # fmt: skip
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
    body["verdict"]["severity"] = "info"
    assert not validator.is_valid(body)
