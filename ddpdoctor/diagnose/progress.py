"""Reads a run folder and has the rules judge the job."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, Judgement, Outcome
from ddpdoctor.rules.consistency import judge as consistency
from ddpdoctor.rules.data import judge as data
from ddpdoctor.rules.progress import judge as progress
from ddpdoctor.rules.verdict import order_findings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Finding


def judge_folder(folder: Path, attempt: int | None = None) -> Judgement:
    """Return what is wrong with one attempt (by default the last) of the job that a run folder holds.

    A folder that cannot be read is a crashed check: a job that is watched must not suffer from it.
    """
    with _no_collection():
        try:
            job = read_job(folder, attempt)
        except UserError as error:
            check = Check(id="run-folder", outcome=Outcome.CRASHED, reason=error.message)
            return Judgement(findings=(), checks=(check,), certain=False)
        return judge_job(job)


def judge_replicas(folder: Path) -> tuple[Finding, ...]:
    """Return what is wrong with the replicas of the job that a run folder holds; nothing where it cannot be read."""
    try:
        found, _ = consistency.judge(read_job(folder))
    except UserError:
        return ()
    return order_findings(found)


def judge_job(job: Job) -> Judgement:
    """Return what all rules say of a job: of its progress, of its replicas, of its data."""
    judged = progress.judge(job)
    findings, checks = list(judged.findings), list(judged.checks)
    for family in (consistency, data):
        found, outcomes = family.judge(job)
        findings += found
        checks += outcomes
    return replace(judged, findings=order_findings(findings), checks=tuple(checks))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: of a thousand ranks all that is made is kept, and each look is at all of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
