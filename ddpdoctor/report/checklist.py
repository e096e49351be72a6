"""What is shown of checks that ran no job, such as `check-env`: over how many machines, and what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.report.blocks import Content
from ddpdoctor.report.findings import count_findings
from ddpdoctor.report.names import plural

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Section


def checklist_content(report: Report, *about: Section) -> Content:
    """Return what is shown of checks; ``about`` is what they were about."""
    hosts = report.data.get("hosts")
    count = len(hosts) if isinstance(hosts, list) else 0
    found = count_findings(report.findings) or _no_finding(report)
    return Content(status=f"{_who(report, count)}{found}", about=about, several_hosts=count > 1, is_checklist=True)


def _no_finding(report: Report) -> str:
    """Say that nothing is wrong only where something was checked."""
    outcomes = {check.outcome for check in report.checks}
    if Outcome.PASSED in outcomes or not outcomes:
        return "no problem found"
    return "nothing was checked" if outcomes <= {Outcome.SKIPPED} else "cannot tell"


def _who(report: Report, hosts: int) -> str:
    """Say over how many machines and ranks, where there are several."""
    # By hand it is the nodes that are counted.
    ranks = report.data.get("world_size") if report.data.get("launcher") not in ("none", "nnodes") else None
    parts = [plural(hosts, "host")] if hosts > 1 else []
    if isinstance(ranks, int):
        parts.append(plural(ranks, "rank"))
    return f"{', '.join(parts)}: " if parts else ""
