"""What the recorder adds to a step on a GPU: counted, and held to the count; times are saved and not judged."""

import pytest

from tests.gpu.judging import Ran, assert_looked_at, assert_recorded, report_of

LAUNCHES = ("LaunchKernel", "Memcpy", "Memset")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
EVENTS = ("cudaEventCreate", "cudaEventRecord", "cudaEventQuery", "cudaStreamWaitEvent", "cudaStreamQuery")
MEMORY = ("cudaMalloc", "cudaFree", "cudaHostAlloc")
MOST = {"quiet": (20, 0, 8), "compared": (90, 2, 8)}
"""Launches, waits and calls for events that may be added to a step of 300 parameters in one bucket.

The step is one that is not looked at, but for whether its gradients are finite, or one in which replicas are compared.
"""


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
            added = [total(after, names) - total(before, names) for names in (LAUNCHES, WAITS, EVENTS, MEMORY)]
            # On a GPU the profiler also sees the queries of NCCL's watchdog, which are many in a long step.
            counted = [0, 1, 2, 3] if alone["standin"] else [0, 1]
            assert all(added[one] <= (*most, 0)[one] for one in counted), (name, step, before, after)


def total(counts: dict[str, int], names: tuple[str, ...]) -> int:
    return sum(count for name, count in counts.items() if any(one in name for one in names))
