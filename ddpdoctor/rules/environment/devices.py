"""Shared by the GPU rules: the driver, torch, which GPUs the job uses, which rank is on which, and their names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.reading import NotRead, Unread, Why, known, need
from ddpdoctor.model.visible_devices import VARIABLE, Visible, read_visible
from ddpdoctor.rules.answers import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.model.findings import Severity
    from ddpdoctor.model.gpus import Gpu, GpuProcess, Gpus, PeerCopy
    from ddpdoctor.model.node import Node, NodeProcess
    from ddpdoctor.model.software import TorchBuild

DATA_CENTER_PARTS = frozenset({
    "K80", "M40", "M60", "P4", "P40", "P100", "V100", "V100S", "T4", "T4G",
    "A2", "A10", "A10G", "A10M", "A16", "A30", "A30X", "A40", "A100", "A100X", "A800",
    "L2", "L4", "L20", "L40", "L40G", "L40S", "H20", "H100", "H800", "H200", "GH200",
    "B100", "B200", "B300", "GB200", "GB300",
})  # fmt: skip
"""Products that NVIDIA lists as data-center GPUs (docs.nvidia.com/datacenter/tesla, "Supported GPUs"). Each is one word
of the name that NVML gives, such as "NVIDIA A100-SXM4-80GB"."""
BOARD_PARTS = frozenset({"H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB200", "GB300"})
"""Parts whose SXM modules do not say SXM in their name: "NVIDIA H100 80GB HBM3". Cards say "PCIe" or "NVL"."""
COHERENT_PARTS = frozenset({"GH200", "GB200", "GB300", "GB10"})
"""Their memory is a NUMA node, where the kernel also caches files: memory in use says nothing about processes."""


def is_data_center(gpu: Gpu) -> bool:
    """Say, by its name, whether a GPU is built for servers."""
    if "GeForce" in gpu.name or "RTX A" in gpu.name or "Quadro" in gpu.name:
        return False
    return bool(_words(gpu) & DATA_CENTER_PARTS) or "Server Edition" in gpu.name


def is_laptop(gpu: Gpu) -> bool:
    """Say, by its name, whether a GPU shares heat and power with a processor."""
    return "Laptop" in gpu.name or "Max-Q" in gpu.name or "Mobile" in gpu.name


def is_board(gpu: Gpu) -> bool:
    """Say whether a GPU sits on a board that wires all NVLinks, rather than on a card with an optional bridge."""
    words = _words(gpu)
    return "SXM" in gpu.name.upper() or (bool(words & BOARD_PARTS) and not words & {"PCIe", "PCIE", "NVL"})


def is_coherent(gpu: Gpu) -> bool:
    """Say whether the kernel itself uses a GPU's memory."""
    return bool(_words(gpu) & COHERENT_PARTS)


def _words(gpu: Gpu) -> set[str]:
    return set(re.split(r"[\s-]+", gpu.name))


def driver_of(node: Node) -> str | None:
    """Return the version of the NVIDIA driver, from the kernel or else from NVML."""
    software, gpus = known(node.software), known(node.gpus)
    return (software.driver if software else None) or (gpus.driver if gpus else None)


def nvidia_gpus(node: Node) -> int:
    """Count the NVIDIA GPUs that this machine or container has been given.

    /proc and the PCI bus do not count, because in a container without GPUs they show the host's.
    """
    gpus, software = known(node.gpus), known(node.software)
    if gpus is not None and gpus.devices:
        return len(gpus.devices)
    return sum(bool(re.fullmatch(r"/dev/nvidia\d+", path)) for path in software.gpu_devices) if software else 0


def imported_torch(node: Node) -> TorchBuild:
    """Return torch's build. Raises ``NotRead`` if it cannot be imported, which `torch-import` reports."""
    build = need(node.torch)
    if build.import_error is not None:
        raise NotRead(Unread(why=Why.ABSENT, reason="torch cannot be imported"))
    return build


def wrong_copies(node: Node) -> list[PeerCopy]:
    """Return the copies between GPUs that failed or came out wrong in the test of --deep."""
    trial = known(node.gpu_trial)
    return [copy for copy in trial.copies if not copy.ok] if trial is not None else []


def listed(node: Node) -> Gpus:
    """Return what NVML says about the node's GPUs.

    Raises ``NotRead`` if NVML lists no GPU or does not start. Another check reports that NVML does not start.
    """
    gpus = need(node.gpus)
    if gpus.init_error is not None:
        raise NotRead(Unread(why=Why.ABSENT, reason=f"NVML does not start: {gpus.init_error}"))
    if not gpus.devices:
        raise NotRead(Unread(why=Why.ABSENT, reason="NVML lists no GPU"))
    return gpus


