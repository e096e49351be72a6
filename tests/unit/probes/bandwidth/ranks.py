"""Runs a function of `rank_jobs` in real Gloo ranks on this machine."""

import json
from pathlib import Path
from typing import Any

from tests import forking
from tests.scenarios.running import clean_environment

ROOT = Path(__file__).parents[4]


def run_ranks(job: str, size: int, folder: Path) -> list[Any]:
    """Return what the job returned on each rank."""
    module = "tests.unit.probes.bandwidth.rank_jobs"
    ranks = [
        forking.start("-m", module, job, rank, size, folder, cwd=ROOT, env=clean_environment()) for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=forking.LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
