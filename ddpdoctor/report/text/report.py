"""Renders a report as text for people. Collected data is always plain text, never markup."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.sides import grouped
from ddpdoctor.report.blocks import Lanes, Tone, items
from ddpdoctor.report.classes import merge_findings
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import (
    OUTCOME_TONES,
    OUTCOME_WORDS,
    TONES,
    UNKNOWN,
    check_tone,
    check_words,
    count_checks,
    finding_section,
    findings_in_short,
    name_check,
    verdict_section,
)
from ddpdoctor.report.text.blocks import add_sections
from ddpdoctor.report.text.page import TextPage, draw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Check, Report
    from ddpdoctor.report.blocks import Content, Section

MAX_REASONS = 5
WORD_WIDTH = max(map(len, OUTCOME_WORDS.values()))


def render_text(
    report: Report,
    *,
    width: int | None,
    color: bool,
    run_dir: Path | None,
    cwd: Path | None = None,
    verbose: bool = False,
) -> str:
    """Render a report. ``width`` is None if the output is not a terminal. Then nothing is wrapped.

    Paths below ``cwd`` are shown relative to it. Raises ``UserError`` if the report is damaged.
    """
    content = read_content(report)
    page = TextPage(width=width, cwd=cwd)
    _add_headline(page, report, content)
    _add_status(page, report, content, run_dir, verbose=verbose)
    add_sections(page, (*content.about, *content.sections, *_strips(content)))
    if content.ends_with_verdict:
        _add_verdict(page, report, content)
    else:
        _add_checks(page, report, content, verbose=verbose)
    return draw(page, color=color)


def render_verdict(report: Report) -> str:
    """Render only the headline, how it ended, and what backs the verdict, for a program that has the rest as data.

    Raises ``UserError`` if the report is damaged.
    """
    content = read_content(report)
    page = TextPage(width=None, cwd=None)
    _add_headline(page, report, content)
    _add_status(page, report, content, None, verbose=True)
    if report.verdict is not None:
        add_sections(page, [verdict_section(report.verdict)])
    return draw(page, color=False)


def _add_headline(page: TextPage, report: Report, content: Content) -> None:
    """Add the answer as the first line."""
    tone = Tone.PLAIN if report.verdict is None else TONES[report.verdict.severity]
    page.add(content.headline, first="ddpdoctor: ", tone=tone)


def _add_status(page: TextPage, report: Report, content: Content, run_dir: Path | None, *, verbose: bool) -> None:
    """Add how it ended, the number of checks, the run folder, and remarks."""
    details = "" if verbose else " (-v shows each)"
    parts = [
        content.status,
        f"checks: {count_checks(report)}{details}" if content.is_checklist else "",
        "" if run_dir is None else f"report in {run_dir}",
    ]
    for line in ("; ".join(filter(None, parts)), *content.remarks):
        if line:
            page.add(line, first="  ")


def _add_verdict(page: TextPage, report: Report, content: Content) -> None:
    """Add checks without an answer, other findings in short, and the verdict last, so that it stays on the screen."""
    unknown = [check for check in report.checks if check.outcome in UNKNOWN]
    if report.findings or (report.job is not None and report.job.ended_badly):
        texts = [f"{name_check(check)}: {OUTCOME_WORDS[check.outcome]}: {check.reason}" for check in unknown]
        add_sections(page, [(items(texts, "  "),)])
    add_sections(page, [(findings_in_short(merge_findings(content.others)),)])
    if report.verdict is not None:
        add_sections(page, [verdict_section(report.verdict)])


def _strips(content: Content) -> list[Section]:
    """Return the pictures that text draws: timelines. The verdict says the rest."""
    return [section for section in content.pictures if any(isinstance(block, Lanes) for block in section)]


def _add_checks(page: TextPage, report: Report, content: Content, *, verbose: bool) -> None:
    """Add checks and findings, the worst last."""
    if verbose:
        _add_groups(page, report)
    else:
        _add_unknown(page, report.checks)
    for finding in reversed(report.findings):
        if verbose or not content.is_checklist or finding.severity is not Severity.INFO:
            is_verdict = finding == report.verdict
            section = finding_section(finding, several_hosts=content.several_hosts, is_verdict=is_verdict)
            add_sections(page, [section])


def _add_groups(page: TextPage, report: Report) -> None:
    """Add every check and what it found, by group."""
    groups = grouped((check.group, check) for check in report.checks)
    width = max((len(check.id) for check in report.checks), default=0)
    for group, members in groups.items():
        page.gap()
        page.add(group or "checks", tone=Tone.STRONG)
        for check in members:
            word, tone = check_tone(check, report.findings)
            head = f"  {word.ljust(WORD_WIDTH)}  {check.code}  {check.id.ljust(width)}  "
            page.add(check_words(check), first=head, tone=tone, styled=2 + len(word))


def _add_unknown(page: TextPage, checks: Sequence[Check]) -> None:
    """Add the checks without an answer. They must not read like "passed"."""
    unknown = [check for check in checks if check.outcome in UNKNOWN]
    if unknown:
        page.gap()
    for check in unknown:
        head = f"{OUTCOME_WORDS[check.outcome]}  "
        tone = OUTCOME_TONES[check.outcome]
        page.add(f"{name_check(check)}: {check_words(check)}", first=head, tone=tone, styled=len(head))
    if {check.outcome for check in checks} == {Outcome.SKIPPED}:
        _add_skipped(page, checks)


def _add_skipped(page: TextPage, checks: Sequence[Check]) -> None:
    """Add the reasons for skipped checks. Called only if all checks were skipped."""
    reasons = Counter(check.reason for check in checks)
    for reason, times in reasons.most_common(MAX_REASONS):
        of = name_check(checks[0]) if len(checks) == 1 else count_of(times, "check")
        page.add(f"{of}: {reason}", first="skipped  ")
