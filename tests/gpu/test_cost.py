"""What the recorder adds to a step on a GPU: counted, and held to the count; times are saved and not judged."""

import pytest

from tests.gpu.judging import Ran, assert_looked_at, assert_silent
from tests.gpu.running import Done

MOST_A_BUCKET, MOST_A_STEP = 10, 10
"""Launches that a look at gradients may add: for each bucket, and once for inputs, loss, and the copy to the host."""
LAUNCHES = ("LaunchKernel", "Memcpy", "Memset")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@pytest.mark.gpu_job("overhead_plain", "overhead_off", "overhead_detail")
@pytest.mark.parametrize("gradients", ["plain", "views"])
def test_overhead(ran: Ran, gradients: str, *, dry: bool) -> None:
    """Two ranks, 300 parameters: launches, waits, step time and memory, with the recorder and without."""
    alone, watched = ran("overhead_plain"), ran("overhead_off")
    assert_looked_at(watched)
    assert_silent(ran("overhead_detail"))
    if not dry:
        assert_few_more(alone, watched, gradients)


def assert_few_more(alone: Done, watched: Done, gradients: str) -> None:
    one, other = alone.result[gradients], watched.result[gradients]
    more = launches(other["counts"]) - launches(one["counts"])
    assert launches(one["counts"]) > one["parameters"], "the profiler saw no launches"
    assert more <= MOST_A_BUCKET * max(1, other["buckets"]) + MOST_A_STEP, (one, other)
    assert waits(other["counts"]) <= waits(one["counts"]), (one, other)


def launches(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if any(kind in name for kind in LAUNCHES))


def waits(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if name in WAITS)
