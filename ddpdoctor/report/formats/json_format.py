"""Writes and reads reports as JSON. Reading is strict: anything but a report of ddpdoctor is a clear error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import SCHEMA_VERSION, Report

TOOL_NAME = "ddpdoctor"
_HELP = "Give a run folder that ddpdoctor wrote. Of a damaged one, the rings may still be there: remove report.json "
_HELP += "and run `ddpdoctor report` on the folder again."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    """The program that wrote a report."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The fields that are checked before the rest of a report is read."""

    schema_version: int
    tool: _Tool


def report_to_dict(report: Report) -> dict[str, Any]:
    """Build the JSON object that ``report/schema.json`` describes."""
    body = encode(report)
    del body["tool_version"]
    tool = {"name": TOOL_NAME, "version": report.tool_version or __version__}
    return {"schema_version": SCHEMA_VERSION, "tool": tool, **body}


def render_json(report: Report) -> str:
    """Render a report as JSON text."""
    return write_json(report_to_dict(report), indent=2)


def write_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON text with a final newline. It is pure ASCII, so any stream can carry it.

    Two # in a text may begin a command of a CI runner. They are written so that only JSON reads them as two.
    """
    return json.dumps(value, indent=indent, allow_nan=False).replace("##", "\\u0023#") + "\n"


def parse_report(text: str) -> Report:
    """Read a report back. Raises ``UserError`` if the text is damaged, truncated, or not a report of ddpdoctor."""
    try:
        return _read_report(json.loads(text))
    except json.JSONDecodeError as error:
        problem = f"not complete JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        problem = "nested too deeply to be a report"
    except ValueError as error:  # a number with thousands of digits
        problem = str(error).partition(";")[0]
    except WrongValue as error:
        problem = str(error)
    raise UserError(f"the report cannot be read: {problem}", help=_HELP)


def _read_report(plain: Any) -> Report:
    if not isinstance(plain, dict) or not {"schema_version", "tool"} <= plain.keys():
        raise WrongValue("it is not a report of ddpdoctor")
    header = decode(_Header, plain)
    if header.tool.name != TOOL_NAME:
        raise WrongValue(f"it was written by {header.tool.name!r}, not by ddpdoctor")
    if header.schema_version != SCHEMA_VERSION:
        raise WrongValue(f"it has schema version {header.schema_version}, and this ddpdoctor reads {SCHEMA_VERSION}")
    return decode(Report, plain | {"tool_version": header.tool.version})
