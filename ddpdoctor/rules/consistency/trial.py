"""Puts what `check-consistency` has trained before the rules that only such a trial can answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.rules.progress.differences import find_difference
from ddpdoctor.rules.progress.groups import group_table
from ddpdoctor.rules.progress.models import check_models, tell_models
from ddpdoctor.rules.registry import rule_of
from ddpdoctor.rules.ruling import Ruling, run_rule, run_rules

from .reference import check_reference
from .repeat import check_repeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Check, Finding
    from ddpdoctor.model.trial import Trial

CHECKS: tuple[Callable[[Trial], Ruling], ...] = (check_reference, check_repeat)
"""The rules of this family, by code."""


def judge(trial: Trial) -> tuple[list[Finding], list[Check]]:
    """Return what the rules find in a trial, and how each came out."""
    return run_rules(CHECKS, trial)


def judge_models(job: Job) -> tuple[list[Finding], list[Check]]:
    """Return whether all ranks have built the same model (DD506), in a trial that did not come to DDP's constructor."""
    ruling, outcome = run_rule(replace(rule_of(check_models), check=_compare_models), job)
    return list(ruling.findings), [outcome]


def _compare_models(job: Job) -> Ruling:
    world = len(job.ranks)
    difference = find_difference(job.ranks, group_table(job), world)
    if difference is None:
        return Ruling()
    hosts = {rank.host for rank in job.ranks}
    blamed = tuple(dict.fromkeys(rank.host for rank in job.ranks if rank.rank in difference.blamed))
    return Ruling(findings=(tell_models(difference, world, blamed if len(hosts) > 1 else ()),))
