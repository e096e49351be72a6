"""Healthy sections of a node, changed by what a row of a table says."""

from ddpdoctor.model.node import Gpu, Gpus, Limit, Limits, SharedMemory, Software, TorchBuild, TorchDevice, Volume

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
