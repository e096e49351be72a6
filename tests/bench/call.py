"""What recording adds to one call and to one batch: python -m tests.bench.call; a minute.

First the record itself, in a Gloo group of one rank, around a call that does nothing: its code stays in the processor's
caches. Then real all_reduces of one element, of one rank and of two. Each of them waits for other threads and ranks,
and Python goes on with cold caches: the same record takes several times as long there. "In training" means that an
optimizer marks the steps; without one each collective ends a step, which is recorded too. A call whose work the script
waits for is recorded twice, once for the call and once for the wait.

Then batches of a DataLoader without workers over numbers, which are not even collated: with all that is noted of how
data is shared out, and without it (as under ``--no-consistency``).
"""

import compileall
import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ddpdoctor
from tests.bench.pairs import compare_added
from tests.scenarios.running import clean_environment, free_port

PACKAGE = Path(ddpdoctor.__file__).parent
CALLS, BLOCKS = 500, 5
"""Calls in one block: some milliseconds, short beside the moments at which other processes come and go; and blocks that
one measurement takes the fastest of."""
BATCHES, SIZE = 2000, 8
compare_us = partial(compare_added, unit="us", scale=1e6)


def main() -> None:
    """Measure in one recorded rank, then in two."""
    for ranks in (1, 2):
        start_recorded("calls", ranks)
        for every in ("50", "0"):
            start_recorded("batches", ranks, DDPDOCTOR_CHECK_EVERY=every)


def start_recorded(what: str, ranks: int, **env: str) -> None:
    """Run this module as so many recorded ranks, with no watcher beside them; what rank 0 prints is shown."""
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
            started.append(subprocess.Popen([sys.executable, "-m", "tests.bench.call", what], env=own, stdout=out))
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


def measure_calls() -> None:
    """Print what the record of a call costs."""
    import torch
    import torch.distributed as dist
    from _ddpdoctor_recorder import calls
    from _ddpdoctor_recorder.step_clock import clock
    from _ddpdoctor_recorder.storage import ring_layout

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, tensor = dist.get_world_size(), torch.zeros(1)
    plain = dist.all_reduce.__wrapped__
    wait, plain_wait = dist.Work.wait, dist.Work.wait.__wrapped__
    nothing = calls.wrap("all_reduce", _call_nothing, "tensor")

    def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
        def timed(method: Any, call: Callable[[], Any]) -> float:
            dist.Work.wait = method
            return per_call_s(call, CALLS)

        compare_us(f"ranks: {ranks}, {name}", lambda: timed(wait, ours), lambda: timed(plain_wait, theirs))

    if ranks == 1:
        compare("the record alone", lambda: nothing(tensor), lambda: _call_nothing(tensor))
    compare("all_reduce", lambda: dist.all_reduce(tensor), lambda: plain(tensor))
    clock.level = ring_layout.STEP_OPTIMIZER
    compare("all_reduce in training", lambda: dist.all_reduce(tensor), lambda: plain(tensor))
    compare(
        "asynchronous all_reduce in training, and its wait",
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: plain(tensor, async_op=True).wait(),
    )
    dist.Work.wait = wait
    dist.destroy_process_group()


def _call_nothing(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:  # noqa: FBT001, FBT002
    """Stand for all_reduce, with its arguments."""


def measure_batches() -> None:
    """Print what the record of a batch costs."""
    import torch.distributed as dist
    from _ddpdoctor_recorder.state import check_every
    from torch.utils.data import DataLoader, dataloader

    dist.init_process_group("gloo")
    iterator = dataloader._BaseDataLoaderIter
    places = [(iterator, "__next__"), (iterator, "_next_index"), (DataLoader, "__iter__")]
    ours = [getattr(*place) for place in places]

    def per_batch_s(functions: list[Any]) -> float:
        for place, function in zip(places, functions, strict=True):
            setattr(*place, function)
        batches = iter(DataLoader(range(BATCHES * SIZE), batch_size=SIZE, collate_fn=len))  # type: ignore[arg-type]
        next(batches)
        dist.barrier()
        began = time.perf_counter()
        for _ in batches:
            pass
        return (time.perf_counter() - began) / BATCHES

    compare_us(
        f"ranks: {dist.get_world_size()}, consistency: {bool(check_every())}, a batch of {SIZE}",
        lambda: per_batch_s(ours),
        lambda: per_batch_s([inspect.unwrap(function) for function in ours]),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    {"calls": measure_calls, "batches": measure_batches}.get("".join(sys.argv[1:]), main)()
