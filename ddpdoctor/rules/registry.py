"""The rules by code and kind. A rule is a function; its docstring is the page that ``explain`` shows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Severity

FAMILIES = ("ddpdoctor.rules.progress.judge",)
"""Modules whose import registers a family of rules."""

Check = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong: its code and kind, how bad it is, its page, and the function that looks for it."""

    code: str
    kind: str
    severity: Severity
    summary: str
    page: str
    check: Check


_rules: dict[str, Rule] = {}


def rule(code: str, kind: str, severity: Severity, summary: str) -> Callable[[Check], Check]:
    """Register the decorated function as a rule. A code or kind that is taken, or a missing page, is a ValueError."""

    def register(check: Check) -> Check:
        page = inspect.cleandoc(check.__doc__ or "")
        if not page:
            raise ValueError(f"rule {code} has no docstring, which is its page")
        _refuse_reuse(code, kind)
        _rules[code] = Rule(code=code, kind=kind, severity=severity, summary=summary, page=page, check=check)
        return check

    return register


def _refuse_reuse(code: str, kind: str) -> None:
    if code in _rules:
        raise ValueError(f"code {code} is taken by the rule {_rules[code].kind}")
    for known in _rules.values():
        if known.kind == kind:
            raise ValueError(f"kind {kind} is taken by the rule {known.code}")


def all_rules() -> tuple[Rule, ...]:
    """Return every rule of every family, sorted by code."""
    for family in FAMILIES:
        importlib.import_module(family)
    return tuple(_rules[code] for code in sorted(_rules))


def rule_of(check: Check) -> Rule:
    """Return the rule that a function was registered as; KeyError where it was not."""
    for known in _rules.values():
        if known.check is check:
            return known
    raise KeyError(check.__qualname__)


def find_rule(code_or_kind: str) -> Rule | None:
    """Return the rule with this code (in any case) or kind, or None."""
    wanted = code_or_kind.strip().lower()
    for known in all_rules():
        if wanted in (known.code.lower(), known.kind):
            return known
    return None
