"""Runs the rules of `check-env` over a fleet and draws their answers together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Check, Finding, Outcome
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.rules.answers import Answer, Problem, outcome_of
from ddpdoctor.rules.registry import Group, Scope, find_rule
from ddpdoctor.rules.verdict import order_findings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.node import Fleet, Node
    from ddpdoctor.rules.registry import Rule

WORST_FIRST = (Outcome.FAILED, Outcome.CRASHED, Outcome.INCONCLUSIVE, Outcome.PASSED, Outcome.SKIPPED)
"""Of several nodes' answers to one rule, the first of these is the check's outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """All findings, worst first, and an outcome for every rule, by group and code."""

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]


def judge_fleet(fleet: Fleet, rules: Iterable[Rule]) -> Judged:
    """Ask every rule. One that raises becomes a crashed check, and the others go on. Checks come out by group."""
    findings: list[Finding] = []
    checks: list[Check] = []
    for rule in sorted(rules, key=_group_order):
        answers = _ask(rule, fleet)
        checks.append(_draw_check(rule, answers, fleet))
        findings += _draw_findings(rule, answers)
    return Judged(findings=order_findings(findings), checks=tuple(checks))


def _group_order(rule: Rule) -> tuple[int, str]:
    assert rule.environment is not None
    return list(Group).index(rule.environment.group), rule.code


def _ask(rule: Rule, fleet: Fleet) -> list[tuple[Node | None, Answer]]:
    """Return the answers of a rule: one a node, or one of the whole fleet."""
    assert rule.environment is not None
    if rule.environment.scope is Scope.FLEET:
        return [(None, _answer(rule, fleet))]
    return [(node, _answer(rule, node)) for node in fleet.nodes]


def _answer(rule: Rule, facts: Fleet | Node) -> Answer:
    try:
        answer: Answer = rule.check(facts)
    except NotRead as missing:
        return _missing(missing.unread)
    except Exception as error:  # noqa: BLE001 - the wall around a rule
        return Answer(outcome=Outcome.CRASHED, seen=f"{type(error).__name__}: {error}")
    return answer


def _missing(unread: Unread) -> Answer:
    broken = unread.why in {Why.TIMEOUT, Why.ERROR}
    return Answer(outcome=Outcome.INCONCLUSIVE if broken else Outcome.SKIPPED, seen=unread.reason)


def _draw_check(rule: Rule, answers: list[tuple[Node | None, Answer]], fleet: Fleet) -> Check:
    """Draw one check from the answers of all nodes: the worst outcome, and where it was."""
    assert rule.environment is not None
    came_out = [outcome_of(answer, rule.severity) for _, answer in answers]
    worst = min(came_out, key=WORST_FIRST.index, default=Outcome.SKIPPED)
    those = [one for one, outcome in zip(answers, came_out, strict=True) if outcome is worst]
    hosts = tuple(node.host for node, _ in those if node is not None)
    seen = "; ".join(dict.fromkeys(answer.seen for _, answer in those if answer.seen)) or "no node was seen"
    ran = worst in {Outcome.PASSED, Outcome.FAILED}
    return Check(
        id=rule.kind,
        code=rule.code,
        group=rule.environment.group.value,
        outcome=worst,
        seen=seen if ran else "",
        reason="" if ran else seen,
        hosts=hosts if len(hosts) < len(fleet.nodes) else (),
    )


def _draw_findings(rule: Rule, answers: list[tuple[Node | None, Answer]]) -> list[Finding]:
    """Draw together problems that say the same of several hosts."""
    drawn: dict[tuple[object, ...], Finding] = {}
    for node, answer in answers:
        for problem in answer.problems:
            finding = _finding(rule, problem, node)
            key = (finding.summary, finding.fix, finding.severity)
            former = drawn.get(key)
            drawn[key] = finding if former is None else _join(former, finding)
    return list(drawn.values())


def _finding(rule: Rule, problem: Problem, node: Node | None) -> Finding:
    named = find_rule(problem.kind) if problem.kind is not None else None
    return Finding(
        code=(named or rule).code,
        kind=(named or rule).kind,
        severity=problem.severity or rule.severity,
        confidence=problem.confidence,
        summary=problem.summary,
        ranks=problem.ranks,
        hosts=problem.hosts or ((node.host,) if node is not None else ()),
        evidence=problem.evidence,
        fix=problem.fix,
    )


def _join(one: Finding, other: Finding) -> Finding:
    return replace(
        one,
        ranks=tuple(sorted({*one.ranks, *other.ranks})),
        hosts=tuple(dict.fromkeys([*one.hosts, *other.hosts])),
    )
