"""Puts checkpoints before all rules of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.rules.answers import Answer
from ddpdoctor.rules.registry import rule_of

from . import beside, names, resume, values, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.model.checkpoint import Checkpoints
    from ddpdoctor.rules.registry import Rule

CHECKS: tuple[Callable[[Checkpoints], Answer], ...] = (
    whole.check_foreign,
    whole.check_damaged,
    whole.check_truncated,
    names.check_prefix,
    names.check_keys,
    values.check_values,
    resume.check_resume,
    beside.check_copies,
    beside.check_leftovers,
    resume.check_refusal,
    beside.check_parts,
)
"""The rules of this family, by code."""


def judge(seen: Checkpoints) -> Iterator[tuple[Rule, Answer]]:
    """Yield each rule with its answer. One that raises has crashed, and the others go on."""
    for check in CHECKS:
        try:
            answer = check(seen)
        except Exception as error:  # noqa: BLE001 - the wall around a rule
            answer = Answer(outcome=Outcome.CRASHED, seen=f"{type(error).__name__}: {error}")
        yield rule_of(check), answer
