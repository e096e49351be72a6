"""Versions of the software that a job runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The installed software, read from files and package metadata without heavy imports."""

    python: str
    executable: str
    kernel: str
    """The output of uname -r."""
    os_name: str
    """PRETTY_NAME of os-release, such as "Debian GNU/Linux 12 (bookworm)"; empty if there is none."""
    platform: str
    """sys.platform: linux, darwin."""
    wsl: bool
    container: str | None
    """docker, podman, kubernetes, lxc, apptainer, … or None if none is detected."""
    image: str | None
    """The container image, if known."""
    torch_version: str | None
    """From package metadata, or None if torch is not installed."""
    nccl_wheel: str | None
    """Version of the nvidia-nccl-cu* wheel."""
    driver: str | None
    """Version of the NVIDIA kernel driver, from /proc/driver/nvidia/version."""
    driver_is_open: bool | None
    nvml_libraries: tuple[str, ...]
    """Paths of libnvidia-ml.so.* files. Each name ends with the version."""
    ofed: str | None
    torch_cuda: str | None = None
    """The CUDA version that the metadata of the installed torch requires, such as "12.8", or None if it names none."""
    gpu_devices: tuple[str, ...] = ()
    """Device files of GPUs in this machine or container: /dev/nvidia0, /dev/kfd, /dev/dxg."""
    hosts_lines: tuple[str, ...] | None = None
    """A digest of each line of /etc/hosts except loopback addresses. Digests can be compared and reveal nothing."""
    hosts_own: tuple[str, ...] = ()
    """The digests of the lines that name this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """A GPU from torch's view."""

    index: int
    name: str
    uuid: str | None
    """In NVML's notation, "GPU-…", or None if torch does not provide it."""
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """Whether torch says that one GPU can reach the memory of another directly."""

    source: int
    target: int
    possible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Facts that a child process reads from an imported torch."""

    version: str
    import_error: str | None
    """The last line of the error if the import failed. The other fields are empty then."""
    cuda: str | None
    hip: str | None
    cuda_available: bool
    cuda_error: str | None
    """torch's message about why CUDA could not be initialized, or how the process ended that did it."""
    device_count: int
    devices: tuple[TorchDevice, ...]
    arch_list: tuple[str, ...]
    """The architectures that kernels are built for: "sm_90", "compute_90"."""
    nccl: str | None
    """The version that torch was built with, such as "2.27.3", or None without NCCL."""
    nccl_libraries: tuple[str, ...]
    """Paths of the libnccl files that the process maps after the import."""
    gloo: bool
    peers: tuple[PeerAccess, ...]
    path: str | None = None
    """The file that `import torch` runs, if it was found."""
    nccl_loaded: str | None = None
    """The version that the mapped libnccl reports, or None if none is mapped."""
    nccl_found_by: str | None = None
    """LD_PRELOAD or LD_LIBRARY_PATH if one of them selected the mapped libnccl."""
    cuda_library: str | None = None
    """The libcuda that was mapped when CUDA was initialized."""
    cuda_stuck: bool = False
    """Whether the process that initialized CUDA hung or died in it."""


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers that a version starts with: (2, 13, 0) for "2.13.0+cu130", (580, 95, 5) for "580.95.05"."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()
