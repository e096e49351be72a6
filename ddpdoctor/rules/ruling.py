"""What a rule says, and how a family of rules is put before its facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.findings import Check, Finding, Outcome, Severity
from ddpdoctor.rules.registry import rule_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.rules.registry import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What a rule says: findings, or why it does not apply or cannot tell."""

    findings: tuple[Finding, ...] = ()
    certain: bool = False
    """The job hangs by all that was seen: every rank waits or stands still."""
    may_resume: bool = False
    """It may go on all the same: a sleep can end, a file can come, a frozen process can be continued."""
    skipped: str = ""
    inconclusive: str = ""


def run_rules(checks: Iterable[Callable[..., Ruling]], facts: Any) -> tuple[list[Finding], list[Check]]:
    """Return what rules find in their facts, and how each came out. A rule that raises is a crashed check."""
    findings: list[Finding] = []
    outcomes: list[Check] = []
    for check in checks:
        ruling, outcome = run_rule(rule_of(check), facts)
        findings.extend(ruling.findings)
        outcomes.append(outcome)
    return findings, outcomes


def run_rule(rule: Rule, facts: Any) -> tuple[Ruling, Check]:
    """Return what one rule says of its facts, and how it came out."""
    try:
        ruling: Ruling = rule.check(facts)
    except Exception as error:  # noqa: BLE001 - the wall around a rule
        return Ruling(), crashed(rule, error)
    reason = ruling.skipped or ruling.inconclusive
    return ruling, Check(id=rule.kind, code=rule.code, outcome=_outcome(ruling), reason=reason)


def crashed(rule: Rule, error: Exception) -> Check:
    """Return the outcome of a rule that raised."""
    return Check(id=rule.kind, code=rule.code, outcome=Outcome.CRASHED, reason=f"{type(error).__name__}: {error}")


def _outcome(ruling: Ruling) -> Outcome:
    if any(finding.severity is not Severity.INFO for finding in ruling.findings):
        return Outcome.FAILED
    if ruling.skipped:
        return Outcome.SKIPPED
    return Outcome.INCONCLUSIVE if ruling.inconclusive else Outcome.PASSED
