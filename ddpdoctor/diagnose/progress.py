"""Reads a run folder and judges the job with the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Job
from ddpdoctor.model.findings import Check, Judgment, Outcome
from ddpdoctor.model.garbage import no_collection
from ddpdoctor.rules.data.shared import Replicas, replicas_of
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.progress.job_state import JobState, build_job_state
from ddpdoctor.rules.progress.limits import is_limit_over
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.model.findings import Finding
    from ddpdoctor.rules.engine import Facts

Made = TypeVar("Made")


def judge_folder(folder: Path, attempt: int | None = None) -> Judgment:
    """Judge one attempt (by default the last) of the job in a run folder.

    An unreadable folder becomes a crashed check, because errors must not affect a watched job.
    """
    with no_collection():
        try:
            job = read_job(folder, attempt)
        except UserError as error:
            check = Check(id="run-folder", outcome=Outcome.CRASHED, reason=error.message)
            return Judgment(findings=(), checks=(check,), certain=False)
        return judge_job(job)


def judge_replicas(folder: Path) -> tuple[Finding, ...]:
    """Return the findings about the replicas of the job in a run folder, or nothing if it cannot be read."""
    try:
        return judge(rules_of("consistency"), {Job: [read_job(folder)]}).findings
    except UserError:
        return ()


def judge_job(job: Job) -> Judgment:
    """Judge a job with all rules about progress, replicas and data."""
    rules = rules_of("progress", "consistency", "data")
    state = _attempt(lambda: build_job_state(job))
    facts: Facts = {
        JobState: state if isinstance(state, Exception) else [state],
        Job: [job],
        Replicas: _attempt(lambda: replicas_of(job)),
    }
    judged = judge(rules, facts)
    # A hang past torch's own time limit is final, because torch ends the job.
    over = judged.certain and not isinstance(state, Exception) and is_limit_over(state)
    return replace(judged, proven=judged.proven or over)


def _attempt(build: Callable[[], Made]) -> Made | Exception:
    """Build the facts for some rules. If that raises, only the checks of these rules are crashed."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - the wall around a rule: this is the part that rules share
        return error
