"""Trains in one of torch's ways to spread a model over ranks, or in all of them; the last rank may commit a fault.

Called as ``parallel.py KINDS FAULT [FOLDER]``: kinds with commas between, and "none" or what the last rank does.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS, FAULTY, MICROBATCHES = 4, 2, 4
FAULT = sys.argv[2]
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}

torch.set_num_threads(1)


def goes_astray(step):
    """Return whether the last rank leaves out a step; commit what other fault it is to commit."""
    if FAULT == "none" or step != FAULTY or dist.get_rank() != dist.get_world_size() - 1:
        return False
    if FAULT == "stuck":
        time.sleep(3600)  # FAULT
    if FAULT == "crash":
        raise ValueError("no such sample")  # FAULT
    if FAULT == "early-exit":
        sys.exit(0)  # FAULT
    return FAULT == "skip"


def drifts(step, net):
    """Change what the last rank holds of a parameter that others hold as well."""
    if FAULT == "param-drift" and step == FAULTY and dist.get_rank() == dist.get_world_size() - 1:
        bias = dict(net.named_parameters())["0.norm.bias"].detach()
        getattr(bias, "_local_tensor", bias).add_(1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stage(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        goes_astray(self.calls // MICROBATCHES)
        return super().forward(x)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def train(net, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(STEPS):
        torch.manual_seed(step)
        if goes_astray(step):
            continue
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        drifts(step, net)


def two_by(names):
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=names)


def sharded(mesh, plan=None):
    net = blocks()
    for block in net:
        if plan is not None:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"] if plan is not None else mesh)
    return fully_shard(net, mesh=mesh["dp"] if plan is not None else mesh)


def fsdp2():
    train(sharded(init_device_mesh("cpu", (dist.get_world_size(),))))


def hybrid():
    train(sharded(two_by(("replicate", "shard"))))


def fsdp_tensor():
    train(sharded(two_by(("dp", "tp")), PLAN))


def fsdp1():
    train(FullyShardedDataParallel(blocks(), device_id=torch.device("cpu")))


def tensor():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    net = blocks()
    parallelize_module(net, mesh, {f"{at}.{name}": style for at in range(2) for name, style in PLAN.items()})
    train(net)


def dtensor():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    for step in range(STEPS):
        if not goes_astray(step):
            weight = weight * weight.redistribute(mesh, [Replicate()]).to_local().mean()


def functions():
    for step in range(STEPS):
        if not goes_astray(step):
            summed = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
            functional.all_gather_single(summed + 1, 0, dist.group.WORLD).sum().item()


def compiled():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def summed(x):
        return functional.all_reduce(2 * x, "sum", dist.group.WORLD) + 1

    for _ in range(STEPS):
        assert summed(torch.ones(2)).tolist() == [2 * dist.get_world_size() + 1] * 2


def zero():
    net = DistributedDataParallel(blocks())
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01))


def pipeline():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    net = Stage()
    schedule = Schedule1F1B(
        PipelineStage(net, rank, last + 1, torch.device("cpu")),
        MICROBATCHES,
        loss_fn=lambda out, wanted: (out - wanted).mean(),
    )
    for _ in range(STEPS):
        schedule.step(*[torch.randn(4, 8)] * (rank == 0), target=torch.zeros(4, 8) if rank == last else None)


def saved():
    class Writer(checkpoint.FileSystemWriter):
        def write_data(self, plan, planner):
            goes_astray(FAULTY)
            return super().write_data(plan, planner)

    net = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    checkpoint.save({"model": net.state_dict()}, storage_writer=Writer(sys.argv[3]))
    checkpoint.load({"model": net.state_dict()}, checkpoint_id=sys.argv[3])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for kind in sys.argv[1].split(","):
        globals()[kind]()
    dist.barrier()
    dist.destroy_process_group()
