"""Forward, backward, reductions and step of DDP in one CUDA graph, after the 11 warm-ups that torch asks for."""

import os

import torch
import torch.distributed as dist
from place import DEVICE, DRY, join, leave, settle
from torch.nn.parallel import DistributedDataParallel as DDP

WARM_UPS, REPLAYS = 11, 10
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # torch's notes on graphs ask for it


def main():
    rank = join()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(DEVICE)
    given = torch.randn(16, 64, device=DEVICE)
    stream = None if DRY else torch.cuda.Stream()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = model(given).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        losses = [step().item() for _ in range(WARM_UPS)]
    settle()
    if DRY:
        losses += [step().item() for _ in range(REPLAYS)]
    else:
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(REPLAYS):
            graph.replay()
            losses.append(loss.item())
    settle()
    weights = net[0].weight.detach().clone()
    dist.all_reduce(weights)
    same = bool(torch.allclose(weights / 2, net[0].weight))
    if rank == 0:
        leave({"losses": losses, "same_weights": same})
    dist.barrier()
    settle()
    if not DRY:
        graph.reset()  # NCCL waits for the graphs that hold its collectives
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
