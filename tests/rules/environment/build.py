"""Makes nodes, fleets, networks, links and GPUs for tables, and asks one rule by its kind, as the engine does."""

from dataclasses import replace
from functools import cache

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.model.node import (
    Fleet,
    Gid,
    Gpu,
    Gpus,
    Interface,
    Launcher,
    Limit,
    Limits,
    Lookup,
    Names,
    Network,
    Node,
    NodeProcess,
    Pci,
    PciDevice,
    Rdma,
    RdmaDevice,
    RdmaPort,
    SharedMemory,
    Software,
    TorchBuild,
    TorchDevice,
    Volume,
)
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.registry import find_rule
from tests.machines import shared_machine
from tests.nvml import load_nvml


def process(rank=None, *, local_rank=None, pid=100, cpus=(0, 1), other_names=(), under_wrap=False, **variables):
    return NodeProcess(
        rank=rank, local_rank=rank if local_rank is None else local_rank, pid=pid, variables=variables,
        other_names=tuple(other_names), cpus=tuple(cpus), under_wrap=under_wrap,
    )  # fmt: skip


def node(host="node0", *, processes=(), index=0, **sections):
    return Node(host=host, index=index, processes=tuple(processes) or (process(),), **sections)


def fleet(*nodes, launcher=Launcher.NONE, world_size=None, nnodes=None, missing=()):
    return Fleet(nodes=nodes, launcher=launcher, world_size=world_size, nnodes=nnodes, missing=tuple(missing))


def judge_fleet(facts, rules):
    return judge(rules, fleet_facts(facts))


def ask(kind, facts):
    """Return what one rule says; ``facts`` is a node or a fleet."""
    return judge_fleet(facts if isinstance(facts, Fleet) else fleet(facts), [find_rule(kind)])


# Names and interfaces for tables, with a healthy machine as their default.


NO_PORT = Unread(why=Why.ABSENT, reason="MASTER_PORT is not set")


def interface(name="eth0", *addresses, up=True, operstate=None, carrier=True, virtual=False, mtu=1500):
    loopback = name == "lo"
    return Interface(
        name=name, up=up, operstate=operstate or ("up" if up else "down"), carrier=carrier, loopback=loopback,
        virtual=virtual or loopback, mtu=65536 if loopback else mtu, speed_mb_s=None,
        addresses=addresses or (("127.0.0.1/8", "::1/128") if loopback else ()), link_type=772 if loopback else 1,
    )  # fmt: skip


LO = interface("lo", operstate="unknown")


def network(*interfaces, default="eth0", ipv6_disabled=False, local_ports=(32768, 60999), port=NO_PORT, firewall=()):
    return Network(
        interfaces=(LO, *(interfaces or (interface("eth0", "10.0.0.4/24"),))), default_interface=default,
        ipv6_disabled=ipv6_disabled, local_ports=local_ports, master_port=port, firewall=firewall,
    )  # fmt: skip


def lookup(name, *addresses, error=None, timed_out=False, duration_s=0.001):
    if not addresses and error is None:
        error = "no answer within 2 s" if timed_out else "Name or service not known"
    return Lookup(name=name, addresses=addresses, error=error, timed_out=timed_out, duration_s=duration_s)


def names(*own, hostname="node0", fqdn=None, master=None, head=None, reverse_s=0.001, **more):
    return Names(
        hostname=hostname, fqdn=fqdn or hostname, own=lookup(hostname, *own, **more), master=master, head=head,
        reverse_s=reverse_s,
    )  # fmt: skip


# Healthy sections of a node, changed by what a row of a table says.


MIB, GIB = 1 << 20, 1 << 30


def software(**changes):
    return Software(**{
        "python": "3.12.4", "executable": "/venv/bin/python", "kernel": "6.8.0-60-generic",
        "os_name": "Ubuntu 24.04 LTS", "platform": "linux", "wsl": False, "container": None, "image": None,
        "torch_version": "2.13.0+cu130", "nccl_wheel": None, "driver": None, "driver_is_open": None,
        "nvml_libraries": (), "ofed": None, **changes,
    })  # fmt: skip


def torch(**changes):
    return TorchBuild(**{
        "version": "2.13.0+cu130", "import_error": None, "cuda": "13.0", "hip": None, "cuda_available": True,
        "cuda_error": None, "device_count": 0, "devices": (), "arch_list": (), "nccl": "2.27.3",
        "nccl_libraries": ("/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",), "gloo": True,
        "peers": (), "path": "/venv/lib/python3.12/site-packages/torch/__init__.py", "nccl_loaded": "2.27.3",
        **changes,
    })  # fmt: skip


def cpu_torch(**changes):
    return torch(**{
        "version": "2.13.0+cpu", "cuda": None, "cuda_available": False, "nccl": None, "nccl_libraries": (),
        "nccl_loaded": None, **changes,
    })  # fmt: skip


