"""Runs rules on facts, catches a rule that raises, turns answers into findings, and picks the verdict."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from ddpdoctor.model.findings import Check, Confidence, FaultOrigin, Finding, Judgment, Outcome, Severity
from ddpdoctor.model.node import Fleet, Node
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.rules.answers import Answer
from ddpdoctor.rules.registry import CheckGroup, find_rule, loaded_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.rules.registry import Rule


# The longest beginning that matches counts. A rank that is stuck, slow, killed or missing may be so for any reason.
ORIGINS = {
    "DD1": FaultOrigin.SETTINGS,
    "DD20": FaultOrigin.NETWORK, "DD21": FaultOrigin.NETWORK, "DD22": FaultOrigin.NETWORK, "DD23": FaultOrigin.SETTINGS,
    "DD30": FaultOrigin.MACHINE, "DD31": FaultOrigin.MACHINE, "DD32": FaultOrigin.MACHINE, "DD33": FaultOrigin.NETWORK,
    "DD305": FaultOrigin.SETTINGS, "DD306": FaultOrigin.SETTINGS,
    "DD401": FaultOrigin.MACHINE, "DD402": FaultOrigin.MACHINE, "DD403": FaultOrigin.NETWORK,
    "DD404": FaultOrigin.MACHINE, "DD405": FaultOrigin.NETWORK,
    "DD5": FaultOrigin.SCRIPT,
    "DD602": FaultOrigin.SCRIPT, "DD603": FaultOrigin.SCRIPT, "DD604": FaultOrigin.SCRIPT, "DD608": FaultOrigin.SCRIPT,
    "DD609": FaultOrigin.SCRIPT, "DD611": FaultOrigin.NETWORK,
    "DD7": FaultOrigin.SCRIPT,
    "DD8": FaultOrigin.SCRIPT,
}  # fmt: skip


_LAST = 1 << 62
# Findings that are not about speed come after those that are, which the user has asked for. Errors come first anyway.
_NO_SHARE = 1.0


def order_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, worst first: by severity, then causes of a hang or failure, then by step and rule order.

    Findings about speed are ordered by how much of the step they cost.
    """
    those = tuple(findings)
    places = _places() if len(those) > 1 else {}
    return tuple(sorted(those, key=lambda finding: _rank_of(finding, places)))


def pick_verdict(findings: Iterable[Finding]) -> Finding | None:
    """Return the worst error, else the worst warning, else None: an info is never the verdict."""
    return next((worst for worst in order_findings(findings)[:1] if worst.severity is not Severity.INFO), None)


