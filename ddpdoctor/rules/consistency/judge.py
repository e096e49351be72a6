"""Puts a job before all rules of consistency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.ruling import Ruling, run_rules

from .buffers import check_buffers
from .drift import check_parameters
from .gradients import check_gradients
from .nonfinite import check_local_gradients
from .optimizers import check_optimizers
from .randomness import check_random_state
from .stale import check_stale_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Check, Finding

CHECKS: tuple[Callable[[Job], Ruling], ...] = (
    check_parameters,
    check_buffers,
    check_gradients,
    check_local_gradients,
    check_optimizers,
    check_random_state,
    check_stale_optimizer,
)
"""The rules of this family, by code."""


def judge(job: Job) -> tuple[list[Finding], list[Check]]:
    """Return what the rules find in a job, and how each came out."""
    return run_rules(CHECKS, job)
