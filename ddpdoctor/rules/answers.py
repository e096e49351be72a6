"""What a rule answers (passed, failed, skipped or could not tell), and what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.findings import Confidence, FaultOrigin, Outcome, Place, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. The engine adds code and kind, and merges equal problems of several hosts.

    In a rule about one node, ``summary`` and ``fix`` name no host, so that several hosts can have equal problems.
    """

    summary: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    severity: Severity | None = None  # None: the rule's own severity
    confidence: Confidence = Confidence.HIGH
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()  # empty in a rule about one node: then it is that node
    where: tuple[Place, ...] = ()
    step: int | None = None
    tensor: str | None = None
    share: float | None = None  # how much of the step the fix recovers at most, 0 to 1, in rules about speed
    # Where the fault lies, if this problem knows better than its rule (``rules/engine.py``).
    origin: FaultOrigin | None = None
    # The kind of another rule, if the user would look for the problem there; None: the kind of this rule.
    kind: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of one rule for one set of facts."""

    outcome: Outcome
    seen: str  # a phrase: what the rule saw, or why it could not look
    problems: tuple[Problem, ...] = ()
    certain: bool = False  # everything seen says that the job hangs: every rank waits or makes no progress
    # The job may still go on: a sleep can end, a file can come, a frozen process can be continued.
    may_resume: bool = False


def passed(seen: str = "") -> Answer:
    """Answer that nothing is wrong; ``seen`` is what was seen."""
    return Answer(outcome=Outcome.PASSED, seen=seen)


def skipped(reason: str) -> Answer:
    """Answer that there is nothing to check here, or that it may not be read."""
    return Answer(outcome=Outcome.SKIPPED, seen=reason)


def unknown(reason: str) -> Answer:
    """Answer that the rule should have been able to decide, but could not."""
    return Answer(outcome=Outcome.INCONCLUSIVE, seen=reason)


def judged(problems: Iterable[Problem], seen: str = "", *, certain: bool = False, may_resume: bool = False) -> Answer:
    """Answer with these problems: failed, or passed if there are none."""
    found = tuple(problems)
    outcome = Outcome.FAILED if found else Outcome.PASSED
    return Answer(outcome=outcome, seen=seen, problems=found, certain=certain, may_resume=may_resume)


def found(summary: str, seen: str = "", **fields: Any) -> Answer:
    """Answer with one problem; ``fields`` are the other fields of ``Problem``."""
    return judged([Problem(summary=summary, **fields)], seen)
