"""DD101 to DD106 and DD301 to DD303: the versions of torch, NCCL and the driver, and whether they are compatible."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.launch import VARIABLE, read_visible
from ddpdoctor.model.node import release
from ddpdoctor.model.reading import Unread, Why, known, need
from ddpdoctor.model.words import count_of, grouped
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.environment.gpus import MISMATCH, driver_of, imported_torch, nvidia_gpus
from ddpdoctor.rules.environment.launch import ranks_here
from ddpdoctor.rules.environment.links import AMD
from ddpdoctor.rules.majority import compare_nodes, describe, disagreement
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.node import ExpectedVersion, Fleet, Gpu, Node, Software, TorchBuild, TorchDevice


INDEX = "https://download.pytorch.org/whl/"
SELECTOR = "https://pytorch.org/get-started/locally"
# Index, lowest driver, and the first and last torch in that index: https://pytorch.org/get-started/previous-versions. A
# build for CUDA 12.8 runs on driver 525 too, but such a driver fits a build for 12.6 better.
CUDA_WHEELS = (
    ("cu130", 580, (2, 9), None),
    ("cu128", 570, (2, 7), (2, 11)),
    ("cu126", 525, (2, 6), None),
    ("cu118", 450, (2, 0), (2, 7)),
)


def pip(node: Node) -> str:
    """Return the beginning of a pip command for the Python that ran the check."""
    software = known(node.software)
    return f"{software.executable if software else 'python'} -m pip install"


def cuda_wheel(version: str | None, driver: str | None) -> str | None:
    """Return the index whose build of a torch version fits a driver, or None if no build does."""
    torch, major = release(version)[:2], (release(driver) or (0,))[0]
    for index, lowest, first, last in CUDA_WHEELS:
        fits = not torch or (torch >= first and (last is None or torch <= last))
        if fits and major >= lowest and (torch or last is None):
            return index
    return None


def install_cuda_torch(node: Node, version: str | None) -> str:
    """Return the command that installs a CUDA build of a torch version, or of the newest one."""
    driver = driver_of(node)
    index = cuda_wheel(version, driver)
    if index is None:
        return f"upgrade the NVIDIA driver ({driver or 'unknown version'}), then install a CUDA build: {SELECTOR}"
    plain = ".".join(str(part) for part in release(version))
    # Without the local version, pip would accept an installed CPU build.
    wanted = torch_package(f"{plain}+{index}") if plain else f"torch --index-url {INDEX}{index}"
    return f"{pip(node)} {wanted}"


def install_torch(node: Node) -> str:
    """Return the command that installs torch on a machine that has none."""
    if nvidia_gpus(node):
        return install_cuda_torch(node, None)
    software = known(node.software)
    if software is not None and software.platform == "darwin":
        return f"{pip(node)} torch"
    return f"{pip(node)} torch --index-url {INDEX}cpu"


def torch_package(version: str) -> str:
    """Return what pip installs a version of torch from: PyPI has no version with a local part, such as +cu130."""
    local = re.search(r"\+(cpu|cu\d+|rocm[\d.]+)$", version)
    return f"torch=={version}" + (f" --index-url {INDEX}{local.group(1)}" if local else "")


_INSTALLED = ("site-packages", "dist-packages")


@rule(
    "DD101", "torch-import", Severity.ERROR, "torch is missing or cannot be imported", group=CheckGroup.VERSIONS,
    needs=("software", "torch"), reads="`import torch` in a child process; with --no-torch, the package metadata",
)  # fmt: skip
def check_torch_import(node: Node) -> Answer:
    """Report that `import torch` fails in this Python, with the last line of the error."""
    torch = node.torch
    if isinstance(torch, Unread) and torch.why is Why.NOT_ASKED:
        version = need(node.software).torch_version
        return passed(f"torch {version} is installed; it was not imported") if version else _no_torch(node)
    build = need(torch)
    if build.import_error is None:
        software = known(node.software)
        of_python = f", Python {software.python}" if software else ""
        return passed(f"torch {build.version}{of_python}")
    missing = re.search(r"No module named '([\w.]+)'", build.import_error)
    if missing and missing[1] == "torch":
        return _no_torch(node)
    software = known(node.software)
    if build.path and not any(folder in build.path for folder in _INSTALLED):
        fix = f"rename or remove {build.path}: Python finds it before the installed torch"
    elif missing and not missing[1].startswith("torch"):
        fix = f"{pip(node)} {missing[1].partition('.')[0]}"
    elif software is not None and software.torch_version:
        fix = f"{pip(node)} --force-reinstall {torch_package(software.torch_version)}"
    else:
        fix = install_torch(node)
    evidence = (f"torch was found at {build.path}",) if build.path else ()
    return found(f"`import torch` fails: {build.import_error}", build.import_error, evidence=evidence, fix=fix)


def _no_torch(node: Node) -> Answer:
    software = known(node.software)
    where = f"this Python is {software.executable}" if software else "this Python has no torch"
    summary = "torch is not installed in this Python, so no rank can start"
    return found(summary, "no package torch", evidence=(where,), fix=install_torch(node))


@rule(
    "DD104", "version-same", Severity.ERROR, "Nodes run different versions of torch, NCCL, the driver or the kernel",
    group=CheckGroup.VERSIONS, needs=("software", "torch", "gpus"),
    reads="versions of torch, NCCL, Python, driver, VBIOS, kernel, OFED and image, and the GPU models, of every node",
)  # fmt: skip
def check_version_same(fleet: Fleet) -> Answer:
    """Compare versions over all nodes, and name the nodes that differ from the majority."""
    nodes = [node for node in fleet.nodes if known(node.software) or known(node.torch) or known(node.gpus)]
    if len(fleet.nodes) < 2:
        return skipped("only one node: nothing to compare")
    splits = {
        name: (compare_nodes((node, value(node)) for node in nodes), severity) for name, value, severity in _COMPARED
    }
    if splits["GPUs:"][0] is not None:
        # Different models always have a different VBIOS.
        del splits["VBIOS"]
    problems = []
    for name, (split, severity) in splits.items():
        if split is None:
            continue
        wanted, noun = split.majority.value if split.majority else None, name.rstrip(":")
        if name in {"GPUs:", "VBIOS"}:
            fix = "use identical nodes for a job, or expect the speed of the slowest"
        elif name == "torch":
            install = f"python -m pip install {torch_package(wanted)}" if wanted else ""
            fix = install or "install the same torch version on all nodes"
        else:
            fix = f"use {noun} {wanted} on all nodes" if wanted else f"use one {noun} on all nodes"
        problems.append(disagreement(split, describe(split, name), fix, severity=severity))
    first = [f"{name} {value(nodes[0])}" for name, value, _ in _COMPARED if nodes and value(nodes[0])]
    seen = ", ".join(first[:4]) or "none is known"
    return judged(problems, f"versions of {len(nodes)} nodes: {seen}")


def torch_of(node: Node) -> str | None:
    """Return the version of torch, or None if it is not known."""
    torch, software = known(node.torch), known(node.software)
    return (torch.version if torch else None) or (software.torch_version if software else None)


def nccl_of(node: Node) -> str | None:
    """Return the version of NCCL that is loaded, or else the one that torch came with."""
    torch, software = known(node.torch), known(node.software)
    if torch is not None and torch.version:
        return torch.nccl_loaded or torch.nccl
    return software.nccl_wheel if software else None


def of_software(value: Callable[[Software], str | None]) -> Callable[[Node], str | None]:
    """Return a function that reads a value from the software of a node."""

    def read(node: Node) -> str | None:
        software = known(node.software)
        return value(software) or None if software else None

    return read


def _of_gpus(value: Callable[[Gpu], str | None]) -> Callable[[Node], str | None]:
    """Return a function for a node's distinct values over its GPUs, joined by "and"."""

    def read(node: Node) -> str | None:
        gpus = known(node.gpus)
        found = {value(gpu) for gpu in gpus.devices} if gpus else set()
        return " and ".join(sorted(version for version in found if version)) or None

    return read


