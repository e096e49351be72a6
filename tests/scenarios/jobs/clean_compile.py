"""torch.compile around DDP with a static graph and activation checkpointing."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    train(DDP(Net(), static_graph=True), 20)
    train(torch.compile(DDP(torch.nn.Linear(8, 2))), 10)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
