"""Reads software versions from files and package metadata, without importing the packages."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from typing import TYPE_CHECKING

from ddpdoctor.model.software import Software

if TYPE_CHECKING:
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

DRIVER_VERSION = "/proc/driver/nvidia/version"
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
)
"""Folders of the driver's libraries on distributions, WSL, NVIDIA's container runtime, GKE and NixOS."""
_NVML = re.compile(r"libnvidia-ml\.so\.\d{3}\.[\d.]+")
_GPU_DEVICE = re.compile(r"nvidia\d+|kfd|dxg")
_TORCH_CUDA = re.compile(
    r"^(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit(?:\[[^\]]*\])?)\s*\(?==\s*(\d+\.\d+)", re.IGNORECASE
)
"""A requirement that PyPI's wheels have, because their version has no "+cu130"."""
MOST_HOSTS_LINES = 1024
"""Our choice: enough for all hosts of a large cluster, but not for a list of blocked addresses."""
_LOOPBACK = ("127.", "::1", "fe00::", "ff00::", "ff02::")


def read_software(system: System, plan: ReadingPlan) -> Software:  # noqa: ARG001 - all collectors get both
    """Return the versions of the installed software."""
    driver, is_open = read_driver(system)
    torch_version, torch_cuda, nccl_wheel = _wheels() if system.live else (None, None, None)
    kernel = _kernel(system)
    hosts_lines, hosts_own = _digest_hosts(system)
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        kernel=kernel,
        os_name=_os_name(system),
        platform=system.calls.platform(),
        wsl="microsoft" in kernel.lower() or system.exists("/proc/sys/fs/binfmt_misc/WSLInterop"),
        container=container_kind(system),
        image=container_image(system),
        torch_version=torch_version,
        nccl_wheel=nccl_wheel,
        driver=driver,
        driver_is_open=is_open,
        nvml_libraries=_nvml_libraries(system),
        ofed=_ofed(system),
        torch_cuda=torch_cuda,
        gpu_devices=tuple(f"/dev/{name}" for name in system.names("/dev") if _GPU_DEVICE.fullmatch(name)),
        hosts_lines=hosts_lines,
        hosts_own=hosts_own,
    )


def _kernel(system: System) -> str:
    try:
        return system.calls.kernel()
    except OSError:
        return system.text_or("/proc/sys/kernel/osrelease")


def _os_name(system: System) -> str:
    for name in ("/etc/os-release", "/usr/lib/os-release"):
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)', system.text_or(name), re.MULTILINE)
        if match:
            return match.group(1)
    return ""


def read_driver(system: System) -> tuple[str | None, bool | None]:
    """Return the version of NVIDIA's kernel driver, and whether it is the open one, or None for both if not loaded."""
    line = next(iter(system.text_or(DRIVER_VERSION).splitlines()), "")
    match = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", f"{line} ")
    if not match:
        return None, None
    return match.group(1), "Open Kernel Module" in line


def _nvml_libraries(system: System) -> tuple[str, ...]:
    """Return the paths of NVML libraries, without links to them; folders that are the same place are read once."""
    folders = {system.path(folder).resolve(): folder for folder in reversed(LIBRARY_FOLDERS)}
    found = (
        f"{folder}/{name}" for folder in folders.values() for name in system.names(folder) if _NVML.fullmatch(name)
    )
    return tuple(sorted(found))


def _ofed(system: System) -> str | None:
    """Return the version of NVIDIA's (Mellanox's) out-of-tree drivers, or None with the kernel's own."""
    version = system.text_or("/sys/module/mlx5_core/version")
    kernel_own = not version or version == system.text_or("/proc/sys/kernel/osrelease")
    return None if kernel_own else version


def _digest_hosts(system: System) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return a digest of each line in /etc/hosts (None without the file), and the digests that name this host."""
    try:
        text = system.text("/etc/hosts")
        own = system.calls.hostname()
    except OSError:
        return None, ()
    lines, own_lines = set(), set()
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if names and not address.startswith(_LOOPBACK):
            digest = hashlib.sha256(f"{address} {' '.join(names)}".encode()).hexdigest()[:12]
            lines.add(digest)
            if own in names or own in names[0].split("."):
                own_lines.add(digest)
    return tuple(sorted(lines)[:MOST_HOSTS_LINES]), tuple(sorted(own_lines))


def _wheels() -> tuple[str | None, str | None, str | None]:
    """Return the versions of torch, of the CUDA that it requires, and of the NCCL wheel."""
    from importlib import metadata

    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None, None, None
    return torch.version, cuda_of_wheel(torch.version, torch.requires or ()), _nccl_wheel()


def cuda_of_wheel(version: str, requires: list[str] | tuple[str, ...]) -> str | None:
    """Return a wheel's CUDA version from "2.13.0+cu130" or its requirements, or None for other builds."""
    local = re.search(r"\+cu(\d{2})(\d)$", version)
    if local:
        return f"{local.group(1)}.{local.group(2)}"
    if "+" in version:
        return None
    matches = (_TORCH_CUDA.match(requirement) for requirement in requires)
    return next((match.group(1) for match in matches if match), None)


def _nccl_wheel() -> str | None:
    from importlib import metadata

    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_OF_CGROUP = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
)
"""Words in a cgroup path, which show the container if it has no cgroup namespace of its own."""


def container_kind(system: System) -> str | None:
    """Return "docker", "podman", "kubernetes", "apptainer" etc., or None if there is no sign of a container."""
    if system.env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if any(system.env.get(name) for name in _APPTAINER):
        return "apptainer"
    if system.exists("/run/.containerenv"):
        return "podman"
    if system.exists("/.dockerenv"):
        return "docker"
    # By systemd's convention, a container manager sets "container" in the first process's environment.
    said = system.env.get("container") or _first_process_says(system)
    return said or _from_cgroup(system.text_or("/proc/1/cgroup"))


def _first_process_says(system: System) -> str | None:
    match = re.search(r"(?:^|\0)container=([^\0]+)", system.text_or("/proc/1/environ"))
    return match.group(1) if match else None


def _from_cgroup(text: str) -> str | None:
    return next((kind for word, kind in _OF_CGROUP if re.search(rf"/[^\n]*{word}", text)), None)


def container_image(system: System) -> str | None:
    """Return the image's name if the runtime or the image itself reveals it."""
    for name in _APPTAINER:
        if system.env.get(name):
            return system.env[name]
    match = re.search(r'^image="?([^"\n]+)', system.text_or("/run/.containerenv"), re.MULTILINE)
    if match:
        return match.group(1)
    version = system.env.get("NVIDIA_PYTORCH_VERSION")
    return f"nvcr.io/nvidia/pytorch:{version}-py3" if version else None