_COMPARED: tuple[tuple[str, Callable[[Node], str | None], Severity], ...] = (
    ("torch", torch_of, Severity.ERROR),
    ("NCCL", nccl_of, Severity.ERROR),
    ("Python", of_software(lambda software: ".".join(software.python.split(".")[:2])), Severity.WARNING),
    ("NVIDIA driver", driver_of, Severity.WARNING),
    ("GPUs:", _of_gpus(lambda gpu: gpu.name), Severity.WARNING),
    ("VBIOS", _of_gpus(lambda gpu: gpu.vbios), Severity.WARNING),
    ("kernel", of_software(lambda software: software.kernel), Severity.WARNING),
    ("OFED", of_software(lambda software: software.ofed), Severity.WARNING),
    ("container image", of_software(lambda software: software.image), Severity.WARNING),
)


# Data-center GPUs: "display controller, other" and "processing accelerator". A laptop's GPU has class 0x0300.
AMD_COMPUTE_CLASSES = (0x0380, 0x1200)


@rule(
    "DD102", "torch-cuda-build", Severity.ERROR, "A torch build without CUDA on a machine with GPUs",
    group=CheckGroup.VERSIONS, needs=("software", "torch", "gpus", "pci"),
    reads="torch.version.cuda and .hip, the GPUs that NVML lists, /dev/nvidia*, PCI",
)  # fmt: skip
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
        if amd := _amd_without_rocm(node, build):
            return amd
        gpus = known(node.gpus)
        on_bus = [gpu for gpu in gpus.on_bus if gpu.driver != "vfio-pci"] if gpus else []
        if not on_bus or driver_of(node):
            return passed("a CPU build, and no GPU here")
        summary = "The NVIDIA GPU has no driver and torch is a CPU build, so jobs run on the CPUs"
        seen = "a CPU build, and a GPU without a driver"
        fix = "to use the GPU, install the NVIDIA driver and a CUDA build of torch"
        evidence = (f"a GPU at {on_bus[0].bus_id}, driver {on_bus[0].driver or 'none'}",)
        return found(summary, seen, evidence=evidence, fix=fix, severity=Severity.INFO)
    summary = f"torch {build.version} is a CPU build, so it can use neither the GPUs here nor NCCL"
    fix = install_cuda_torch(node, build.version)
    evidence = (f"{count_of(count, 'NVIDIA GPU')}, driver {driver_of(node) or 'of unknown version'}",)
    return found(summary, f"torch {build.version} and {count} NVIDIA GPUs", evidence=evidence, fix=fix)


