"""Puts what `check-consistency` has trained before the rules that only such a trial can answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.ruling import Ruling, run_rules

from .reference import check_reference
from .repeat import check_repeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Check, Finding
    from ddpdoctor.model.trial import Trial

CHECKS: tuple[Callable[[Trial], Ruling], ...] = (check_reference, check_repeat)
"""The rules of this family, by code."""


def judge(trial: Trial) -> tuple[list[Finding], list[Check]]:
    """Return what the rules find in a trial, and how each came out."""
    return run_rules(CHECKS, trial)
