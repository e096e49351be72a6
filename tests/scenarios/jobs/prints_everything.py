"""Writes what jobs write, on both streams: bytes, a bar without an end of line, warnings; ends as it is reported to."""

import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1), device_ids=None)
    warnings.warn("of the script", stacklevel=1)
    dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(dist.get_world_size()))
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        sys.stderr.write(f"\r{step} of 3")
        sys.stderr.flush()
    sys.stdout.buffer.write(bytes(range(256)))
    sys.stdout.flush()
    print("no end of line", end="", flush=True)
    try:
        dist.all_reduce("no tensor")
    except TypeError:
        import traceback

        traceback.print_exc()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()
    how = os.environ["ENDS"]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError(how)
    sys.exit(int(how))


if __name__ == "__main__":
    main()
