"""Renders a report as workflow commands of GitHub Actions, which shows each as an annotation at its line.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#setting-a-notice-message
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import OUTCOME_WORDS, UNKNOWN, check_words, name_check
from ddpdoctor.report.lines import clean
from ddpdoctor.report.names import blamed_by, merge_places, path_from, sureness_of

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Check, Finding, Place, Report

LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
TITLE = "ddpdoctor"


def render_github(report: Report, cwd: Path | None) -> str:
    """Render one line per finding, and one per check without an answer. Paths below ``cwd`` are relative to it.

    Without findings, the only line is the headline: an error if the job ended badly, else a notice.
    """
    content = read_content(report)
    lines = [_draw_finding(finding, cwd) for finding in report.findings]
    if not lines:
        ended_badly = report.job is not None and report.job.ended_badly
        level = LEVELS[Severity.ERROR if ended_badly else Severity.INFO]
        lines = [_write_command(level, {"title": TITLE}, content.headline)]
    if content.is_checklist:
        lines += [_draw_unknown(check) for check in report.checks if check.outcome in UNKNOWN]
    return "".join(f"{line}\n" for line in lines)


def _draw_finding(finding: Finding, cwd: Path | None) -> str:
    place = finding.where[0] if finding.where else None
    properties = {**_place_properties(place, cwd), "title": f"{finding.code} {finding.kind}"}
    return _write_command(LEVELS[finding.severity], properties, clean("\n".join(_message_lines(finding)), cwd))


def _place_properties(place: Place | None, cwd: Path | None) -> dict[str, str]:
    if place is None:
        return {}
    # GitHub counts lines from 1. A line that is not known is 0 in a report.
    return {"file": path_from(place.file, cwd), **({"line": str(place.line)} if place.line > 0 else {})}


def _message_lines(finding: Finding) -> list[str]:
    blamed, places = blamed_by(finding).removeprefix("on "), merge_places(finding.where)
    return [
        finding.summary,
        *([f"blamed: {blamed}"] if blamed else []),
        sureness_of(finding),
        *(f"at {place}" for place in places if len(places) > 1),
        *([f"to do: {finding.fix}"] if finding.fix else []),
        f"more: ddpdoctor explain {finding.code}",
    ]


def _draw_unknown(check: Check) -> str:
    message = f"{OUTCOME_WORDS[check.outcome]}: {check_words(check)}"
    return _write_command(LEVELS[Severity.WARNING], {"title": name_check(check)}, message)


def _write_command(level: str, properties: dict[str, str], message: str) -> str:
    written = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
    return f"::{level} {written}::{_escape(message)}"


def _escape(text: str) -> str:
    """Escape as https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts does."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
