"""`check-data` from its facts to its report: the arithmetic of an epoch, or what ranks were seen to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.diagnose.answers import found, outcome
from ddpdoctor.diagnose.drawn import GROUP, judge_drawn
from ddpdoctor.diagnose.reports import make_report, now
from ddpdoctor.model.codec import encode
from ddpdoctor.model.sharing import share_out
from ddpdoctor.rules.sharing import judge as sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.drawn import Drawn, Told
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.sharing import Plan

VERB = "check-data"


def plan_report(plan: Plan, command: tuple[str, ...]) -> Report:
    """Return the report of the arithmetic alone."""
    started_at = now()
    shares = share_out(plan)
    answers = tuple(sharing.judge(shares))
    findings = [found(rule, problem) for rule, answer in answers for problem in answer.problems]
    checks = tuple(outcome(rule, answer, GROUP) for rule, answer in answers)
    data = {"verb": VERB, "shares": encode(shares)}
    return make_report(command=command, started_at=started_at, findings=findings, checks=checks, data=data)


def drawn_report(
    drawn: Drawn, told: Sequence[Told], command: tuple[str, ...], started_at: str, accumulation: int
) -> Report:
    """Return the report of what ranks were seen to draw."""
    judged = judge_drawn(drawn, told, accumulation)
    return make_report(
        command=command,
        started_at=started_at,
        findings=judged.findings,
        checks=judged.checks,
        data={"verb": VERB, "drawn": encode(drawn)},
    )