def _amd_without_rocm(node: Node, build: TorchBuild) -> Answer | None:
    pci, software = known(node.pci), known(node.software)
    devices = pci.devices if pci else ()
    amd = [device for device in devices if device.vendor == AMD and device.device_class >> 8 in AMD_COMPUTE_CLASSES]
    if not amd or software is None or "/dev/kfd" not in software.gpu_devices or nvidia_gpus(node):
        return None
    summary = f"torch {build.version} has no ROCm, so the AMD GPUs here cannot be used"
    fix = f"install a ROCm build of torch with the command at {SELECTOR}"
    evidence = (f"AMD GPUs at {', '.join(device.bus_id for device in amd)}, and /dev/kfd",)
    return found(summary, f"torch {build.version} and {len(amd)} AMD GPUs", evidence=evidence, fix=fix)


@rule(
    "DD103", "nccl-loaded", Severity.WARNING, "The loaded NCCL is not the one that torch was built with",
    group=CheckGroup.VERSIONS, needs=("torch",),
    reads="torch.cuda.nccl.version(), libnccl in /proc/self/maps, its ncclGetVersion, LD_PRELOAD, LD_LIBRARY_PATH",
)  # fmt: skip
def check_nccl_loaded(node: Node) -> Answer:
    """Report a loaded NCCL that is not the one that torch was built with."""
    build = imported_torch(node)
    if build.nccl is None:
        return skipped("torch is built without NCCL")
    if not build.nccl_libraries:
        return passed(f"NCCL {build.nccl}, part of torch itself")
    path, loaded, found_by = build.nccl_libraries[0], build.nccl_loaded, build.nccl_found_by
    severity: Severity | None = None
    folder = path.rpartition("/")[0]
    if len(build.nccl_libraries) > 1:
        both = " and ".join(build.nccl_libraries)
        summary, seen = f"Two NCCL libraries are loaded into one process: {both}", f"libnccl from {both}"
    elif loaded is None or loaded == build.nccl:
        return passed(f"NCCL {build.nccl} from {path}")
    else:
        summary = f"torch was built with NCCL {build.nccl}, but NCCL {loaded} is loaded"
        seen = f"NCCL {loaded} from {path}, built with {build.nccl}"
        is_newer_wheel = release(loaded) > release(build.nccl) and "/nvidia/nccl/" in path and found_by is None
        severity = Severity.INFO if is_newer_wheel else Severity.WARNING
    if found_by == "LD_PRELOAD":
        fix = "unset LD_PRELOAD"
    elif found_by == "LD_LIBRARY_PATH":
        fix = f"remove {folder} from LD_LIBRARY_PATH, at least for the job"
    elif "/nvidia/nccl/" in folder:
        fix = "pip install --force-reinstall torch restores the NCCL that it was built with"
    else:
        fix = f"remove the libnccl in {folder}, or install NCCL {build.nccl} there"
    evidence = [f"mapped: {path}" for path in build.nccl_libraries]
    evidence += [f"found by {found_by}"] if found_by else []
    return found(summary, seen, evidence=tuple(evidence), fix=fix, severity=severity)


