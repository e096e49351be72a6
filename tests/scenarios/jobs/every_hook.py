"""Uses all of torch that the recorder hooks into. With arguments, torch loses what they name, as "MODULE NAME"."""

import sys
from importlib.machinery import PathFinder

STRIPPED = dict(zip(sys.argv[1::2], sys.argv[2::2]))
find_spec = PathFinder.find_spec


def find_without(name, path=None, target=None):
    """Find a module that lacks something as soon as it has run, before anybody can see it."""
    spec = find_spec(name, path, target)
    if name in STRIPPED:
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            delattr(module, STRIPPED[name])

        spec.loader.exec_module = exec_module
    return spec


PathFinder.find_spec = find_without

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing.spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


def collectives(rank, world):
    ones = torch.ones(4)
    both = [torch.empty(4) for _ in range(world)]
    dist.all_reduce(ones, async_op=True).wait()
    dist.broadcast(ones, 0)
    dist.reduce(ones, 0)
    dist.all_gather(both, ones)
    dist.gather(ones, both if rank == 0 else None, 0)
    dist.scatter(ones, both if rank == 0 else None, 0)
    dist.all_to_all_single(torch.empty(world), torch.ones(world))
    dist.monitored_barrier()
    functional.all_reduce(ones, "sum", dist.group.WORLD).sum().item()
    work = dist.isend(ones, 1 - rank)
    dist.recv(torch.empty(4), 1 - rank)
    work.wait()
    swap = [dist.P2POp(dist.isend, ones, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()


def data_parallel(rank, world):
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    dataset = TensorDataset(torch.randn(32, 8))
    sampler = DistributedSampler(dataset, world, rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(dataset, 4, sampler=sampler, num_workers=1):
            optimizer.zero_grad()
            scaler.scale(net(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()


def meshes(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    net = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh, {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    distribute_module(nn.Linear(8, 8), mesh)
    fully_shard(nn.Linear(8, 8), mesh=mesh)  # torch 2.6 cannot train it on a CPU


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place = dist.get_rank(), dist.get_world_size()
    dist.barrier(dist.new_group())
    collectives(*place)
    data_parallel(*place)
    meshes(*place)
    dist.barrier()
    dist.destroy_process_group()
