"""DD304 and DD305: all GPUs are there, and CUDA_VISIBLE_DEVICES names GPUs that exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.visible_devices import VARIABLE, read_visible
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.devices import (
    gpu_list,
    keys_of,
    label,
    listed,
    numbers,
    ranks_on,
    sees_its_own,
    verb,
    visible_to,
)
from ddpdoctor.rules.environment.processes import ranks_of
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.gpus import GpuOnBus, Gpus
    from ddpdoctor.model.node import Node, NodeProcess
    from ddpdoctor.model.software import TorchBuild
    from ddpdoctor.model.visible_devices import Visible

KEPT_FROM_US = frozenset({None, "EPERM", "EACCES", "ENOENT"})
"""How opening a device file ends if a container or a batch system denies it to this process."""
MISMATCH = "LIB_RM_VERSION_MISMATCH"


@rule(
    "DD304", "gpu-count", Severity.ERROR, "A GPU is missing or does not respond, or there are fewer GPUs than ranks",
    group=CheckGroup.GPUS, needs=("gpus", "torch"),
    reads="NVML, /sys/bus/pci/devices, /proc/driver/nvidia/gpus, torch.cuda.device_count()",
)  # fmt: skip
def check_gpu_count(node: Node) -> Answer:
    """Report a GPU that does not work, one that the driver does not list, and more ranks than GPUs."""
    torch = known(node.torch)
    if torch is not None and torch.cuda_stuck:
        return judged([_no_driver(torch)], torch.cuda_error or "")
    gpus = need(node.gpus)
    if gpus.init_error == MISMATCH:
        return skipped("NVML does not start because driver and library differ: see driver-lib-mismatch")
    if gpus.init_error is not None:
        return judged([_no_nvml(gpus)], f"NVML does not start: {gpus.init_error}")
    problems = [*_silent(node, gpus), *_unlisted(gpus), *_torch_count(node, gpus, torch), *_rank_count(node, gpus)]
    seen = [f"NVML lists {len(gpus.devices)}"]
    seen += [f"torch sees {torch.device_count}"] if torch is not None else []
    seen += [f"{len(node.ranks)} ranks"] if node.ranks else []
    return judged(problems, ", ".join(seen))


def _no_driver(torch: TorchBuild) -> Problem:
    return Problem(
        summary="CUDA does not start: `torch.cuda.init()` hangs or dies, and so does each job that uses a GPU",
        evidence=(torch.cuda_error,) if torch.cuda_error else (),
        fix="sudo dmesg | grep -E 'NVRM|Xid'; if `nvidia-smi` hangs too, drain the node and reboot it. "
        "A job on the CPU does not need it: export CUDA_VISIBLE_DEVICES=",
    )


def _no_nvml(gpus: Gpus) -> Problem:
    fix = (
        "ls -l /dev/nvidia*, and add this user to the group that may open them"
        if gpus.init_error == "NO_PERMISSION"
        else "outside a container: nvidia-smi; sudo dmesg | grep NVRM. In a container that lost its GPUs after "
        "`systemctl daemon-reload` on the host (github.com/NVIDIA/nvidia-container-toolkit/issues/1227): restart it"
    )
    return Problem(
        summary="The NVIDIA driver is installed, but NVML does not start, so no GPU can be used",
        evidence=(f"nvmlInit fails with {gpus.init_error}",),
        fix=fix,
    )


def _silent(node: Node, gpus: Gpus) -> Iterator[Problem]:
    silent = [gpu for gpu in gpus.devices if gpu.error is not None]
    if silent:
        does = verb(silent, "does", "do")
        yield Problem(
            summary=f"{gpu_list(silent)} {does} not respond: jobs that use {verb(silent, 'it', 'them')} fail",
            evidence=tuple(f"{label(gpu)}: {gpu.error}" for gpu in silent),
            fix=f"sudo dmesg | grep -E 'NVRM|Xid'; then sudo nvidia-smi -r -i {numbers(silent)}, or reboot",
            ranks=ranks_on(node, [gpu for gpu in silent if gpu.uuid]),
        )


def _unlisted(gpus: Gpus) -> Iterator[Problem]:
    """Yield GPUs on the bus that should work but that NVML does not list."""
    if any(not gpu.bus_id for gpu in gpus.devices):
        return  # one that NVML lists and that cannot report its place would count twice
    here = {gpu.bus_id for gpu in gpus.devices}
    others = [gpu for gpu in gpus.on_bus if gpu.bus_id not in here]
    for gpu in others:
        if gpu.driver == "nvidia" and gpu.open_error not in KEPT_FROM_US:
            opens = "opens" if gpu.open_error == "ok" else f"fails with {gpu.open_error}"
            yield _broken(gpu, f"its device file {opens}, so this process has access", Confidence.HIGH)
    models = {gpu.device for gpu in gpus.on_bus if gpu.bus_id in here}
    if any(gpu.driver == "nvidia" for gpu in others):
        return  # this process was given some of the GPUs: the rest of the node is not its business
    for gpu in others:
        if gpu.driver is None and gpu.device in models:
            yield _broken(
                gpu, "the NVIDIA driver did not claim it, but claimed other GPUs of its model", Confidence.MEDIUM
            )


def _broken(gpu: GpuOnBus, evidence: str, confidence: Confidence) -> Problem:
    return Problem(
        summary=f"The GPU at {gpu.bus_id} is on the PCI bus, but NVML does not list it: it is broken",
        evidence=(evidence,),
        fix=f"sudo dmesg | grep -E 'NVRM|{gpu.bus_id}'; then reboot, and drain the node if the GPU stays missing",
        confidence=confidence,
    )


def _torch_count(node: Node, gpus: Gpus, torch: TorchBuild | None) -> Iterator[Problem]:
    if torch is None or torch.cuda is None or any(gpu.mig_enabled for gpu in gpus.devices):
        return
    expected = len(visible_to(node.first, gpus).devices)
    if torch.device_count < expected and not any(gpu.error for gpu in gpus.devices):
        yield Problem(
            summary=f"torch sees {torch.device_count} of {expected} GPUs that NVML lists",
            evidence=(torch.cuda_error,) if torch.cuda_error else (),
            fix='python -c "import torch; torch.cuda.init()" shows the CUDA error',
        )


def _rank_count(node: Node, gpus: Gpus) -> Iterator[Problem]:
    """Compare ranks with GPUs, if all ranks of the node see the same ones."""
    values = {process.variables.get(VARIABLE) for process in node.processes}
    if not node.ranks or len(values) > 1 or any(sees_its_own(process) for process in node.processes):
        return
    visible = visible_to(node.first, gpus)
    count = len(visible.devices)
    ranks = max(len(node.ranks), node.first.number("LOCAL_WORLD_SIZE") or 0)
    if not count or (visible.entries and count == 1):
        return  # cvd-valid and dup-gpu judge these
    if ranks > count:
        yield Problem(
            summary=f"{ranks} ranks but only {count_of(count, 'GPU')} here: {ranks - count} ranks have no "
            "cuda:LOCAL_RANK",
            evidence=(f"LOCAL_WORLD_SIZE is {ranks}",),
            fix=f"--nproc-per-node={count}; or, for a CPU job, export CUDA_VISIBLE_DEVICES=",
            ranks=tuple(p.rank for p in node.processes if p.rank is not None and (p.local_rank or 0) >= count),
        )
    elif ranks < count:
        yield Problem(
            summary=f"{count_of(ranks, 'rank')} for {count} GPUs: {count - ranks} stay idle",
            fix=f"use --nproc-per-node={count} to use all GPUs",
            severity=Severity.INFO,
        )


@rule(
    "DD305", "cvd-valid", Severity.ERROR, "CUDA_VISIBLE_DEVICES hides GPUs that it names",
    group=CheckGroup.GPUS, needs=("gpus",), reads="CUDA_VISIBLE_DEVICES, NVML",
)  # fmt: skip
def check_cvd_valid(node: Node) -> Answer:
    """Report a `CUDA_VISIBLE_DEVICES` that leaves fewer GPUs visible than it names."""
    gpus = listed(node)
    processes = node.processes[:1] if sees_its_own(node.first) else node.processes
    having = [process for process in processes if VARIABLE in process.variables]
    if not having:
        return skipped(f"{VARIABLE} is not set")
    problems = [found for process in having for found in _judge_value(process, gpus)]
    shown = ", ".join(dict.fromkeys(f"{VARIABLE}={process.variables[VARIABLE]}" for process in having))
    return judged(problems, f"{shown} of {len(gpus.devices)} GPUs")


def _judge_value(process: NodeProcess, gpus: Gpus) -> Iterator[Problem]:
    visible, count = visible_to(process, gpus), len(gpus.devices)
    value, ranks = f"{VARIABLE}={process.variables[VARIABLE]}", ranks_of([process])
    if visible.on_purpose:
        fix = f"unset {VARIABLE} if the job should use GPUs"
        yield Problem(summary=f"{value} hides all {count} GPUs", fix=fix, severity=Severity.INFO, ranks=ranks)
        return
    if visible.repeated:
        what = "names a device twice, so CUDA shows no device at all"
        evidence = f"named twice: {', '.join(visible.repeated)}"
    elif visible.bad_entry is not None and (visible.bad_entry != "-1" or visible.hidden):
        entry, shown = visible.bad_entry or "an empty entry", len(visible.devices)
        what = f"names {entry}, which is not a device here: CUDA ignores it and all later entries, and shows {shown}"
        evidence = f"there are {count} GPUs: 0 to {count - 1}"
    else:
        return
    fix = f"export {VARIABLE}={_mended(visible, gpus)}"
    yield Problem(summary=f"{value} {what}", evidence=(evidence,), fix=fix, ranks=ranks)


def _mended(visible: Visible, gpus: Gpus) -> str:
    """Return the entries that name a device, each once, or all devices if none does."""
    uuids = keys_of(gpus)
    kept: dict[str, str] = {}
    for entry in visible.entries:
        for device in read_visible(entry, uuids).devices:
            kept.setdefault(device, entry)
    return ",".join(kept.values()) or ",".join(str(gpu.index) for gpu in gpus.devices)
