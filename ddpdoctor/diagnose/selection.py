"""Selects rules of `check-env` by kind, by code, or by the beginning of codes."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.rules.registry import Rule

CLOSENESS = 0.5
"""The least similarity, on difflib's scale from 0 to 1, at which a name is suggested for an unknown one."""
LIST_HINT = "`ddpdoctor check-env --list` lists them all."


def choose_rules(wanted: Iterable[str], unwanted: Iterable[str]) -> tuple[Rule, ...]:
    """Return the wanted rules (all if none are named) without the unwanted, in the order of their codes.

    Raises ``UserError`` for an unknown name, and if no rule is left.
    """
    rules = rules_of("environment")
    chosen = _find_all(wanted, rules) or {rule.code for rule in rules}
    left = chosen - _find_all(unwanted, rules)
    if not left:
        raise UserError("no check is left: --skip leaves out all of them", help=LIST_HINT)
    return tuple(rule for rule in rules if rule.code in left)


def sections_of(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the sections of a node that these rules need."""
    return frozenset(section for rule in rules for section in rule.needs)


def _find_all(names: Iterable[str], rules: tuple[Rule, ...]) -> set[str]:
    each = [name.strip() for entry in names for name in entry.split(",") if name.strip()]
    return {code for name in each for code in _find(name, rules)}


def _find(name: str, rules: tuple[Rule, ...]) -> set[str]:
    """Find the codes for a kind, a code, or the beginning of a code such as DD1."""
    prefix = re.fullmatch(r"DD\d{0,3}", name.upper())
    found = {rule.code for rule in rules if rule.kind == name.lower()}
    if prefix:
        found |= {rule.code for rule in rules if rule.code.startswith(name.upper())}
    if found:
        return found
    near = difflib.get_close_matches(name.lower(), [rule.kind for rule in rules], cutoff=CLOSENESS)
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    raise UserError(f"there is no check {name}", help=hint + LIST_HINT)
