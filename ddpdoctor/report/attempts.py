"""The attempts of a job that its launcher restarted, a section each, and the last one last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Attempt, restarted_words
from ddpdoctor.report.classes import merge_places
from ddpdoctor.report.findings import STYLES
from ddpdoctor.report.rank_table import add_ranks
from ddpdoctor.report.ranks import format_ranks

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.page import Page


def read_attempts(report: Report) -> tuple[Attempt, ...]:
    """Return the attempts of a job that was restarted; none of one that was not.

    Raises:
        UserError: they are damaged.
    """
    try:
        return tuple(decode(Attempt, section) for section in report.data.get("sections") or ())
    except (WrongValue, TypeError) as error:
        raise UserError(f"the attempts in the report cannot be read: {error}") from error


def without_earlier(findings: tuple[Finding, ...], attempts: tuple[Attempt, ...]) -> tuple[Finding, ...]:
    """Leave out what the sections of earlier attempts say."""
    told = tuple(restarted_words(attempt.attempt) for attempt in attempts)
    return tuple(finding for finding in findings if not (told and finding.summary.startswith(told)))


def add_earlier(page: Page, report: Report, attempts: tuple[Attempt, ...]) -> None:
    """Add the sections of the attempts that were restarted, and the heading of the one that was not."""
    for attempt in attempts[:-1]:
        page.gap()
        page.add(f"{_name(attempt)}: {attempt.status.value}{_length(attempt)}, then restarted", style="bold")
        add_ranks(page, replace(report, verdict=attempt.verdict, ranks=attempt.ranks))
        _add_verdict(page, attempt.verdict)
    if attempts:
        page.gap()
        page.add(f"{_name(attempts[-1])}, the last: {attempts[-1].status.value}{_length(attempts[-1])}", style="bold")


def _name(attempt: Attempt) -> str:
    return f"attempt {attempt.attempt}"


def _length(attempt: Attempt) -> str:
    return f" after {attempt.seconds:.1f} s" if attempt.seconds is not None else ""


def _add_verdict(page: Page, verdict: Finding | None) -> None:
    page.gap()
    if verdict is None:
        page.add("no cause found", first="  ")
        return
    title = f"{verdict.code} {verdict.kind}, {format_ranks(verdict.ranks)}".rstrip(", ")
    page.add(title, first="  ", style=STYLES[verdict.severity])
    page.add_labelled("wrong", [verdict.summary])
    page.add_labelled("where", merge_places(verdict.where))
