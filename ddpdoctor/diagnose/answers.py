"""From rules that answer to findings, outcomes of checks, and the report of a check that ran no job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.diagnose.check_env import now
from ddpdoctor.model.findings import Check, Finding, Outcome, Report
from ddpdoctor.recorder.storage.secrets import hide_secrets
from ddpdoctor.rules.answers import outcome_of
from ddpdoctor.rules.verdict import order_findings, pick_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.rules.answers import Answer, Problem
    from ddpdoctor.rules.registry import Rule


def make_report(
    command: tuple[str, ...],
    started_at: str,
    findings: Iterable[Finding],
    checks: Iterable[Check],
    data: dict[str, Any],
) -> Report:
    """Return the report of a check that ran no job."""
    ordered = order_findings(findings)
    return Report(
        command=hide_secrets(command),
        started_at=started_at,
        ended_at=now(),
        job=None,
        verdict=pick_verdict(ordered),
        findings=ordered,
        checks=tuple(checks),
        ranks=(),
        data=data,
        tool_version=ddpdoctor.__version__,
    )


def found(rule: Rule, problem: Problem) -> Finding:
    """Return a problem as a finding of its rule."""
    return Finding(
        code=rule.code,
        kind=rule.kind,
        severity=problem.severity or rule.severity,
        confidence=problem.confidence,
        summary=problem.summary,
        ranks=problem.ranks,
        hosts=problem.hosts,
        tensor=problem.tensor,
        evidence=problem.evidence,
        fix=problem.fix,
    )


def outcome(rule: Rule, answer: Answer, group: str) -> Check:
    """Return how a rule came out."""
    ran = answer.outcome in {Outcome.PASSED, Outcome.FAILED}
    return Check(
        id=rule.kind,
        code=rule.code,
        group=group,
        outcome=outcome_of(answer, rule.severity),
        seen=answer.seen if ran else "",
        reason="" if ran else answer.seen,
    )
