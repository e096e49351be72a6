"""Puts a job before all rules of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.ruling import Ruling, run_rules

from .duplicates import check_duplicates
from .epochs import check_epochs
from .shards import check_shards
from .uneven import check_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Check, Finding

CHECKS: tuple[Callable[[Job], Ruling], ...] = (check_duplicates, check_epochs, check_shards, check_batches)
"""The rules of this family, by code."""


def judge(job: Job) -> tuple[list[Finding], list[Check]]:
    """Return what the rules find in a job, and how each came out."""
    return run_rules(CHECKS, job)
