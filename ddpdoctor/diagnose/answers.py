"""From rules that answer to findings and outcomes of checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Check, Finding, Outcome
from ddpdoctor.rules.answers import outcome_of

if TYPE_CHECKING:
    from ddpdoctor.rules.answers import Answer, Problem
    from ddpdoctor.rules.registry import Rule


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
