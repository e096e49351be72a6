"""Nodes with GPUs, as the collectors read them from recorded machines, for tables of rules over GPUs."""

from dataclasses import replace
from functools import cache

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.model.node import Pci, PciDevice, TorchBuild, TorchDevice
from tests.machines import shared_machine
from tests.nvml import load_nvml
from tests.rules.environment.build import node, process


@cache
def _read(machine, states, files):
    *_, gpus = read_gpu_facts(load_nvml(machine, *states), shared_machine(machine, *files))
    return gpus


def gpus_of(*states, machine="nvlink8", files=()):
    """Return what NVML says of a recorded machine in these states."""
    return _read(machine, states, tuple(files))


def gpu_node(*states, machine="nvlink8", files=(), host="dgx01", ranks=0, variables=None, **sections):
    """Return a node with so many ranks under torchrun, or with one process and no launcher."""
    gpus = gpus_of(*states, machine=machine, files=files)
    return node(host, processes=torchrun(ranks, **(variables or {})), **{"gpus": gpus, **sections})


def torchrun(ranks, **variables):
    if not ranks:
        return (process(**variables),)
    both = {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "x", **variables}
    return tuple(process(rank, pid=4300 + rank, RANK=str(rank), LOCAL_RANK=str(rank), **both) for rank in range(ranks))


def with_gpu(gpus, index, **fields):
    """Return the facts with one GPU changed."""
    devices = tuple(replace(gpu, **fields) if gpu.index == index else gpu for gpu in gpus.devices)
    return replace(gpus, devices=devices)


def all_named(gpus, name):
    return replace(gpus, devices=tuple(replace(gpu, name=name) for gpu in gpus.devices))


def torch_of(gpus, *, count=None, cuda="13.0", cuda_error=None, peers=()):
    """Return what torch finds where it sees all GPUs, or ``count`` of them."""
    count = len(gpus.devices) if count is None else count
    devices = tuple(
        TorchDevice(index=gpu.index, name=gpu.name, uuid=gpu.uuid, capability=(9, 0), memory_bytes=2**36)
        for gpu in gpus.devices[:count]
    )
    return TorchBuild(
        version="2.13.0", import_error=None, cuda=cuda, hip=None, cuda_available=count > 0, cuda_error=cuda_error,
        device_count=count, devices=devices, arch_list=("sm_90",), nccl="2.29.3", nccl_libraries=(), gloo=True,
        peers=tuple(peers),
    )  # fmt: skip


def pci_of(*, switches=0, virtual=False):
    devices = tuple(
        PciDevice(
            bus_id=f"0000:0{5 + index}:00.0", vendor=0x10DE, device=0x22A3, device_class=0x068000, numa_node=0,
            local_cpus=(), width=2, max_width=2, speed_gt_s=16.0, max_speed_gt_s=16.0, acs_redirect=None, upstream=(),
        )
        for index in range(switches)
    )  # fmt: skip
    return Pci(devices=devices, iommu=False, iommu_passthrough=False, virtual_machine=virtual, nvidia_proc_gpus=())
