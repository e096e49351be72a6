"""Orders findings, and picks the one to act on first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_STEP = 1 << 62
_KEEPS_FROM_STARTING = (
    "DD205", "DD206", "DD208", "DD207", "DD204", "DD231", "DD232", "DD216", "DD219", "DD235", "DD234", "DD233", "DD202",
    "DD211", "DD212", "DD201", "DD203", "DD213", "DD220", "DD215", "DD221",
)  # fmt: skip
"""Errors after which a job does not start, in the order in which it comes to them: where the store is, the store, who
comes to it, the address that each node publishes, the connections between them. They come before what spoils a job
that has started; each follows from those before it, where they are found of the same job."""
_FIRST_WITHIN_A_STEP = ("DD401", "DD402", "DD403", "DD404", "DD504", "DD503", "DD501", "DD505")
"""A wrong number spreads: non-finite and drifting gradients come before the drift of parameters that they cause.
Wrong data come before low figures, and a slow rank, link or node before the low figure of the whole that it causes."""


def order_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, worst first: the root cause of a hang or failure, then by severity, step and code."""
    return tuple(sorted(findings, key=_rank_of))


def pick_verdict(findings: Iterable[Finding]) -> Finding | None:
    """Return the worst error, else the worst warning, else None: an info is never the verdict."""
    for finding in order_findings(findings):
        return finding if finding.severity is not Severity.INFO else None
    return None


def _rank_of(finding: Finding) -> tuple[int, int, int, int, int, str]:
    ends_badly = finding.code.startswith("DD6") and finding.severity is Severity.ERROR
    step = _NO_STEP if finding.step is None or ends_badly else finding.step
    sureness = list(Confidence).index(finding.confidence)
    return (finding.severity.order, 0 if ends_badly else 1, step, _family_order(finding.code), sureness, finding.code)


def _family_order(code: str) -> int:
    if code in _KEEPS_FROM_STARTING:
        return _KEEPS_FROM_STARTING.index(code) - len(_KEEPS_FROM_STARTING)
    if code in _FIRST_WITHIN_A_STEP:
        return _FIRST_WITHIN_A_STEP.index(code)
    return len(_FIRST_WITHIN_A_STEP) if code.startswith("DD7") else len(_FIRST_WITHIN_A_STEP) + 1
