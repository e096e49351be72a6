"""Starts a bench again as ranks that are recorded, with no watcher beside them, and times blocks of calls in them."""

import compileall
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ddpdoctor
from tests.scenarios.running import clean_environment, free_port

PACKAGE = Path(ddpdoctor.__file__).parent
BLOCKS = 5
"""Blocks that one measurement takes the fastest of."""


def start_recorded(module: str, ranks: int, **env: str) -> None:
    """Run ``python -m module rank`` as so many recorded ranks; what rank 0 prints is shown."""
    compileall.compile_dir(str(PACKAGE), quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rings", "evidence"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "control").write_bytes(bytes(4096))
        job = {
            "DDPDOCTOR_RUN": folder, "DDPDOCTOR_AGENT": str(os.getpid()), "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": str(PACKAGE / "recorder" / "bootstrap"), "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF",
        }  # fmt: skip
        started = []
        for rank in range(ranks):
            own = clean_environment(**job, **env, RANK=str(rank), LOCAL_RANK=str(rank))
            out = subprocess.DEVNULL if rank else None
            started.append(subprocess.Popen([sys.executable, "-m", module, "rank"], env=own, stdout=out))
        statuses = [process.wait() for process in started]
        if any(statuses):
            sys.exit("a rank has failed")


def per_call_s(call: Callable[[], object], calls: int) -> float:
    """Return the time of one call in the fastest of some blocks of so many calls."""
    return min(_block_s(call, calls) for _ in range(BLOCKS)) / calls


def _block_s(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began
