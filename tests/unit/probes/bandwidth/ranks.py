"""Runs a function of `rank_jobs` in real Gloo ranks on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.forking import Forked

ROOT = Path(__file__).parents[4]


def run_ranks(job: str, size: int, folder: Path) -> list[Any]:
    """Return what the job returned on each rank."""
    module = "tests.unit.probes.bandwidth.rank_jobs"
    ranks = [Forked("-m", module, job, rank, size, folder, cwd=ROOT, merged=True) for rank in range(size)]
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
