"""Reads a run folder and has the rules of progress judge it."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.collect.runfolder import read_job
from ddpdoctor.model.findings import Judgement
from ddpdoctor.rules.progress.judge import judge


def judge_folder(folder: Path, attempt: int | None = None) -> Judgement:
    """Return what is wrong with one attempt (by default the last) of the job that a run folder holds."""
    return judge(read_job(folder, attempt))
