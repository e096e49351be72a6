"""DD102, DD103 and DD105: what torch was built for, and whether this machine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.reading import known
from ddpdoctor.model.software import release
from ddpdoctor.model.visible_devices import VARIABLE, read_visible
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.gpus import driver_of, imported_torch, nvidia_gpus
from ddpdoctor.rules.environment.links import AMD
from ddpdoctor.rules.environment.wheels import SELECTOR, install_cuda_torch
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.software import TorchBuild

AMD_COMPUTE_CLASSES = (0x0380, 0x1200)
"""Data-center GPUs: "display controller, other" and "processing accelerator". A laptop's GPU has class 0x0300."""


@rule(
    "DD102",
    "torch-cuda-build",
    Severity.ERROR,
    "A torch build without CUDA on a machine with GPUs",
    group=CheckGroup.VERSIONS,
    needs=("software", "torch", "gpus", "pci"),
    reads="torch.version.cuda and .hip, the GPUs that NVML lists, /dev/nvidia*, PCI",
)
def check_torch_cuda_build(node: Node) -> Answer:
    """Report a build of torch that cannot use the GPUs of this machine."""
    build = imported_torch(node)
    if build.hip:
        return passed(f"a build for ROCm {build.hip}")
    if all(read_visible(process.variables.get(VARIABLE), ()).on_purpose for process in node.processes):
        return skipped("CUDA_VISIBLE_DEVICES hides all GPUs")
    if build.cuda:
        return _amd_without_rocm(node, build) or passed(f"a build for CUDA {build.cuda}")
    count = nvidia_gpus(node)
    if not count:
        return _amd_without_rocm(node, build) or _gpu_without_driver(node) or passed("a CPU build, and no GPU here")
    problem = Problem(
        summary=f"torch {build.version} is a CPU build, so the GPUs here cannot be used, and there is no NCCL",
        evidence=(f"{count_of(count, 'NVIDIA GPU')}, driver {driver_of(node) or 'of unknown version'}",),
        fix=install_cuda_torch(node, build.version),
    )
    return judged([problem], f"torch {build.version} and {count} NVIDIA GPUs")


def _amd_without_rocm(node: Node, build: TorchBuild) -> Answer | None:
    pci, software = known(node.pci), known(node.software)
    devices = pci.devices if pci else ()
    found = [one for one in devices if one.vendor == AMD and one.device_class >> 8 in AMD_COMPUTE_CLASSES]
    if not found or software is None or "/dev/kfd" not in software.gpu_devices or nvidia_gpus(node):
        return None
    problem = Problem(
        summary=f"torch {build.version} has no ROCm, so the AMD GPUs here cannot be used",
        evidence=(f"AMD GPUs at {', '.join(one.bus_id for one in found)}, and /dev/kfd",),
        fix=f"install a ROCm build of torch with the command at {SELECTOR}",
    )
    return judged([problem], f"torch {build.version} and {len(found)} AMD GPUs")


def _gpu_without_driver(node: Node) -> Answer | None:
    gpus = known(node.gpus)
    on_bus = [gpu for gpu in gpus.on_bus if gpu.driver != "vfio-pci"] if gpus else []
    if not on_bus or driver_of(node):
        return None
    problem = Problem(
        summary="The NVIDIA GPU has no driver and torch is a CPU build, so jobs run on the CPUs",
        evidence=(f"a GPU at {on_bus[0].bus_id}, driver {on_bus[0].driver or 'none'}",),
        fix="to use the GPU, install the NVIDIA driver and a CUDA build of torch",
        severity=Severity.INFO,
    )
    return judged([problem], "a CPU build, and a GPU without a driver")


@rule(
    "DD103",
    "nccl-loaded",
    Severity.WARNING,
    "The loaded NCCL is not the one that torch was built with",
    group=CheckGroup.VERSIONS,
    needs=("torch",),
    reads="torch.cuda.nccl.version(), libnccl in /proc/self/maps, its ncclGetVersion, LD_PRELOAD, LD_LIBRARY_PATH",
)
def check_nccl_loaded(node: Node) -> Answer:
    """Report a loaded NCCL that is not the one that torch was built with."""
    build = imported_torch(node)
    if build.nccl is None:
        return skipped("torch is built without NCCL")
    if not build.nccl_libraries:
        return passed(f"NCCL {build.nccl}, part of torch itself")
    if len(build.nccl_libraries) > 1:
        return judged([_two_libraries(build)], f"libnccl from {' and '.join(build.nccl_libraries)}")
    path, loaded = build.nccl_libraries[0], build.nccl_loaded
    if loaded is None or loaded == build.nccl:
        return passed(f"NCCL {build.nccl} from {path}")
    problem = Problem(
        summary=f"torch was built with NCCL {build.nccl}, but NCCL {loaded} is loaded",
        evidence=_where_from(build),
        fix=_use_own_nccl(build),
        severity=Severity.INFO if _is_upgrade(build) else Severity.WARNING,
    )
    return judged([problem], f"NCCL {loaded} from {path}, built with {build.nccl}")


def _is_upgrade(build: TorchBuild) -> bool:
    newer = release(build.nccl_loaded) > release(build.nccl)
    return newer and "/nvidia/nccl/" in build.nccl_libraries[0] and build.nccl_found_by is None


def _two_libraries(build: TorchBuild) -> Problem:
    return Problem(
        summary=f"Two NCCL libraries are loaded into one process: {' and '.join(build.nccl_libraries)}",
        evidence=_where_from(build),
        fix=_use_own_nccl(build),
    )


def _where_from(build: TorchBuild) -> tuple[str, ...]:
    found = [f"mapped: {path}" for path in build.nccl_libraries]
    return (*found, f"found by {build.nccl_found_by}") if build.nccl_found_by else tuple(found)


def _use_own_nccl(build: TorchBuild) -> str:
    if build.nccl_found_by == "LD_PRELOAD":
        return "unset LD_PRELOAD"
    folder = build.nccl_libraries[0].rpartition("/")[0]
    if build.nccl_found_by == "LD_LIBRARY_PATH":
        return f"remove {folder} from LD_LIBRARY_PATH, at least for the job"
    if "/nvidia/nccl/" in folder:
        return "pip install --force-reinstall torch restores the NCCL that it was built with"
    return f"remove the libnccl in {folder}, or install NCCL {build.nccl} there"


@rule(
    "DD105",
    "hip-gpu-other",
    Severity.INFO,
    "torch is built for ROCm: checks of NVIDIA software do not apply",
    group=CheckGroup.VERSIONS,
    needs=("torch",),
    reads="torch.version.hip",
)
def check_hip_gpu_other(node: Node) -> Answer:
    """Report that torch is built for AMD GPUs, so checks of NVIDIA software are skipped."""
    build = imported_torch(node)
    if not build.hip:
        return skipped("torch is not built for ROCm")
    problem = Problem(
        summary=f"torch is built for ROCm {build.hip}: checks of the NVIDIA driver and GPUs do not apply",
        fix="use rocm-smi to check the GPUs",
    )
    return judged([problem], f"ROCm {build.hip}")
