"""An asynchronous reduction in a CUDA graph, while the work of one before the capture was never waited for."""

import torch
import torch.distributed as dist
from place import DEVICE, DRY, join, leave, settle


def main():
    join()
    value = torch.ones(1024, device=DEVICE)
    before = dist.all_reduce(torch.ones(4, device=DEVICE), async_op=True)
    dist.all_reduce(value, async_op=True).wait()  # connects
    settle()

    def reduce_and_add():
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        value.add_(1)

    value.zero_()
    if DRY:
        for _ in range(10):
            reduce_and_add()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reduce_and_add()
        for _ in range(10):
            graph.replay()
    settle()
    leave({"value": value[0].item(), "right": bool((value == 10).all())})
    before.wait()
    if not DRY:
        graph.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
