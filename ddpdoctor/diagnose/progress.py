"""Reads a run folder and has the rules of progress judge it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.runfolder import read_job
from ddpdoctor.rules.progress.judge import judge

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Judgement


def judge_folder(folder: Path, attempt: int | None = None) -> Judgement:
    """Return what is wrong with one attempt (by default the last) of the job that a run folder holds."""
    return judge(read_job(folder, attempt))
