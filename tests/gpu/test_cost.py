"""What the recorder adds to a step on a GPU: counted, and held to the count; times are saved and not judged."""

import pytest

from tests.gpu.judging import Ran, assert_looked_at, assert_recorded, report_of

LAUNCHES = ("LaunchKernel", "Memcpy", "Memset")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
EVENTS = ("cudaEventCreate", "cudaEventRecord", "cudaStreamWaitEvent")
QUERIES = ("cudaEventQuery", "cudaStreamQuery")
MEMORY = ("cudaMalloc", "cudaFree", "cudaHostAlloc")
MOST = {"quiet": (20, 0, 8), "compared": (90, 2, 8)}
"""Launches, waits and calls for events that may be added to a step of 300 parameters in one bucket.

The step is one that is not looked at, but for whether its gradients are finite, or one in which replicas are compared.
"""
MOST_QUERIES = 4
OWN_QUERIES = 8
"""Queries of events that may be added, none of which waits. Where torch itself queries as it takes the norms of a list,
so many more for each of those: 2.15 copies such a list from pinned memory, and asks before the next copy which earlier
ones have ended. 2.14 does not. Seen were 2 with 2.14, and 6 to 10 with 2.15."""


@pytest.mark.gpu_job("overhead_plain", "overhead_off", "overhead_speed", "overhead_detail")
@pytest.mark.parametrize("gradients", ["plain", "views"])
def test_overhead(ran: Ran, gradients: str, *, dry: bool) -> None:
    """Two ranks, 300 parameters: launches, waits, events, allocations, step time, with the recorder and without."""
    alone = ran("overhead_plain").result
    assert_looked_at(ran("overhead_off"))
    for name in ("overhead_off", "overhead_speed", "overhead_detail"):
        assert_recorded(report_of(ran(name)))
        for step, most in MOST.items() if not dry else ():
            before, after = (one[gradients]["counts"][step] for one in (alone, ran(name).result))
            assert total(before, LAUNCHES) > alone[gradients]["parameters"], "no launches were seen"
            own = total(alone[gradients]["counts"]["norms"], QUERIES)
            added = [total(after, names) - total(before, names) for names in (LAUNCHES, WAITS, EVENTS, MEMORY, QUERIES)]
            # On a GPU the profiler also sees the queries of NCCL's watchdog, which are many in a long step.
            counted = range(5) if alone["standin"] else [0, 1]
            limits = (*most, 0, MOST_QUERIES + OWN_QUERIES * own)
            assert all(added[one] <= limits[one] for one in counted), (name, step, added, limits, before, after)


def total(counts: dict[str, int], names: tuple[str, ...]) -> int:
    return sum(count for name, count in counts.items() if any(one in name for one in names))
