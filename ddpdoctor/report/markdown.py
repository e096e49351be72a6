"""A report as Markdown, to paste into an issue or a merge request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.report.checkup import OUTCOME_WORDS
from ddpdoctor.report.classes import merge_places
from ddpdoctor.report.hosts import format_hosts
from ddpdoctor.report.lines import clean
from ddpdoctor.report.page import plural
from ddpdoctor.report.ranks import format_ranks
from ddpdoctor.report.subjects import subject_lines

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Check, Finding, Report


def render_markdown(report: Report) -> str:
    """Render findings, worst first, and a table of all checks."""
    blocks = [f"## ddpdoctor: {_headline(report)}"]
    subject = subject_lines(report)
    if subject:
        blocks.append("\n".join(["```text", *map(_fenced, subject), "```"]))
    blocks += [write_finding(finding) for finding in report.findings]
    if report.checks:
        blocks.append(write_checks(report.checks))
    blocks.append(f"ddpdoctor {inline(report.tool_version)}, {inline(report.started_at)}")
    return "\n\n".join(blocks) + "\n"


def _headline(report: Report) -> str:
    status = [report.job.status.value] if report.job else []
    found = plural(len(report.findings), "finding") if report.findings else "no findings"
    return ", ".join([*status, found])


def write_finding(finding: Finding) -> str:
    """Write a finding under a title of its own."""
    whom = [format_ranks(finding.ranks), f"on {format_hosts(finding.hosts)}" if finding.hosts else ""]
    title = ", ".join(part for part in (f"{finding.code} {finding.kind}", " ".join(filter(None, whom))) if part)
    lines = [f"### {finding.severity.value}: {inline(title)}", "", inline(finding.summary), ""]
    lines += [f"- at {inline(place)}" for place in merge_places(finding.where)]
    lines += [f"- {inline(line)}" for line in finding.evidence]
    if finding.fix:
        lines += ["", "To do:", "", *(f"    {line}" for line in clean(finding.fix).splitlines())]
    return "\n".join(lines)


def write_checks(checks: tuple[Check, ...]) -> str:
    """Write a table of all checks, folded away."""
    rows = [
        f"| {OUTCOME_WORDS[check.outcome]} | {inline(check.code)} | `{_code(check.id)}` | {_cell(check)} |"
        for check in sorted(checks, key=lambda check: list(Outcome).index(check.outcome))
    ]
    head = "<details><summary>All checks</summary>\n\n| outcome | code | check | seen |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n\n</details>"


def _cell(check: Check) -> str:
    where = f"on {format_hosts(check.hosts)}: " if check.hosts else ""
    return inline(where + (check.seen or check.reason))


def _fenced(line: str) -> str:
    """Keep a line from ending the block that it stands in."""
    return clean(line).replace("\n", " ").replace("```", "` ` `")


def _code(text: str) -> str:
    """Keep a name from ending the code that it stands in, or the cell of the table."""
    return re.sub(r"[`|\s]+", " ", clean(text))


def inline(text: str) -> str:
    """Keep what was collected from being read as markup."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", " ".join(clean(text).split()))
