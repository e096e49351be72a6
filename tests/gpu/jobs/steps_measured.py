"""300 steps of DDP. The GPU has much to do and the host little, or with SEEDED=1 the other way round."""

import torch
import torch.distributed as dist
from place import DEVICE, DRY, SEEDED, STANDIN, join
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 300
IS_SMALL = DRY or STANDIN is not None


def make_net():
    if SEEDED:
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40 if DRY else 400))), 8
    width = 64 if IS_SMALL else 8192
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))), width


def main():
    join()
    torch.manual_seed(0)
    net, width = make_net()
    model = DDP(net.to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given = torch.randn(64 if SEEDED or IS_SMALL else 8192, width, device=DEVICE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
