"""Findings of a checked machine or a measurement as text: what is wrong, where, what was seen, what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.report.classes import merge_places
from ddpdoctor.report.hosts import format_hosts
from ddpdoctor.report.page import plural
from ddpdoctor.report.ranks import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Finding
    from ddpdoctor.report.page import Page

COMMAND = re.compile(
    r"(chmod|ddpdoctor|docker|echo|export|ip|iptables|kubectl|ln|mkdir|modprobe|mount|nft|nvidia-smi|pip|python3?|rm"
    r"|scontrol|sed|srun|sudo|sysctl|systemctl|torchrun|ulimit|unset)\s"
)
"""How the fix of a finding begins where it is a command and not a sentence."""
STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "cyan"}


def severity_word(severity: Severity) -> str:
    """Name a severity for a reader: an info is a note."""
    return "note" if severity is Severity.INFO else severity.value


def add_finding(page: Page, finding: Finding, *, several: bool) -> None:
    """Add a finding under its title; ``several``: there is more than one host, so that hosts are named."""
    page.gap()
    blamed = [format_ranks(finding.ranks), f"on {format_hosts(finding.hosts)}" if several and finding.hosts else ""]
    whom = " ".join(part for part in blamed if part)
    title = f"{severity_word(finding.severity)}  {finding.code} {finding.kind}" + (f", {whom}" if whom else "")
    page.add(title, style=STYLES[finding.severity])
    page.add_labelled("note" if finding.severity is Severity.INFO else "wrong", [finding.summary])
    page.add_labelled("where", merge_places(finding.where))
    page.add_labelled("seen", finding.evidence)
    # A command that we break cannot be pasted, so the terminal wraps it.
    page.add_labelled("to do", [finding.fix] if finding.fix else [], whole=COMMAND.match(finding.fix) is not None)


def count_findings(findings: Iterable[Finding]) -> str:
    """Count findings by severity: "1 error, 2 notes"; empty for none."""
    severities = [finding.severity for finding in findings]
    counts = ((severities.count(severity), severity_word(severity)) for severity in Severity)
    return ", ".join(plural(count, word) for count, word in counts if count)
