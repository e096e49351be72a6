"""What recording adds to one batch of a DataLoader: python -m tests.bench.batch; ten seconds.

A loader without workers over numbers, whose batches are not even collated, in one recorded rank and in two at once:
with all that is noted of how data is shared out, and without it (as under ``--no-consistency``).
"""

import inspect
import sys
import time
from typing import Any

from tests.bench.pairs import compare_added
from tests.bench.ranks import start_recorded

BATCHES = 2000
SIZE = 8


def main() -> None:
    """Measure in one recorded rank, then in two."""
    for ranks in (1, 2):
        for every in ("50", "0"):
            start_recorded("tests.bench.batch", ranks, DDPDOCTOR_CHECK_EVERY=every)


def measure_as_rank() -> None:
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

    compare_added(
        f"ranks: {dist.get_world_size()}, consistency: {bool(check_every())}, a batch of {SIZE}",
        lambda: per_batch_s(ours),
        lambda: per_batch_s([inspect.unwrap(function) for function in ours]),
        unit="us",
        scale=1e6,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        measure_as_rank()
    else:
        main()