def device(index=0, capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
    return TorchDevice(index=index, name=name, uuid=f"GPU-{index}", capability=capability, memory_bytes=80 * GIB)


def gpus(count=1, *, name="NVIDIA H100 80GB HBM3", vbios="96.00", **changes):
    devices = tuple(
        Gpu(index=n, uuid=f"GPU-{n}", name=name, bus_id=f"0000:{n:02x}:00.0", vbios=vbios) for n in range(count)
    )
    return Gpus(**{
        "driver": "580.95.05", "cuda_driver": "13.0", "devices": devices, "pairs": (), "persistenced": True,
        "fabric_manager": None, **changes,
    })  # fmt: skip


def volume(path="/tmp", purpose="temporary files, cache, working directory", **changes):
    return Volume(**{
        "path": path, "purpose": purpose, "fstype": "ext4", "total_bytes": 500 * GIB, "free_bytes": 200 * GIB,
        "writable": True, "temporary": True, **changes,
    })  # fmt: skip


def shm(total=32 * GIB, *, free=None, writable=True, stale=(), stale_bytes=0, workers=0, error=None):
    mounted = volume(
        "/dev/shm", "shared memory", fstype="tmpfs", total_bytes=total, free_bytes=total if free is None else free,
        writable=writable, error=error,
    )  # fmt: skip
    return SharedMemory(volume=mounted, stale_files=stale, stale_bytes=stale_bytes, loader_workers=workers)


def limits(**changes):
    return Limits(**{
        "nofile": Limit(soft=1048576, hard=1048576), "memlock": Limit(soft=None, hard=None),
        "nproc": Limit(soft=500000, hard=500000), "user_processes": 300, "pids_max": None, "pids_current": None,
        "cpus_online": 64, "cpus_allowed": tuple(range(64)), "cpu_quota": None,
        "memory_total_bytes": 512 * GIB, "memory_available_bytes": 480 * GIB, "swap_total_bytes": 0,
        "memory_limit_bytes": None, "memory_used_bytes": None, "oom_kills": None, "shm": shm(),
        "volumes": (volume(),), "somaxconn": 4096, "numa_nodes": 2, "numa_balancing": 0, **changes,
    })  # fmt: skip


# PCI devices and RDMA devices for tables: healthy, changed by what a row says.


H100 = "NVIDIA H100 80GB HBM3"
ZEROS = {"link_downed": 0, "symbol_error": 0}
NO_RDMA = Unread(why=Why.ABSENT, reason="no RDMA device found")


def pci_device(bus_id, **changes):
    return PciDevice(**{
        "bus_id": bus_id, "vendor": 0x10DE, "device": 0x2330, "device_class": 0x030200, "numa_node": 0,
        "local_cpus": (0, 1, 2, 3), "width": 16, "max_width": 16, "speed_gt_s": 32.0, "max_speed_gt_s": 32.0,
        "acs_redirect": None, "upstream": (), **changes,
    })  # fmt: skip


def bridge(bus_id, **changes):
    return pci_device(bus_id, **{
        "vendor": 0x1000, "device": 0xC030, "device_class": 0x060400, "local_cpus": (),
        "acs_redirect": False, **changes,
    })  # fmt: skip


def nic(bus_id, **changes):
    return pci_device(bus_id, **{"vendor": 0x15B3, "device": 0x1021, "device_class": 0x020700, **changes})


def pci(*devices, model=H100, **changes):
    gpus = tuple(one.bus_id for one in devices if one.device_class in {0x030200, 0x030000} and one.vendor == 0x10DE)
    return Pci(**{
        "devices": devices, "iommu": False, "iommu_passthrough": False, "virtual_machine": False,
        "nvidia_proc_gpus": gpus, "models": dict.fromkeys(gpus, model), "numa_nodes": 2, **changes,
    })  # fmt: skip


def port(device, **changes):
    state, phys = changes.pop("state", "ACTIVE/LinkUp").split("/")
    rate = changes.pop("rate", 400.0)
    return RdmaPort(**{
        "device": device, "port": 1, "state": state, "phys_state": phys, "link_layer": "InfiniBand",
        "rate_gb_s": rate, "gids": (), "counters": ZEROS, "counters_later": ZEROS,
        "rate_text": f"{rate:g} Gb/sec (4X NDR)", **changes,
    })  # fmt: skip


OF_DEVICE = ("name", "bus_id", "board", "firmware", "uverbs", "netdevs", "virtual_function", "ports")


def hca(number=0, **changes):
    """Return a card of one port; what is no field of the device is one of its port."""
    own = {name: changes.pop(name) for name in OF_DEVICE if name in changes}
    name = own.get("name", f"mlx5_{number}")
    return RdmaDevice(**{
        "name": name, "bus_id": f"0000:{0x10 + number:02x}:00.0", "board": "MT_0000000838", "firmware": "28.43.2026",
        "ports": (port(name, **changes),), "uverbs": f"uverbs{number}", "netdevs": (f"net{number}",), **own,
    })  # fmt: skip


def gid(index, kind="IPv4", version="RoCE v2", netdev="net0"):
    text = {
        "IPv4": "0000:0000:0000:0000:0000:ffff:0a10:0001",
        "IPv6": "2001:0db8:0000:0000:0000:0000:0000:0001",
        "link-local": "fe80:0000:0000:0000:5aa2:e1ff:fe00:0010",
    }[kind]
    return Gid(index=index, gid=text, type=version, netdev=netdev)


GIDS = (
    gid(0, "link-local", "IB/RoCE v1"), gid(1, "link-local"), gid(2, "IPv4", "IB/RoCE v1"), gid(3, "IPv4"),
)  # fmt: skip


def roce(number=0, *, gids=GIDS, **changes):
    return hca(number, **{"link_layer": "Ethernet", "gids": gids, **changes})


def rdma(*devices, **changes):
    devices = devices or tuple(hca(number) for number in range(4))
    files = tuple(device.uverbs for device in devices if device.uverbs)
    return Rdma(**{
        "devices": devices, "peermem": True, "dmabuf": True, "uverbs": files, "uverbs_denied": (), "rdma_cm": True,
        "ipc_lock": False, **changes,
    })  # fmt: skip


# Nodes with GPUs, as the collectors read them from recorded machines, for tables of rules over GPUs.


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
