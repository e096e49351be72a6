"""The report of `check-env` as text: what is wrong, the worst last, then one line that counts everything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.report.findings import STYLES, add_finding, count_findings, severity_word
from ddpdoctor.report.hosts import format_hosts
from ddpdoctor.report.page import Page, draw, plural
from ddpdoctor.report.subjects import subject_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Check, Report

OUTCOME_WORDS = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "failed",
    Outcome.SKIPPED: "skipped",
    Outcome.INCONCLUSIVE: "could not tell",
    Outcome.CRASHED: "crashed",
}
OUTCOME_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "dim",
    Outcome.INCONCLUSIVE: "bold yellow",
    Outcome.CRASHED: "bold magenta",
}
MAX_REASONS = 5
WORD_WIDTH = max(map(len, OUTCOME_WORDS.values()))


def render_checkup(
    report: Report, *, width: int | None, colour: bool, verbose: bool, run_dir: Path | None, cwd: Path | None
) -> str:
    """Render a report of checks; ``width`` None is for what is no terminal and wraps nothing."""
    page = Page(width=width, cwd=cwd)
    for line in subject_lines(report):
        page.add(line)
    if verbose:
        _add_groups(page, report)
    else:
        if any(check.outcome in {Outcome.INCONCLUSIVE, Outcome.CRASHED} for check in report.checks):
            page.gap()
        add_untold(page, report.checks)
        if {check.outcome for check in report.checks} == {Outcome.SKIPPED}:
            _add_skipped(page, report.checks)
    several = len(_hosts(report)) > 1
    for finding in reversed(report.findings):
        if verbose or finding.severity is not Severity.INFO:
            add_finding(page, finding, several=several)
            if finding == report.verdict:
                page.add_labelled("more", [f"ddpdoctor explain {finding.code}"])
    page.gap()
    page.add(_closing_line(report, run_dir, verbose=verbose))
    return draw(page.lines, colour=colour)


def _add_groups(page: Page, report: Report) -> None:
    """Add every check with what it saw, by group. One that failed shows how bad that is."""
    groups: dict[str, list[Check]] = {}
    for check in report.checks:
        groups.setdefault(check.group, []).append(check)
    width = max((len(check.id) for check in report.checks), default=0)
    worst = {finding.kind: finding.severity for finding in reversed(report.findings)}
    for group, members in groups.items():
        page.gap()
        page.add(group, style="bold")
        for check in members:
            _add_check(page, check, width, worst.get(check.id))


def _add_check(page: Page, check: Check, width: int, worst: Severity | None) -> None:
    word, style = OUTCOME_WORDS[check.outcome], OUTCOME_STYLES[check.outcome]
    if check.outcome in {Outcome.PASSED, Outcome.FAILED} and worst is not None:
        word, style = severity_word(worst), STYLES[worst]
    where = f"on {format_hosts(check.hosts)}: " if check.hosts else ""
    head = f"  {word.ljust(WORD_WIDTH)}  {check.code}  {check.id.ljust(width)}  "
    text = where + (check.seen or check.reason)
    page.add(text, first=head, style=style, styled=2 + len(word))


def add_untold(page: Page, checks: Iterable[Check]) -> None:
    """Add what could not be told: it must not read like "passed"."""
    for check in checks:
        if check.outcome in {Outcome.INCONCLUSIVE, Outcome.CRASHED}:
            where = f"on {format_hosts(check.hosts)}: " if check.hosts else ""
            head = f"{OUTCOME_WORDS[check.outcome]}  "
            style = OUTCOME_STYLES[check.outcome]
            page.add(f"{check.code} {check.id}: {where}{check.reason}", first=head, style=style, styled=len(head))


def _add_skipped(page: Page, checks: Sequence[Check]) -> None:
    """Add why checks were skipped, where no other ran."""
    reasons = Counter(check.reason for check in checks)
    for reason, times in reasons.most_common(MAX_REASONS):
        of = f"{checks[0].code} {checks[0].id}" if len(checks) == 1 else plural(times, "check")
        page.add(f"{of}: {reason}", first="skipped  ")


def _closing_line(report: Report, run_dir: Path | None, *, verbose: bool) -> str:
    findings = count_findings(report.findings) or _no_finding(report)
    counts = [
        f"{sum(check.outcome is outcome for check in report.checks)} {OUTCOME_WORDS[outcome]}"
        for outcome in (Outcome.PASSED, Outcome.SKIPPED, Outcome.INCONCLUSIVE, Outcome.CRASHED)
        if outcome in {Outcome.PASSED, Outcome.SKIPPED} or any(check.outcome is outcome for check in report.checks)
    ]
    more = "" if verbose else " (-v shows each)"
    where = "" if run_dir is None else f"; report in {run_dir}"
    return f"ddpdoctor: {_who(report)}{findings}; checks: {', '.join(counts)}{more}{where}"


def _no_finding(report: Report) -> str:
    """Say that nothing is wrong only where something was checked."""
    outcomes = {check.outcome for check in report.checks}
    if Outcome.PASSED in outcomes or not outcomes:
        return "no problem found"
    return "nothing was checked" if outcomes <= {Outcome.SKIPPED} else "cannot tell"


def _who(report: Report) -> str:
    """Say over how many machines and ranks, where there are several."""
    hosts = _hosts(report)
    # By hand it is the nodes that are counted.
    ranks = report.data.get("world_size") if report.data.get("launcher") not in ("none", "nnodes") else None
    parts = [plural(len(hosts), "host")] if len(hosts) > 1 else []
    if isinstance(ranks, int):
        parts.append(plural(ranks, "rank"))
    return f"{', '.join(parts)}: " if parts else ""


def _hosts(report: Report) -> list[object]:
    hosts = report.data.get("hosts")
    return hosts if isinstance(hosts, list) else []
