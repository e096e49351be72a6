"""Puts the arithmetic of an epoch before all rules that can go by it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.data.judge import CHECKS as OF_WHAT_WAS_SEEN
from ddpdoctor.rules.registry import rule_of

from . import batches, known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.sharing import Shares
    from ddpdoctor.rules.answers import Answer
    from ddpdoctor.rules.registry import Rule

CHECKS = (batches.check_last_batch, batches.check_accumulation)
"""The rules of this family, by code."""
_BY_CODE = {
    "DD701": known.judge_duplicates,
    "DD703": known.judge_gaps,
    "DD704": known.judge_batches,
}
"""What the arithmetic says of rules that go by what was seen."""


def judge(shares: Shares) -> Iterator[tuple[Rule, Answer]]:
    """Yield each rule with what it says."""
    for rule in map(rule_of, OF_WHAT_WAS_SEEN):
        if rule.code in _BY_CODE:
            yield rule, _BY_CODE[rule.code](shares)
    for check in CHECKS:
        yield rule_of(check), check(shares)
