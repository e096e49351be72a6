"""DD301, DD302 and DD303: the NVIDIA driver, its libraries, and what torch has code for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.software import release
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.gpus import driver_of, imported_torch, nvidia_gpus
from ddpdoctor.rules.environment.launch import ranks_here
from ddpdoctor.rules.environment.wheels import SELECTOR, cuda_wheel, install_cuda_torch
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.software import TorchBuild, TorchDevice

MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""Lowest driver for a major version of CUDA.
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
VERSION_MISMATCH = "LIB_RM_VERSION_MISMATCH"
"""NVML's error 18, without its prefix."""


@rule(
    "DD301",
    "driver-min",
    Severity.ERROR,
    "The NVIDIA driver is too old for torch's CUDA version",
    group=CheckGroup.GPUS,
    needs=("software", "torch", "gpus"),
    reads="/proc/driver/nvidia/version or NVML, torch.version.cuda, the libcuda that is loaded",
)
def check_driver_min(node: Node) -> Answer:
    """Report a driver that is too old for torch's major version of CUDA."""
    if not nvidia_gpus(node):
        return skipped("this machine or container has no NVIDIA GPU")
    build, software, driver = known(node.torch), known(node.software), driver_of(node)
    if build is not None and build.hip:
        return skipped("torch is built for ROCm")
    cuda = (build.cuda if build else None) or (software.torch_cuda if software else None)
    if cuda is None or driver is None:
        return skipped("torch is not built for CUDA" if driver else "the driver version is unknown")
    seen = f"driver {driver}, torch built for CUDA {cuda}"
    least = MIN_DRIVER.get(release(cuda)[0])
    if (build is not None and build.cuda_available) or least is None or release(driver)[0] >= least:
        return passed(seen)
    return judged([_too_old(node, driver, cuda, least, build)], seen)


def _too_old(node: Node, driver: str, cuda: str, least: int, build: TorchBuild | None) -> Problem:
    software = known(node.software)
    version = (build.version if build else None) or (software.torch_version if software else None)
    older = cuda_wheel(version, driver)
    other = f", or {install_cuda_torch(node, version)}" if older else ""
    evidence = [f"CUDA says: {build.cuda_error}"] if build and build.cuda_error else []
    if build and build.cuda_library and "compat" in build.cuda_library:
        evidence.append(f"cuda-compat is in use ({build.cuda_library}) but does not help here")
    return Problem(
        summary=f"NVIDIA driver {driver} is too old for torch's CUDA {cuda}, which needs {least} or newer",
        evidence=tuple(evidence),
        fix=f"upgrade the driver to {least} or newer{other}",
    )


@rule(
    "DD302",
    "driver-lib-mismatch",
    Severity.ERROR,
    "The NVIDIA kernel driver and its libraries have different versions",
    group=CheckGroup.GPUS,
    needs=("software", "gpus"),
    reads="/proc/driver/nvidia/version, the names of libnvidia-ml.so.*, how NVML starts",
)
def check_driver_lib_mismatch(node: Node) -> Answer:
    """Report driver libraries whose version differs from the kernel module's."""
    gpus = known(node.gpus)
    if gpus is not None and gpus.init_error == VERSION_MISMATCH:
        return judged([_mismatch(node, "NVML says: driver/library version mismatch")], "NVML refuses to start")
    if gpus is not None and gpus.devices:
        return passed(f"NVML works with driver {driver_of(node)}")
    if not nvidia_gpus(node):
        return skipped("this machine or container has no NVIDIA GPU")
    software = need(node.software)
    versions = {path.rpartition(".so.")[2] for path in software.nvml_libraries}
    if software.driver is None or not versions:
        return skipped("the version of the driver or its libraries is unknown")
    seen = f"driver {software.driver}, libraries {' and '.join(sorted(versions))}"
    if software.driver in versions:
        return passed(seen)
    return judged([_mismatch(node, f"found: {', '.join(software.nvml_libraries)}")], seen)


def _mismatch(node: Node, evidence: str) -> Problem:
    software = known(node.software)
    driver = f" {software.driver}" if software and software.driver else ""
    reload = "sudo rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia && sudo modprobe nvidia nvidia_uvm"
    restart = " (in a container: restart it)" if software and software.container else ""
    return Problem(
        summary=f"The kernel has loaded NVIDIA driver{driver}, but its libraries have another version: no GPU works",
        evidence=(evidence,),
        fix=f"reboot, or, when no process uses the GPUs: {reload}{restart}",
    )


@rule(
    "DD303",
    "arch",
    Severity.ERROR,
    "torch has no kernels for a GPU of this node",
    group=CheckGroup.GPUS,
    needs=("torch", "software", "gpus"),
    reads="torch.cuda.get_arch_list(), torch.cuda.get_device_capability()",
)
def check_arch(node: Node) -> Answer:
    """Report a GPU that torch has no code for."""
    build = imported_torch(node)
    if build.hip or not build.cuda:
        return skipped("torch is not built for CUDA")
    if not build.devices or not build.arch_list:
        return skipped(build.cuda_error or "torch sees no GPU")
    unfit = [device for device in build.devices if not any(_runs_on(arch, device) for arch in build.arch_list)]
    seen = f"{', '.join(sorted({_capability(device) for device in build.devices}))} with {' '.join(build.arch_list)}"
    if not unfit:
        return passed(seen)
    needed = len(unfit) == len(build.devices) or any(device.index < ranks_here(node) for device in unfit)
    problem = Problem(
        summary=f"torch {build.version} has no kernels for {unfit[0].name} ({_capability(unfit[0])})",
        evidence=(
            f"GPUs {', '.join(str(device.index) for device in unfit)}",
            f"torch is built for {' '.join(build.arch_list)}",
        ),
        fix=_fit_arch(node, build, unfit),
        severity=Severity.ERROR if needed else Severity.WARNING,
    )
    return judged([problem], seen)


def _capability(device: TorchDevice) -> str:
    return f"sm_{device.capability[0]}{device.capability[1]}"


def _runs_on(arch: str, device: TorchDevice) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    kind, built, only = match.group(1), (int(match.group(2)), int(match.group(3))), match.group(4)
    if only == "a":
        return built == device.capability
    if kind == "sm" or only == "f":
        return built[0] == device.capability[0] and built[1] <= device.capability[1]
    return built <= device.capability


def _fit_arch(node: Node, build: TorchBuild, unfit: list[TorchDevice]) -> str:
    newest = max(
        (int(match.group(1)) for arch in build.arch_list if (match := re.search(r"_(\d+)\d[af]?$", arch))), default=0
    )
    if unfit[0].capability[0] > newest:
        return f"install a newer build: {install_cuda_torch(node, None)}"
    fit = [str(device.index) for device in build.devices if device not in unfit]
    if fit:
        return f"export CUDA_VISIBLE_DEVICES={','.join(fit)}"
    return f"install an older build of torch that still supports {_capability(unfit[0])}: {SELECTOR}"
