"""What recording adds to one collective call: python -m tests.bench.call; half a minute.

The first two lines are the record itself, in a real Gloo group of one rank, around a call that does nothing, so that
no thread of Gloo has a part in them. The other two are real all_reduces of four floats: each call wakes a thread and
waits for it, so that Python goes on with cold caches. A call whose work the script waits for is recorded twice, once
for the call and once for the wait.
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
    from _ddpdoctor_recorder import calls

    tensor = torch.zeros(4)
    plain = dist.all_reduce.__wrapped__
    wait, plain_wait = dist.Work.wait, dist.Work.wait.__wrapped__
    nothing = calls.wrap("all_reduce", _call_nothing, "tensor", p2p=False)

    def with_wait(method: Callable[..., Any], call: Callable[[], Any]) -> float:
        dist.Work.wait = method
        return per_call_s(call)

    def compare(name: str, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
        compare_added(name, ours, theirs, unit="us", scale=1e6)

    compare(
        "the record of one call takes",
        lambda: per_call_s(lambda: nothing(tensor)),
        lambda: per_call_s(lambda: _call_nothing(tensor)),
    )
    compare(
        "with the group and the operation named",
        lambda: per_call_s(lambda: nothing(tensor, op=dist.ReduceOp.SUM, group=dist.group.WORLD)),
        lambda: per_call_s(lambda: _call_nothing(tensor, op=dist.ReduceOp.SUM, group=dist.group.WORLD)),
    )
    compare(
        "a real all_reduce takes longer by",
        lambda: with_wait(wait, lambda: dist.all_reduce(tensor)),
        lambda: with_wait(plain_wait, lambda: plain(tensor)),
    )
    compare(
        "an asynchronous one and its wait, by",
        lambda: with_wait(wait, lambda: dist.all_reduce(tensor, async_op=True).wait()),
        lambda: with_wait(plain_wait, lambda: plain(tensor, async_op=True).wait()),
    )
    dist.Work.wait = wait
    dist.destroy_process_group()


def _call_nothing(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:  # noqa: FBT001, FBT002
    """Stand for all_reduce, with its arguments."""


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
