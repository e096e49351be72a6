"""Puts a job before all rules of consistency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.ruling import Ruling, run_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Check, Finding

CHECKS: tuple[Callable[[Job], Ruling], ...] = ()
"""The rules of this family, by code."""


def judge(job: Job) -> tuple[list[Finding], list[Check]]:
    """Return what the rules find in a job, and how each came out."""
    return run_rules(CHECKS, job)
