"""Times a kernel of known length with the bench's own clocks, on the current stream and on one of its own."""

import time

import torch
from place import BACKEND, DEVICE, DRY, join, leave

from ddpdoctor.probes.bandwidth.group import RankGroup
from ddpdoctor.probes.bandwidth.timing import time_batches, time_calls
from ddpdoctor.probes.bandwidth.group import Tracker

CYCLES = 20_000_000
"""About 10 ms of an H200."""


def main():
    join(at_once=True)
    group = RankGroup(handle=None, ranks=(0,), device=torch.device(DEVICE), backend=BACKEND, tracker=Tracker())
    side = None if DRY else torch.cuda.Stream()

    def here(_async_op):
        time.sleep(0.01) if DRY else torch.cuda._sleep(CYCLES)

    def beside(_async_op):
        if DRY:
            time.sleep(0.01)
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
        torch.cuda.current_stream().wait_stream(side)

    found = {}
    for name, call in {"here": here, "beside": beside}.items():
        calls = iter([call] * 100)
        time_calls(group, "all_reduce", calls, 3)
        spans = {
            "calls": time_calls(group, "all_reduce", calls, 10),
            "batches": time_batches(group, "all_reduce", calls, 3, 10),
        }
        found[name] = {kind: {"device_us": one.times_us, "host_us": one.host_us} for kind, one in spans.items()}
    leave(found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