@rule(
    "DD105", "hip-gpu-other", Severity.INFO, "torch is built for ROCm: checks of NVIDIA software do not apply",
    group=CheckGroup.VERSIONS, needs=("torch",), reads="torch.version.hip",
)  # fmt: skip
def check_hip_gpu_other(node: Node) -> Answer:
    """Report that torch is built for AMD GPUs, so checks of NVIDIA software are skipped."""
    build = imported_torch(node)
    if not build.hip:
        return skipped("torch is not built for ROCm")
    summary = f"torch is built for ROCm {build.hip}: checks of the NVIDIA driver and GPUs do not apply"
    return found(summary, f"ROCm {build.hip}", fix="use rocm-smi to check the GPUs")


# Reads a node's version by the name that the user gives.
VERSION_OF: dict[str, Callable[[Node], str | None]] = {
    "torch": torch_of,
    "nccl": nccl_of,
    "python": of_software(lambda software: software.python),
    "driver": driver_of,
    "kernel": of_software(lambda software: software.kernel),
}


@rule(
    "DD106", "version-expected", Severity.ERROR, "A node does not run the expected version", group=CheckGroup.VERSIONS,
    needs=("software", "torch", "gpus"),
    reads="--expect-version, and the versions of torch, NCCL, Python, driver and kernel of every node",
)  # fmt: skip
def check_version_expected(fleet: Fleet) -> Answer:
    """Compare versions with those that the user expects."""
    if not fleet.expected:
        return skipped("no version is expected (--expect-version)")
    seen = {
        (expected, node.host): VERSION_OF[expected.name](node) for expected in fleet.expected for node in fleet.nodes
    }
    by_version = grouped(
        ((expected, version), host)
        for (expected, host), version in seen.items()
        if version and not _holds(expected, version)
    )
    found = [
        Problem(
            summary=f"{expected.name} is {version}, but {expected.text} is expected",
            fix=f"install a version of {expected.name} that meets {expected.text}, or correct --expect-version",
            hosts=tuple(hosts),
        )
        for (expected, version), hosts in by_version.items()
    ]
    unread = sorted({expected.name for (expected, _), version in seen.items() if not version})
    if unread and not found:
        return unknown(f"the version of {', '.join(unread)} is unknown on some nodes")
    return judged(found, f"expected: {', '.join(version.text for version in fleet.expected)}")


