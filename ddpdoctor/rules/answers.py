"""What a rule answers: passed, failed, skipped or could not tell, and what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Outcome, Place, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong; the engine adds code and kind, and draws equal ones of several hosts together.

    In a rule over one node, ``summary`` and ``fix`` name no host, so that equal problems of several hosts are equal.
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
    where: tuple[Place, ...] = ()
    step: int | None = None
    tensor: str | None = None
    kind: str | None = None
    """The kind of another rule, under which the user looks for this one; None: that of the rule that found it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of one rule on what it was asked about."""

    outcome: Outcome
    seen: str
    """A phrase: what it saw, or why it could not look."""
    problems: tuple[Problem, ...] = ()
    certain: bool = False
    """The job hangs by all that was seen: every rank waits or stands still."""
    may_resume: bool = False
    """It may go on all the same: a sleep can end, a file can come, a frozen process can be continued."""


def passed(seen: str = "") -> Answer:
    """Say that nothing is wrong; ``seen`` says what was seen."""
    return Answer(outcome=Outcome.PASSED, seen=seen)


def skipped(reason: str) -> Answer:
    """Say that there is nothing to check here, or that it may not be read."""
    return Answer(outcome=Outcome.SKIPPED, seen=reason)


def unknown(reason: str) -> Answer:
    """Say that it should have been possible to tell, and was not."""
    return Answer(outcome=Outcome.INCONCLUSIVE, seen=reason)


def judged(problems: Iterable[Problem], seen: str = "", *, certain: bool = False, may_resume: bool = False) -> Answer:
    """Answer with these problems: failed, or passed where there are none."""
    found = tuple(problems)
    outcome = Outcome.FAILED if found else Outcome.PASSED
    return Answer(outcome=outcome, seen=seen, problems=found, certain=certain, may_resume=may_resume)
