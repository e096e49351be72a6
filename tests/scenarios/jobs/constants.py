"""Trains a model that was built on the meta device, where buffers keep what ``to_empty`` leaves until they are computed.

Called as ``constants.py KIND FAULT``: how the model is spread over ranks, and "none" or what the last rank does wrong:
"empty" computes no buffer, "other" computes another one.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KIND, FAULT = sys.argv[1:3]
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("inv_freq", torch.empty(8), persistent=False)

    def init(self, base):
        for layer in (self.up, self.down):
            layer.reset_parameters()
        if base:
            self.inv_freq.copy_(base ** -torch.arange(8.0))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x * self.inv_freq)))


class Net(nn.Module):
    """A model with all that ranks may rightly have for themselves: statistics, a seed, noise, a cache of other sizes."""

    def __init__(self, rank):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.BatchNorm1d(8)
        own = torch.Generator().manual_seed(rank)
        self.register_buffer("seed", torch.tensor(rank, device="cpu"))
        self.register_buffer("noise", torch.randn(8, generator=own, device="cpu"))
        self.register_buffer("table", torch.ones(4 + rank, device="cpu"))
        self.register_buffer("seen", torch.zeros((), device="cpu"))

    def forward(self, x):
        self.seen += x.sum().detach()
        x = self.norm(self.blocks(x))
        return x if KIND == "tensor" else x + self.noise  # what tensor parallel ranks compute must be the same


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    is_odd = rank == world - 1
    torch.manual_seed(0)
    with torch.device("meta"):
        net = Net(rank)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp" if KIND == "tensor" else "dp",))
    if KIND == "fsdp2":
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    for block in net.blocks:
        block.to_empty(device="cpu")
        if KIND != "fsdp2" or FAULT == "none" or not is_odd:
            block.init(1e4)
        else:
            block.init(0 if FAULT == "empty" else 5e5)
    net.norm.to_empty(device="cpu")
    net.norm.reset_parameters()
    if KIND == "fsdp1":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    if KIND == "tensor":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh, {f"blocks.{at}.{name}": style for at in range(2) for name, style in plan.items()})
    if FAULT != "none" and is_odd and KIND != "fsdp2":
        for name, buffer in net.named_buffers():
            if name.endswith("inv_freq"):
                buffer.copy_(5e5 ** -torch.arange(8.0))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(4):
        torch.manual_seed(step if KIND == "tensor" else 10 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
