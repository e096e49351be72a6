"""Has 8 reductions pending behind a kernel, asks each flight recorder of torch's and ours, and again once all is done."""

import json
import time

import torch
import torch.distributed as dist
from _ddpdoctor_recorder.state import here
from place import DEVICE, DRY, join, leave, settle
from torch._C import _distributed_c10d as native

DUMPS = {
    "nccl": lambda: native._dump_nccl_trace_json(),
    "any": lambda: native._dump_fr_trace_json(),
    "nccl2": lambda: native._dump_fr_trace_json(backend="nccl2"),
}
CYCLES = 6_000_000_000
"""About 3 s of an H200."""
WATCHDOG_S = 3
"""torch's watchdog notes what has completed every 0.1 s."""


def told_by(dump):
    """Return how many reductions a dump has, and the dump; or why there is none."""
    try:
        entries = json.loads(dump()).get("entries", [])
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, str(error)[:200])}
    return {"reductions": sum("all_reduce" in entry["profiling_name"] for entry in entries), "entries": entries}


def reported():
    return {"torch": {name: told_by(dump) for name, dump in DUMPS.items()}, "ours": here.queries["flight_recorder"]()}


def main():
    join(at_once=True)
    values = [torch.ones(number, device=DEVICE) for number in range(1, 9)]
    settle()
    if not DRY:
        torch.cuda._sleep(CYCLES)
    works = [dist.all_reduce(value, async_op=True) for value in values]
    pending = reported()
    for work in works:
        work.wait()
    settle()
    time.sleep(WATCHDOG_S)
    leave({"pending": pending, "completed": reported()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
