"""A report as JSON, and back. Reading is strict: what is not a report of ours is a clear error."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpdoctor import __version__
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import (
    SCHEMA_VERSION,
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
from ddpdoctor.report.fields import Fields, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOL_NAME = "ddpdoctor"
MOST_LEVELS = 40
"""Ours: the facts of a node, the deepest data of a report, have a dozen levels."""
_HELP = "Give a run folder that ddpdoctor wrote. Of a damaged one, the rings may still be there: remove report.json "
_HELP += "and run `ddpdoctor report` on the folder again."


def report_to_dict(report: Report) -> dict[str, Any]:
    """Build the JSON object that ``report/schema.json`` describes."""
    body = _plain(asdict(report))
    del body["tool_version"]
    tool = {"name": TOOL_NAME, "version": report.tool_version or __version__}
    return {"schema_version": SCHEMA_VERSION, "tool": tool, **body}


def render_json(report: Report) -> str:
    """Render a report as JSON text that ends with a newline; pure ASCII, so any stream can carry it."""
    return json.dumps(report_to_dict(report), indent=2, allow_nan=False) + "\n"


def parse_report(text: str) -> Report:
    """Read a report back. Raises ``UserError`` where the text is damaged, cut short, or not a report of ours."""
    try:
        return _read_report(Fields(json.loads(text), "report"))
    except json.JSONDecodeError as error:
        problem = f"not complete JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        problem = "nested too deeply to be a report"
    except ValueError as error:  # a number with thousands of digits
        problem = str(error).partition(";")[0]
    except FormatError as error:
        problem = str(error)
    raise UserError(f"the report cannot be read: {problem}", help=_HELP)


def _plain(value: Any) -> Any:
    """Tuples as lists, enums as their values, and what JSON has no number for as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (Severity, Confidence, Outcome, JobStatus)):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read_report(report: Fields) -> Report:
    tool = _check_origin(report)
    return Report(
        command=report.texts("command"),
        started_at=report.text("started_at"),
        ended_at=report.text("ended_at"),
        job=_read_job(job) if (job := report.optional("job")) else None,
        verdict=_read_finding(verdict) if (verdict := report.optional("verdict")) else None,
        findings=tuple(_read_finding(finding) for finding in report.each("findings")),
        checks=tuple(_read_check(check) for check in report.each("checks")),
        ranks=tuple(_read_rank(rank) for rank in report.each("ranks")),
        data=_read_data(report),
        tool_version=tool.text("version"),
    )


def _check_origin(report: Fields) -> Fields:
    if "schema_version" not in report.values or "tool" not in report.values:
        raise FormatError("it is not a report of ddpdoctor")
    tool = report.required("tool")
    if tool.text("name") != TOOL_NAME:
        raise FormatError(f"it was written by {tool.text('name')!r}, not by ddpdoctor")
    version = report.number("schema_version")
    if version != SCHEMA_VERSION:
        raise FormatError(f"it has schema version {version}, and this ddpdoctor reads {SCHEMA_VERSION}")
    return tool


def _read_data(report: Fields) -> dict[str, Any]:
    data: Mapping[str, Any] = report.required("data").values
    _check_depth(data)
    return dict(data)


def _check_depth(data: Any) -> None:
    """Raise ``FormatError`` for what is nested so deeply that to draw or copy it would exhaust the stack."""
    level = [data]
    for _ in range(MOST_LEVELS):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise FormatError("report.data is nested too deeply to be a report's")


def _read_job(job: Fields) -> JobSummary:
    return JobSummary(
        world_size=job.optional_number("world_size"),
        nnodes=job.number("nnodes"),
        status=job.one_of("status", JobStatus),
        exit_status=job.optional_number("exit_status"),
    )


def _read_finding(finding: Fields) -> Finding:
    return Finding(
        code=finding.text("code"),
        kind=finding.text("kind"),
        severity=finding.one_of("severity", Severity),
        confidence=finding.one_of("confidence", Confidence),
        summary=finding.text("summary"),
        ranks=finding.numbers("ranks"),
        hosts=finding.texts("hosts"),
        where=tuple(_read_place(place) for place in finding.each("where")),
        step=finding.optional_number("step"),
        tensor=finding.optional_text("tensor"),
        evidence=finding.texts("evidence"),
        fix=finding.text("fix"),
    )


def _read_place(place: Fields) -> Place:
    return Place(
        rank=place.number("rank"),
        file=place.text("file"),
        line=place.number("line"),
        function=place.text("function"),
    )


def _read_check(check: Fields) -> Check:
    return Check(
        id=check.text("id"),
        outcome=check.one_of("outcome", Outcome),
        reason=check.text("reason"),
        code=check.text_or("code"),
        group=check.text_or("group"),
        seen=check.text_or("seen"),
        hosts=check.texts("hosts") if "hosts" in check.values else (),
    )


def _read_rank(row: Fields) -> RankRow:
    return RankRow(
        rank=row.number("rank"),
        local_rank=row.optional_number("local_rank"),
        host=row.text("host"),
        pid=row.optional_number("pid"),
        state=row.text("state"),
        where=_read_place(where) if (where := row.optional("where")) else None,
        step=row.optional_number("step"),
        gpu=row.optional_number("gpu"),
        stack=row.texts("stack"),
    )
