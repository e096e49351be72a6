"""The content of checks without a job, such as `check-env`: the number of machines and of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.report.blocks import Content
from ddpdoctor.report.findings import count_findings
from ddpdoctor.report.grids.machine import machine_pictures

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Section


def checklist_content(report: Report, *about: Section, pictures: tuple[Section, ...] = ()) -> Content:
    """Return the content of checks. ``about`` describes what was checked. Of machines, they are drawn by host too."""
    hosts = report.data.get("hosts")
    count = len(hosts) if isinstance(hosts, list) else 0
    return Content(
        headline=_headline(report),
        status=", ".join(filter(None, (_who(report, count), count_findings(report.findings)))),
        about=about,
        several_hosts=count > 1,
        pictures=(*machine_pictures(report), *pictures),
        is_checklist=True,
    )


def _headline(report: Report) -> str:
    """Return the verdict. If there is none, say "no problem found" only if something was checked."""
    if report.verdict is not None:
        return report.verdict.summary
    outcomes = {check.outcome for check in report.checks}
    if Outcome.PASSED in outcomes or not outcomes:
        return "no problem found"
    return "nothing was checked" if outcomes <= {Outcome.SKIPPED} else "cannot tell"


def _who(report: Report, hosts: int) -> str:
    """Say how many machines and ranks were checked, if there are several."""
    # With --nnodes, world_size counts nodes, not ranks.
    ranks = report.data.get("world_size") if report.data.get("launcher") not in ("none", "nnodes") else None
    parts = [count_of(hosts, "host")] if hosts > 1 else []
    if isinstance(ranks, int):
        parts.append(count_of(ranks, "rank"))
    return ", ".join(parts)
