"""Makes 8 reductions, then asks each flight recorder of torch's, and ours, which of them it has."""

import json

import torch
import torch.distributed as dist
from _ddpdoctor_recorder.state import describers
from place import DEVICE, join, leave, settle
from torch._C import _distributed_c10d as native

DUMPS = {
    "nccl": lambda: native._dump_nccl_trace_json(),
    "any": lambda: native._dump_fr_trace_json(),
    "nccl2": lambda: native._dump_fr_trace_json(backend="nccl2"),
}


def told_by(dump):
    """Return the names and states in a dump, or why there is none."""
    try:
        entries = json.loads(dump()).get("entries", [])
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, str(error)[:200])}
    return {"names": sorted({entry["profiling_name"] for entry in entries}), "entries": entries[-10:]}


def ours():
    """Return what goes into the evidence."""
    (describe,) = [describe for name, describe in describers.items() if name.startswith("flight")]
    return describe()


def main():
    join()
    value = torch.ones(4, device=DEVICE)
    for _ in range(7):
        dist.all_reduce(value)
    settle()
    works = [dist.all_reduce(value, async_op=True)]
    leave({"torch": {name: told_by(dump) for name, dump in DUMPS.items()}, "ours": ours()})
    works[0].wait()
    settle()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
