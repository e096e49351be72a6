"""Renders a report as SARIF 2.1.0, which code scanning and editors read.

The format is https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. Numbers of its sections stand beside
the code.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ddpdoctor import __version__
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.sides import grouped
from ddpdoctor.report.findings import OUTCOME_WORDS, UNKNOWN, check_words, name_check
from ddpdoctor.report.lines import clean
from ddpdoctor.report.names import format_ranks, path_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.model.findings import Check, Finding, Place, Report

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
HOME = "https://github.com/ddpdoctor/ddpdoctor"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
ROOT = "%SRCROOT%"
"""The folder that relative paths start from; whoever reads the file knows it (3.14.14)."""
KEPT = ("ranks", "hosts", "confidence", "origin", "step", "tensor", "share", "evidence", "fix")
"""The fields of a finding that SARIF has no place for. They stand in the properties of its result."""


def render_sarif(report: Report, titles: Mapping[str, str], cwd: Path | None) -> str:
    """Render one result per finding. ``titles`` has the line for lists of each rule, by code.

    Paths below ``cwd`` are relative to it.
    """
    rules = {finding.code: finding for finding in report.findings}
    codes = list(rules)
    run = {
        "tool": {
            "driver": {
                "name": "ddpdoctor",
                "version": clean(report.tool_version or __version__),
                "informationUri": HOME,
                "rules": [_draw_rule(finding, titles) for finding in rules.values()],
            }
        },
        "invocations": [_draw_invocation(report.checks)],
        "results": [_draw_result(finding, codes.index(finding.code), cwd) for finding in report.findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _draw_rule(finding: Finding, titles: Mapping[str, str]) -> dict[str, Any]:
    code = clean(finding.code)
    page = f"{HOME}/blob/main/docs/rules/{quote(f'{finding.code}-{finding.kind}.md', errors='replace')}"
    return {
        "id": code,
        "name": clean(finding.kind),
        "shortDescription": {"text": clean(titles.get(finding.code, finding.kind))},
        "help": {"text": f"ddpdoctor explain {code} says what it means and what to do.\n{page}"},
        "helpUri": page,
    }


def _draw_invocation(checks: Iterable[Check]) -> dict[str, Any]:
    """Return how the checks went. Those without an answer are notifications (3.20.21)."""
    unknown = [check for check in checks if check.outcome in UNKNOWN]
    return {
        "executionSuccessful": all(check.outcome is not Outcome.CRASHED for check in unknown),
        "toolExecutionNotifications": [
            {
                "level": "error" if check.outcome is Outcome.CRASHED else "warning",
                "message": _message(f"{name_check(check)}: {OUTCOME_WORDS[check.outcome]}: {check_words(check)}"),
            }
            for check in unknown
        ],
    }


def _draw_result(finding: Finding, rule_index: int, cwd: Path | None) -> dict[str, Any]:
    """Return a result. Its further places are related: to mend the first one is enough (3.27.12)."""
    ranks = grouped(((place.file, place.line, place.function), place.rank) for place in finding.where)
    places = {(place.file, place.line, place.function): place for place in finding.where}
    drawn = [_draw_place(place, ranks[key], cwd) for key, place in places.items()]
    text = "\n".join([finding.summary, *([f"To do: {finding.fix}"] if finding.fix else [])])
    return {
        "ruleId": clean(finding.code),
        "ruleIndex": rule_index,
        "level": LEVELS[finding.severity],
        "message": _message(text),
        **({"locations": drawn[:1]} if drawn else {}),
        **({"relatedLocations": drawn[1:]} if drawn[1:] else {}),
        "properties": {name: value for name, value in _cleaned(encode(finding)).items() if name in KEPT},
    }


def _draw_place(place: Place, ranks: Iterable[int], cwd: Path | None) -> dict[str, Any]:
    file = path_from(place.file, cwd)
    path = quote(file, errors="replace")
    artifact = {"uri": f"file://{path}"} if file.startswith("/") else {"uri": path, "uriBaseId": ROOT}
    # Lines count from 1 (3.30.5). A line that is not known is 0 in a report.
    region = {"region": {"startLine": place.line}} if place.line > 0 else {}
    function = [{"name": clean(place.function), "kind": "function"}] if place.function else []
    return {
        "physicalLocation": {"artifactLocation": artifact, **region},
        **({"logicalLocations": function} if function else {}),
        "message": {"text": format_ranks(ranks)},
    }


def _message(text: str) -> dict[str, str]:
    """Return a message. What was collected is neither a placeholder (3.11.5) nor a link (3.11.6)."""
    return {"text": re.sub(r"\{(\d+)\}", r"{{\1}}", clean(text)).replace("](", "\\](")}


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    return {name: _cleaned(one) for name, one in value.items()} if isinstance(value, dict) else value
