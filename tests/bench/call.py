"""What recording adds to one collective call: python -m tests.bench.call; half a minute.

An all_reduce of four floats in a Gloo group of one rank, through the recorded function and through the one that it
wraps, in blocks in turn. With one rank the network is in neither time. A call whose work is waited for is recorded
twice, once for the call and once for the wait, and has a line of its own.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpdoctor
from tests.bench.pairs import compare_added
from tests.scenarios.running import clean_environment, free_port

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = Path(ddpdoctor.__file__).parent
CALLS = 500
"""Calls in one block: some milliseconds, short beside the moments at which other processes come and go."""
BLOCKS = 5
"""Blocks that one measurement takes the fastest of."""
RANK_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def main() -> None:
    """Start this file again as a rank that is recorded."""
    compileall.compile_dir(str(PACKAGE), quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rings", "evidence"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "control").write_bytes(bytes(4096))
        recorded = {"DDPDOCTOR_RUN": folder, "DDPDOCTOR_AGENT": str(os.getpid()), "PYTHONPATH": str(_bootstrap())}
        env = clean_environment(**RANK_ALONE, **recorded, MASTER_PORT=str(free_port()))
        subprocess.run([sys.executable, "-m", "tests.bench.call", "rank"], check=True, env=env)


def _bootstrap() -> Path:
    return PACKAGE / "recorder" / "bootstrap"


def measure_as_rank() -> None:
    """Print what the record of a call costs."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.zeros(4)
    plain = dist.all_reduce.__wrapped__
    wait, plain_wait = dist.Work.wait, dist.Work.wait.__wrapped__

    def waiting(all_reduce: Callable[..., Any]) -> Callable[[], None]:
        return lambda: all_reduce(tensor, async_op=True).wait()

    def with_wait(method: Callable[..., Any], call: Callable[[], None]) -> float:
        dist.Work.wait = method
        return per_call_s(call)

    def compare(name: str, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
        compare_added(name, ours, theirs, unit="us", scale=1e6)

    compare(
        "the record of one all_reduce adds",
        lambda: per_call_s(lambda: dist.all_reduce(tensor)),
        lambda: per_call_s(lambda: plain(tensor)),
    )
    compare(
        "that of an asynchronous one and its wait",
        lambda: with_wait(wait, waiting(dist.all_reduce)),
        lambda: with_wait(plain_wait, waiting(plain)),
    )
    dist.Work.wait = wait
    dist.destroy_process_group()


def per_call_s(call: Callable[[], None]) -> float:
    """Return the time of one call in the fastest of some blocks."""
    return min(_block_s(call) for _ in range(BLOCKS)) / CALLS


def _block_s(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return time.perf_counter() - began


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        measure_as_rank()
    else:
        main()
