"""The command line as a user has it, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forking

ROOT = Path(__file__).parents[2]
CLEARED = re.compile(
    r"^(DDPDOCTOR|SLURM|PET|TORCHELASTIC|TORCH_DISTRIBUTED|MASTER|OMPI|PMI|NCCL|GLOO)_"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|COLUMNS|NO_COLOR)$"
)


@pytest.fixture
def run(tmp_path):
    """Run ddpdoctor outside any launcher."""

    def run_in(*args, **env):
        clean = {name: value for name, value in os.environ.items() if not CLEARED.search(name)}
        clean = {**clean, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", **env}
        words = ("-m", "ddpdoctor", *map(str, args))
        if not any(name.startswith("PYTHON") for name in env):
            return forking.run(*words, cwd=tmp_path, env=clean)
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200, check=False
        )

    return run_in