def _holds(expected: ExpectedVersion, version: str) -> bool:
    """Return whether a version meets the expectation. If Python cannot read it, its leading numbers count."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        read = Version(version)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", version)
        if numbers is None:
            return False
        read = Version(numbers[0])
    return SpecifierSet(expected.specifier).contains(read, prereleases=True)


# Lowest driver for a major version of CUDA.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
MIN_DRIVER = {11: 450, 12: 525, 13: 580}


@rule(
    "DD301", "driver-min", Severity.ERROR, "The NVIDIA driver is too old for torch's CUDA version",
    group=CheckGroup.GPUS, needs=("software", "torch", "gpus"),
    reads="/proc/driver/nvidia/version or NVML, torch.version.cuda, the libcuda that is loaded",
)  # fmt: skip
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
    version = (build.version if build else None) or (software.torch_version if software else None)
    other = f", or {install_cuda_torch(node, version)}" if cuda_wheel(version, driver) else ""
    evidence = [f"CUDA says: {build.cuda_error}"] if build and build.cuda_error else []
    if build and build.cuda_library and "compat" in build.cuda_library:
        evidence.append(f"cuda-compat is in use ({build.cuda_library}) but does not help here")
    summary = f"NVIDIA driver {driver} is too old for torch's CUDA {cuda}, which needs {least} or newer"
    return found(summary, seen, evidence=tuple(evidence), fix=f"upgrade the driver to {least} or newer{other}")


@rule(
    "DD302", "driver-lib-mismatch", Severity.ERROR,
    "The NVIDIA kernel driver and its libraries have different versions", group=CheckGroup.GPUS,
    needs=("software", "gpus"), reads="/proc/driver/nvidia/version, the names of libnvidia-ml.so.*, how NVML starts",
)  # fmt: skip
def check_driver_lib_mismatch(node: Node) -> Answer:
    """Report driver libraries whose version differs from the kernel module's."""
    gpus = known(node.gpus)
    software = known(node.software)
    if gpus is not None and gpus.init_error == MISMATCH:
        evidence, seen = "NVML says: driver/library version mismatch", "NVML refuses to start"
    elif gpus is not None and gpus.devices:
        return passed(f"NVML works with driver {driver_of(node)}")
    elif not nvidia_gpus(node):
        return skipped("this machine or container has no NVIDIA GPU")
    else:
        software = need(node.software)
        versions = {path.rpartition(".so.")[2] for path in software.nvml_libraries}
        if software.driver is None or not versions:
            return skipped("the version of the driver or its libraries is unknown")
        seen = f"driver {software.driver}, libraries {' and '.join(sorted(versions))}"
        if software.driver in versions:
            return passed(seen)
        evidence = f"found: {', '.join(software.nvml_libraries)}"
    driver = f" {software.driver}" if software and software.driver else ""
    reload = "sudo rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia && sudo modprobe nvidia nvidia_uvm"
    restart = " (in a container: restart it)" if software and software.container else ""
    summary = f"The kernel has loaded NVIDIA driver{driver}, but its libraries have another version: no GPU works"
    fix = f"reboot, or, when no process uses the GPUs: {reload}{restart}"
    return found(summary, seen, evidence=(evidence,), fix=fix)


@rule(
    "DD303", "arch", Severity.ERROR, "torch has no kernels for a GPU of this node", group=CheckGroup.GPUS,
    needs=("torch", "software", "gpus"), reads="torch.cuda.get_arch_list(), torch.cuda.get_device_capability()",
)  # fmt: skip
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
    majors = [int(major) for arch in build.arch_list for major in re.findall(r"_(\d+)\d[af]?$", arch)]
    fit = [str(device.index) for device in build.devices if device not in unfit]
    if unfit[0].capability[0] > max(majors, default=0):
        fix = f"install a newer build: {install_cuda_torch(node, None)}"
    elif fit:
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(fit)}"
    else:
        fix = f"install an older build of torch that still supports {_capability(unfit[0])}: {SELECTOR}"
    summary = f"torch {build.version} has no kernels for {unfit[0].name} ({_capability(unfit[0])})"
    evidence = (
        f"GPUs {', '.join(str(device.index) for device in unfit)}",
        f"torch is built for {' '.join(build.arch_list)}",
    )
    return found(summary, seen, evidence=evidence, fix=fix, severity=Severity.ERROR if needed else Severity.WARNING)


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
