"""What a job of many ranks takes: its records once, and the members of its groups once for all."""

import gc
import sys
import tracemalloc
from pathlib import Path
from types import FrameType

from ddpdoctor.collect import recorded
from ddpdoctor.collect.run.nodes import read_job
from tests.synthetic import Job, write_gathered

STEPS = 270
RECORDS = 7 * STEPS


def bytes_a_rank(folder: Path, world: int) -> float:
    """Return what the facts of each rank take at the peak of reading a job of two hosts."""
    write_gathered(folder, Job(world=world, steps=STEPS, situation="stuck", tp=4), hosts=2, skew_ns=10**9)
    gc.collect()
    tracemalloc.start()
    try:
        job = read_job(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(job.ranks) == world
    assert all(len(rank.recent_calls) > RECORDS for rank in job.ranks)
    return peak / world


def test_the_records_of_a_rank_are_in_memory_once(tmp_path: Path) -> None:
    # Two times and a number of 8 bytes and a kind of 2 make 49 KB; steps, stacks and notes take 40 KB.
    assert bytes_a_rank(tmp_path, 64) < 2.5 * RECORDS * (8 + 8 + 8 + 2)


def values_read(folder: Path, world: int) -> int:
    """Return how many values of notes and answers are read in a job of plain data parallelism."""
    write_gathered(folder, Job(world=world, steps=1, situation="stuck", tp=0), hosts=2)
    entered = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal entered
        entered += event == "call" and frame.f_code is recorded._read.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read_job(folder)
    finally:
        sys.setprofile(before)
    return entered


def test_cost_grows_with_the_ranks_and_not_with_their_pairs(tmp_path: Path) -> None:
    assert values_read(tmp_path / "many", 192) < 3.3 * values_read(tmp_path / "few", 64)
