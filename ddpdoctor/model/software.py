"""Versions of what a job runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is installed, read from files and package metadata, without importing anything heavy."""

    python: str
    executable: str
    kernel: str
    """As uname -r says."""
    os_name: str
    """PRETTY_NAME of os-release, such as "Debian GNU/Linux 12 (bookworm)"; empty where there is none."""
    platform: str
    """As sys.platform says: linux, darwin."""
    wsl: bool
    container: str | None
    """docker, podman, kubernetes, lxc, apptainer, … where one is seen."""
    image: str | None
    """The container image, where it is known."""
    torch_version: str | None
    """From package metadata; None where torch is not installed."""
    nccl_wheel: str | None
    """Version of the nvidia-nccl-cu* wheel."""
    driver: str | None
    """NVIDIA kernel driver, of /proc/driver/nvidia/version."""
    driver_is_open: bool | None
    nvml_libraries: tuple[str, ...]
    """Paths of libnvidia-ml.so.* files; the name of each ends with its version."""
    ofed: str | None
    torch_cuda: str | None = None
    """The CUDA version that the installed torch asks for by its metadata, such as "12.8"; None where it names none."""
    gpu_devices: tuple[str, ...] = ()
    """Device files of GPUs that this machine or container has been given: /dev/nvidia0, /dev/kfd, /dev/dxg."""
    hosts_lines: tuple[str, ...] | None = None
    """A digest of each line of /etc/hosts, loopback addresses left out: comparable, and gives nothing away."""
    hosts_own: tuple[str, ...] = ()
    """Those of them that name this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """A GPU as torch sees it."""

    index: int
    name: str
    uuid: str | None
    """As NVML writes it, "GPU-…", where torch tells."""
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
    """What `import torch` gives, seen by a child process."""

    version: str
    import_error: str | None
    """The last line of the error where the import failed; the other fields are then empty."""
    cuda: str | None
    hip: str | None
    cuda_available: bool
    cuda_error: str | None
    """Why CUDA could not be initialised, as torch words it."""
    device_count: int
    devices: tuple[TorchDevice, ...]
    arch_list: tuple[str, ...]
    """What kernels are built for: "sm_90", "compute_90"."""
    nccl: str | None
    """The version that torch was built with, as "2.27.3"; None where NCCL is not built in."""
    nccl_libraries: tuple[str, ...]
    """Paths of libnccl that the process has mapped after the import."""
    gloo: bool
    peers: tuple[PeerAccess, ...]
    path: str | None = None
    """The file that `import torch` runs, where it was found."""
    nccl_loaded: str | None = None
    """The version that the mapped libnccl says it has; None where none is mapped."""
    nccl_found_by: str | None = None
    """LD_PRELOAD or LD_LIBRARY_PATH where one of them led to the mapped libnccl."""
    cuda_library: str | None = None
    """The libcuda that was mapped when CUDA was initialised."""
