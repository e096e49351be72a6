"""What all reports share: findings in order, their verdict, checks, and what the user leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ddpdoctor
from ddpdoctor.model.findings import Outcome, RankRow, Report, now
from ddpdoctor.recorder.storage.secrets import hide_secrets
from ddpdoctor.rules.engine import judge, order_findings, pick_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.model.findings import Check, Finding, JobSummary
    from ddpdoctor.model.trial import Participant
    from ddpdoctor.rules.engine import Facts
    from ddpdoctor.rules.registry import Rule

Made = TypeVar("Made")


def make_report(  # noqa: PLR0913 - the fields of a report, each under its name
    *,
    command: tuple[str, ...],
    started_at: str,
    ended_at: str = "",
    findings: Iterable[Finding],
    earlier: Iterable[Finding] = (),
    checks: Iterable[Check],
    data: dict[str, Any],
    job: JobSummary | None = None,
    ranks: Iterable[RankRow] = (),
) -> Report:
    """Return a report; an empty ``ended_at`` means now. Findings in ``earlier`` are shown but never the verdict."""
    found = tuple(findings)
    return Report(
        command=hide_secrets(command),
        started_at=started_at,
        ended_at=ended_at or now(),
        job=job,
        verdict=pick_verdict(found),
        findings=tuple(order_findings((*found, *earlier))),
        checks=tuple(checks),
        ranks=tuple(ranks),
        data=data,
        tool_version=ddpdoctor.__version__,
    )


def check_report(
    rules: Iterable[Rule], facts: Facts, data: dict[str, Any], command: tuple[str, ...], started_at: str, **more: Any
) -> Report:
    """Judge facts by rules and return the report. ``more`` are other arguments of ``make_report``."""
    judged = judge(rules, facts)
    found, checks = judged.findings, judged.checks
    return make_report(command=command, started_at=started_at, findings=found, checks=checks, data=data, **more)


def attempt(build: Callable[[], Made]) -> Made | Exception:
    """Build what several rules, or parts of a report, share. If that raises, only they go without it."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - the wall around a rule: these are functions of untrusted facts, too
        return error


def reworded(finding: Finding, words: Callable[[str], str], advice: Callable[[str], str] | None = None) -> Finding:
    """Return a finding whose texts are changed by ``words``, its fix by ``advice`` if given."""
    evidence = tuple(map(words, finding.evidence))
    return replace(finding, summary=words(finding.summary), evidence=evidence, fix=(advice or words)(finding.fix))


def member_rows(members: Iterable[Member | Participant], describe: Callable[[int], dict[str, Any]]) -> list[RankRow]:
    """Return the row of each rank of a probe. ``describe`` returns what it did, as fields of the row."""
    return [
        RankRow(
            rank=member.rank,
            local_rank=member.local_rank,
            host=member.host,
            pid=member.pid,
            gpu=int(member.device.removeprefix("cuda:")) if member.device.startswith("cuda:") else None,
            **describe(member.rank),
        )
        for member in members
    ]


def leave_out(report: Report, codes: Collection[str]) -> Report:
    """Return a report without the findings with these codes. Their checks are marked as ignored."""
    left_out = {finding.kind for finding in report.findings if finding.code in codes}
    if not left_out:
        return report
    findings = tuple(finding for finding in report.findings if finding.code not in codes)
    checks = tuple(
        replace(check, outcome=Outcome.SKIPPED, reason="its findings are ignored (--ignore)")
        if check.id in left_out
        else check
        for check in report.checks
    )
    verdict = report.verdict if report.verdict in findings else pick_verdict(findings)
    return replace(report, findings=findings, checks=checks, verdict=verdict)