def keys_of(gpus: Gpus) -> tuple[str, ...]:
    """Return a unique key for each device, in NVML's order: its UUID, or a placeholder if the device is lost."""
    return tuple(gpu.uuid or f"no answer from {gpu.index}" for gpu in gpus.devices)


def visible_to(process: NodeProcess, gpus: Gpus) -> Visible:
    """Return the devices that a process's CUDA_VISIBLE_DEVICES leaves visible."""
    return read_visible(process.variables.get(VARIABLE), keys_of(gpus))


def sees_its_own(process: NodeProcess) -> bool:
    """Say whether a process may have GPUs that others on its node do not see, as under Slurm."""
    return "SLURM_PROCID" in process.variables and "TORCHELASTIC_RUN_ID" not in process.variables


def in_use(node: Node) -> tuple[Gpu, ...]:
    """Return the GPUs that the processes of a node see, or all GPUs if that is not known.

    Raises ``NotRead`` if all are hidden on purpose, because then the job needs none.
    """
    gpus = listed(node)
    if all(visible_to(process, gpus).on_purpose for process in node.processes):
        raise NotRead(Unread(why=Why.NEEDLESS, reason=f"{VARIABLE} hides all GPUs"))
    if not _is_order_certain(node, gpus):
        return gpus.devices
    seen = {device for process in node.processes for device in visible_to(process, gpus).devices}
    chosen = tuple(gpu for gpu, key in zip(gpus.devices, keys_of(gpus), strict=True) if key in seen)
    return chosen or gpus.devices


def _is_order_certain(node: Node, gpus: Gpus) -> bool:
    """Say whether CUDA numbers the GPUs as NVML does: if they differ, its default puts the fastest first."""
    if len({gpu.name for gpu in gpus.devices}) <= 1:
        return True
    return all(process.variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" for process in node.processes)


def device_of(process: NodeProcess, gpus: Gpus) -> str | None:
    """Return the key of the device that a rank uses: the only one that it sees, or the one of its local rank."""
    devices = visible_to(process, gpus).devices
    if len(devices) == 1:
        return devices[0]
    if process.local_rank is not None and 0 <= process.local_rank < len(devices):
        return devices[process.local_rank]
    return None


def ranks_on(node: Node, gpus: Iterable[Gpu]) -> tuple[int, ...]:
    """Return the ranks that use these GPUs."""
    everything = need(node.gpus)
    wanted = {gpu.uuid for gpu in gpus}
    return tuple(
        process.rank
        for process in node.processes
        if process.rank is not None and device_of(process, everything) in wanted
    )


def strangers(gpu: Gpu, node: Node) -> list[GpuProcess]:
    """Return the processes that compute on a GPU and do not belong to this job."""
    pids = {process.pid for process in node.processes}
    return [one for one in gpu.processes or () if not (one.ours or one.graphics or one.pid in pids)]


def gpu_list(gpus: Iterable[Gpu] | Iterable[int]) -> str:
    """Return "GPU 3", "GPUs 0 and 2" or "GPUs 0-6, 9"."""
    return rank_list((one if isinstance(one, int) else one.index for one in gpus), "GPU")


def numbers(gpus: Iterable[Gpu]) -> str:
    """Return "2,5", the form that `nvidia-smi -i` takes."""
    return ",".join(str(gpu.index) for gpu in gpus)


def verb(gpus: Sequence[object], one: str, many: str) -> str:
    """Return the verb's form for one GPU or for several."""
    return one if len(gpus) == 1 else many


def label(gpu: Gpu) -> str:
    """Return "GPU 2 (NVIDIA H100 80GB HBM3, 0000:52:00.0)"."""
    said = [word for word in (gpu.name, gpu.bus_id) if word]
    return f"GPU {gpu.index} ({', '.join(said)})" if said else f"GPU {gpu.index}"


def gpu_problem(
    node: Node,
    gpus: Sequence[Gpu],
    what: str,
    *,
    detail: Callable[[Gpu], str],
    fix: str,
    severity: Severity | None = None,
) -> list[Problem]:
    """Make one problem for all GPUs that have it, or none if there is no such GPU.

    ``what`` follows "GPUs 2 and 5". "{has/have}" stands for the form for one GPU or for several, {ids} for "2,5".
    """
    if not gpus:
        return []
    problem = Problem(
        summary=f"{gpu_list(gpus)} {_fill(what, gpus)}",
        evidence=tuple(f"{label(gpu)}: {detail(gpu)}" for gpu in gpus),
        fix=_fill(fix, gpus).replace("{ids}", numbers(gpus)),
        severity=severity,
        ranks=ranks_on(node, gpus),
    )
    return [problem]


def _fill(text: str, gpus: Sequence[Gpu]) -> str:
    return re.sub(r"\{([^{}/]*)/([^{}/]*)\}", lambda forms: verb(gpus, *forms.groups()), text)
