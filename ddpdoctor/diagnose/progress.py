"""Reads a run folder and has the rules of progress judge it."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddpdoctor.collect.runfolder import read_job
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, Judgement, Outcome
from ddpdoctor.rules.progress.judge import judge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
        return judge(job)


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
