"""Reads a run folder and judges the job with the rules."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Job
from ddpdoctor.model.findings import Check, Judgment, Outcome
from ddpdoctor.model.garbage import no_collection
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.data.shared import Replicas, replicas_of
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.progress.job_state import Cause, JobState, build_job_state
from ddpdoctor.rules.progress.limits import is_limit_over
from ddpdoctor.rules.registry import rules_of
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.model.findings import Finding
    from ddpdoctor.rules.engine import Facts

Made = TypeVar("Made")
HANG_OPTION = "--hang-timeout"
_WRAP_ONLY = re.compile(r"--(?:allow-different|check-every|debug-level|on-hang|speed|no-consistency)\b")
"""Options of ``wrap`` that rules name and that other ways in do not have."""


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
    """Judge a job with all rules about progress, replicas and data, and about speed if the user asked for it."""
    rules = rules_of("progress", "consistency", "data", *(["speed"] if job.speed_asked else []))
    state = _attempt(lambda: build_job_state(job))
    facts: Facts = {
        JobState: state if isinstance(state, Exception) else [state],
        Job: [job],
        Replicas: _attempt(lambda: replicas_of(job)),
    }
    if job.speed_asked:
        facts = {**facts, SpeedState: _speed(job, state)}
    judged = judge(rules, facts)
    # A hang past torch's own time limit is final, because torch ends the job.
    over = judged.certain and not isinstance(state, Exception) and is_limit_over(state)
    judged = replace(judged, proven=judged.proven or over)
    return judged if job.entry == "wrap" else in_words_of(job.entry, judged)


def in_words_of(entry: str, judged: Judgment) -> Judgment:
    """Return a judgment that names settings as the way in has them. Rules name them as the options of ``wrap``."""

    def words(text: str) -> str:
        if entry == "pytest":
            return text.replace(HANG_OPTION, "--ddpdoctor-timeout")
        return text.replace(HANG_OPTION, f"hang_timeout of {entry}", 1).replace(HANG_OPTION, "hang_timeout")

    def advice(text: str) -> str:
        others = list(dict.fromkeys(_WRAP_ONLY.findall(text)))
        is_are = "is an option" if len(others) == 1 else "are options"
        return f"{words(text)} ({' and '.join(others)} {is_are} of `ddpdoctor wrap`)" if others else words(text)

    return replace(
        judged,
        findings=tuple(
            replace(one, summary=words(one.summary), evidence=tuple(map(words, one.evidence)), fix=advice(one.fix))
            for one in judged.findings
        ),
        checks=tuple(replace(one, reason=words(one.reason)) for one in judged.checks),
    )


def _speed(job: Job, state: JobState | Exception) -> list[SpeedState] | Unread | Exception:
    """Return what is known of a job's speed. A job that hung or failed has other trouble first."""
    if isinstance(state, JobState) and state.cause is not Cause.NONE:
        return Unread(why=Why.NEEDLESS, reason=state.cause.value)
    try:
        found = build_speed_state(job)
    except Exception as error:  # noqa: BLE001 - the wall around a rule: this is the part that rules share
        return error
    return found if isinstance(found, Unread) else [found]


def _attempt(build: Callable[[], Made]) -> Made | Exception:
    """Build the facts for some rules. If that raises, only the checks of these rules are crashed."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - the wall around a rule: this is the part that rules share
        return error