def _rank_of(finding: Finding, places: Mapping[str, int]) -> tuple[int, int, float, int, int, int, str]:
    ends_badly = finding.code.startswith("DD6") and finding.severity is Severity.ERROR
    return (
        finding.severity.order,
        0 if ends_badly else 1,
        _NO_SHARE if finding.share is None else -finding.share,
        _LAST if finding.step is None or ends_badly else finding.step,
        places.get(finding.code, _LAST),
        list(Confidence).index(finding.confidence),
        finding.code,
    )


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules in their declared order. Rules outside that order come first, because they follow from none."""
    places = _places()
    return sorted(rules, key=lambda rule: (places.get(rule.code, -1), rule.code))


def _places() -> dict[str, int]:
    """Return for each rule the length of the longest chain of rules before it.

    A rule without predecessors and successors is left out: it comes last.
    """
    by_kind = {rule.kind: rule for rule in loaded_rules()}
    named = {kind for rule in by_kind.values() for kind in rule.after}

    @functools.cache
    def place(kind: str) -> int:
        return max((place(before) + 1 for before in by_kind[kind].after if before in by_kind), default=0)

    return {rule.code: place(kind) for kind, rule in by_kind.items() if rule.after or kind in named}


# For each type, the facts that rules are asked about, or why there are none, or the exception raised while reading
# them.
Facts: TypeAlias = Mapping[type, "Sequence[object] | Unread | Exception"]

# If a rule has several answers, the check's outcome is the first of these.
WORST_FIRST = (Outcome.FAILED, Outcome.CRASHED, Outcome.INCONCLUSIVE, Outcome.PASSED, Outcome.SKIPPED)


def judge(rules: Iterable[Rule], facts: Facts) -> Judgment:
    """Run every rule that takes facts of these types, and return their combined results.

    A rule that takes several types gets the first one in ``facts``. If a rule raises, its check counts as crashed, and
    the others still run.
    """
    given = {about.__name__: those for about, those in facts.items()}
    places = {group.value: at for at, group in enumerate(CheckGroup)}
    findings: list[Finding] = []
    checks: list[Check] = []
    answers: list[Answer] = []
    for rule in sorted(rules, key=lambda rule: (places.get(rule.group, len(places)), rule.code)):
        about = next((name for name in given if name in rule.checks), None)
        if about is None:
            continue
        heard = _answers(rule.checks[about], given[about])
        answers += [answer for _, answer in heard]
        findings += _draw_findings(rule, heard)
        came_out = [_outcome(rule, answer) for _, answer in heard]
        worst = min(came_out, key=WORST_FIRST.index, default=Outcome.SKIPPED)
        those = [pair for pair, outcome in zip(heard, came_out, strict=True) if outcome is worst]
        hosts = tuple(about.host for about, _ in those if isinstance(about, Node))
        seen = "; ".join(dict.fromkeys(answer.seen for _, answer in those if answer.seen))
        seen = seen if heard else "no node was seen"
        ran = worst in {Outcome.PASSED, Outcome.FAILED}
        checks.append(
            Check(
                id=rule.kind,
                code=rule.code,
                group=rule.group,
                outcome=worst,
                seen=seen if ran else "",
                reason="" if ran else seen,
                hosts=hosts if len(hosts) < len(heard) else (),
            )
        )
    certain = [answer for answer in answers if answer.certain and answer.problems]
    return Judgment(
        findings=order_findings(findings),
        checks=tuple(checks),
        certain=bool(certain),
        proven=any(not answer.may_resume for answer in certain),
    )


def fleet_facts(fleet: Fleet) -> Facts:
    """Return the facts that the rules of `check-env` judge."""
    return {Node: fleet.nodes, Fleet: [fleet]}


def crashed(error: Exception) -> Answer:
    """Return the answer of a rule that raised."""
    return Answer(outcome=Outcome.CRASHED, seen=f"{type(error).__name__}: {error}")


def _answers(check: Callable[..., Answer], facts: Sequence[object] | Unread | Exception) -> list[tuple[object, Answer]]:
    if isinstance(facts, Unread):
        return [(None, _missing(facts))]
    if isinstance(facts, Exception):
        return [(None, crashed(facts))]
    heard = []
    for fact in facts:
        try:
            answer = check(fact)
        except NotRead as missing:
            answer = _missing(missing.unread)
        except Exception as error:  # noqa: BLE001 - the wall around a rule
            answer = crashed(error)
        heard.append((fact, answer))
    return heard


def _missing(unread: Unread) -> Answer:
    broken = unread.why in {Why.TIMEOUT, Why.ERROR}
    return Answer(outcome=Outcome.INCONCLUSIVE if broken else Outcome.SKIPPED, seen=unread.reason)


def _outcome(rule: Rule, answer: Answer) -> Outcome:
    """Return the outcome of a check. A rule that found only notes has passed."""
    severities = {problem.severity or rule.severity for problem in answer.problems}
    return Outcome.PASSED if answer.outcome is Outcome.FAILED and severities == {Severity.INFO} else answer.outcome


def _draw_findings(rule: Rule, heard: list[tuple[object, Answer]]) -> list[Finding]:
    drawn: dict[object, Finding] = {}
    for about, answer in heard:
        for problem in answer.problems:
            named = (find_rule(problem.kind) if problem.kind is not None else None) or rule
            code = named.code
            # Where the faults of the rule lie, or None if its code does not determine it
            origin = next((ORIGINS[code[:length]] for length in (5, 4, 3) if code[:length] in ORIGINS), None)
            finding = Finding(
                code=code,
                kind=named.kind,
                severity=problem.severity or named.severity,
                confidence=problem.confidence,
                summary=problem.summary,
                ranks=problem.ranks,
                hosts=problem.hosts or ((about.host,) if isinstance(about, Node) else ()),
                where=problem.where,
                step=problem.step,
                tensor=problem.tensor,
                evidence=tuple(dict.fromkeys(problem.evidence)),
                fix=problem.fix,
                share=problem.share,
                origin=problem.origin or origin,
            )
            same = (finding.summary, finding.fix, finding.severity)
            key = same if isinstance(about, Node | Fleet) else len(drawn)
            former = drawn.get(key)
            if former is not None:
                ranks = tuple(sorted({*former.ranks, *finding.ranks}))
                finding = replace(former, ranks=ranks, hosts=tuple(dict.fromkeys([*former.hosts, *finding.hosts])))
            drawn[key] = finding
    return list(drawn.values())
