"""Runs a function of `rank_jobs` in real Gloo ranks on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
LIMIT_S = 250


def run_ranks(job: str, size: int, folder: Path) -> list[Any]:
    """Return what the job returned on each rank."""
    ranks = _start(job, size, folder)
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _start(job: str, size: int, folder: Path) -> list[subprocess.Popen[str]]:
    command = (sys.executable, "-m", "tests.unit.probes.bandwidth.rank_jobs", job)
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
