"""What a rule of `check-env` answers: passed, failed, skipped or could not tell, and what it saw."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.model.findings import Confidence, Outcome, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong; the engine adds code and kind, and draws equal ones of several hosts together.

    ``summary`` and ``fix`` name no host, so that equal problems of several hosts are equal.
    """

    summary: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    severity: Severity | None = None
    """None: the rule's own."""
    confidence: Confidence = Confidence.HIGH
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    """Empty in a rule over one node: that node."""
    tensor: str | None = None
    kind: str | None = None
    """The kind of another rule, under which the user looks for this one; None: that of the rule that found it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of one rule on one node or fleet. ``seen`` is a phrase: what it saw, or why it could not look."""

    outcome: Outcome
    seen: str
    problems: tuple[Problem, ...] = ()


def passed(seen: str) -> Answer:
    """Say that nothing is wrong; ``seen`` says what was seen."""
    return Answer(outcome=Outcome.PASSED, seen=seen)


def skipped(reason: str) -> Answer:
    """Say that there is nothing to check here, or that it may not be read."""
    return Answer(outcome=Outcome.SKIPPED, seen=reason)


def unknown(reason: str) -> Answer:
    """Say that it should have been possible to tell, and was not."""
    return Answer(outcome=Outcome.INCONCLUSIVE, seen=reason)


def outcome_of(answer: Answer, severity: Severity) -> Outcome:
    """Return how a check came out whose rule has this severity: a check that found only notes has passed."""
    severities = {problem.severity or severity for problem in answer.problems}
    return Outcome.PASSED if answer.outcome is Outcome.FAILED and severities == {Severity.INFO} else answer.outcome


def judged(problems: tuple[Problem, ...] | list[Problem], seen: str) -> Answer:
    """Answer with these problems: failed, or passed where there are none."""
    outcome = Outcome.FAILED if problems else Outcome.PASSED
    return Answer(outcome=outcome, seen=seen, problems=tuple(problems))
