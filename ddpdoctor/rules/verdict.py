"""Orders findings, and picks the one to act on first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.rules.registry import loaded_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.rules.registry import Rule

_NO_STEP = 1 << 62
_LAST = 1 << 62
_NO_SHARE = 1.0
"""Findings that are not about speed come after those that are, which the user has asked for. Errors come first anyway.
"""


def order_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, worst first: by severity, then causes of a hang or failure, then by step and rule order.

    Findings about speed are ordered by how much of the step they cost.
    """
    places = _places()
    return tuple(sorted(findings, key=lambda finding: _rank_of(finding, places)))


def pick_verdict(findings: Iterable[Finding]) -> Finding | None:
    """Return the worst error, else the worst warning, else None: an info is never the verdict."""
    for finding in order_findings(findings):
        return finding if finding.severity is not Severity.INFO else None
    return None


def _rank_of(finding: Finding, places: Mapping[str, int]) -> tuple[int, int, float, int, int, int, str]:
    ends_badly = finding.code.startswith("DD6") and finding.severity is Severity.ERROR
    step = _NO_STEP if finding.step is None or ends_badly else finding.step
    sureness = list(Confidence).index(finding.confidence)
    return (
        finding.severity.order,
        0 if ends_badly else 1,
        _NO_SHARE if finding.share is None else -finding.share,
        step,
        places.get(finding.code, _LAST),
        sureness,
        finding.code,
    )


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules in their declared order. Rules outside that order come first, because they follow from none."""
    places = _places()
    return sorted(rules, key=lambda rule: (places.get(rule.code, -1), rule.code))


def _places() -> dict[str, int]:
    """Return for each rule the length of the longest chain of rules that come before it.

    A rule that comes after none and before none is left out: it comes last.
    """
    by_kind = {rule.kind: rule for rule in loaded_rules()}
    named = {kind for rule in by_kind.values() for kind in rule.after}

    def place(rule: Rule) -> int:
        return max((place(by_kind[kind]) + 1 for kind in rule.after if kind in by_kind), default=0)

    return {rule.code: place(rule) for rule in by_kind.values() if rule.after or rule.kind in named}
