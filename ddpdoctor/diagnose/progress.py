"""Reads a run folder and has the rules judge the job."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Job
from ddpdoctor.model.findings import Check, Judgement, Outcome
from ddpdoctor.rules.data.replicas import Replicas, replicas_of
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.progress.limits import is_limit_over
from ddpdoctor.rules.progress.scene import Scene, build_scene
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ddpdoctor.model.findings import Finding
    from ddpdoctor.rules.engine import Facts

Made = TypeVar("Made")


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
        return judge(rules_of("consistency"), {Job: [read_job(folder)]}).findings
    except UserError:
        return ()


def judge_job(job: Job) -> Judgement:
    """Return what all rules say of a job: of its progress, of its replicas, of its data."""
    rules = rules_of("progress", "consistency", "data")
    scene = _attempt(lambda: build_scene(job))
    facts: Facts = {
        Scene: scene if isinstance(scene, Exception) else [scene],
        Job: [job],
        Replicas: _attempt(lambda: replicas_of(job)),
    }
    judged = judge(rules, facts)
    # torch's own time limit ends what hangs, whatever might have come in time.
    over = judged.certain and not isinstance(scene, Exception) and is_limit_over(scene)
    return replace(judged, proven=judged.proven or over)


def _attempt(build: Callable[[], Made]) -> Made | Exception:
    """Return what rules are to be asked about; what it raises instead makes their checks crashed, and no others."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - the wall around a rule: this is the part that rules share
        return error


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
