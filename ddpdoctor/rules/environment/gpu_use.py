"""DD318 and DD319: other processes on the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_memory
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import known
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.devices import (
    gpu_list,
    gpu_problem,
    in_use,
    is_coherent,
    is_data_center,
    listed,
    strangers,
)
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.gpus import Gpu, GpuProcess
    from ddpdoctor.model.node import Node

OTHERS_BYTES = 500 * 2**20
"""Our choice, near gcm's and gpud's thresholds: a CUDA context without any tensor takes as much."""
MOST = 0.5
"""Our choice: beyond this share of the memory, a job that needs the whole GPU does not fit."""
UNSEEN_BYTES = 2**30
"""Our choice, for memory whose owners cannot be seen: more than a screen or a driver takes."""
TRIAL_BYTES = 4 * 2**30
"""What the GPU test of --deep may hold at the same time: 2 GiB, the same again while it compares, and its context."""


@rule(
    "DD318", "other-procs", Severity.WARNING, "Other processes use memory on the job's GPUs",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: processes and memory; /proc/PID/cgroup",
)  # fmt: skip
def check_other_procs(node: Node) -> Answer:
    """Report memory on the job's GPUs that other processes hold.

    ## What it means

    A leftover process of an earlier run, or another user, takes memory and time from one rank. The job runs out of
    memory at the largest batch, or that rank becomes a straggler.

    ## How it is recognized

    NVML lists processes with their memory. This job's own processes (same launcher, same Slurm job, or same pod) are
    left out, and so are those that only draw on a screen. More than 500 MiB is a warning, more than half of the GPU's
    memory an error. In a container, other processes are not visible, so the memory in use counts: more than 1 GiB of a
    data-center GPU is a warning, more than half of it an error, both with less confidence. All three limits are our
    choice.

    ## What else looks like it

    A workstation's desktop and browser hold GPU memory too. A machine may also be shared on purpose.

    ## What to do

    See whose process it is (`ps -fp PID`), and end it if it is a leftover. Or choose other GPUs with
    `CUDA_VISIBLE_DEVICES`.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.processes is not None or gpu.memory_used_bytes is not None]
    if not gpus:
        return skipped("no GPU here reports its processes")
    if listed(node).host_pids:
        return _by_process(node, gpus)
    return _by_memory(node, [gpu for gpu in gpus if not is_coherent(gpu)])


def _by_process(node: Node, gpus: list[Gpu]) -> Answer:
    held = {gpu.index: sum(one.used_bytes or 0 for one in strangers(gpu, node)) for gpu in gpus}
    problems = []
    for gpu in gpus:
        if held[gpu.index] > OTHERS_BYTES:
            others = strangers(gpu, node)
            problems += gpu_problem(
                node,
                [gpu],
                f"has {format_memory(held[gpu.index])} of {_total(gpu)} used by other processes",
                detail=lambda _, others=others: ", ".join(map(_words, others)),  # type: ignore[misc]
                fix=f"ps -fp {','.join(str(one.pid) for one in others)}; end leftover processes",
                severity=Severity.ERROR if _is_most(gpu, held[gpu.index]) else None,
            )
    return judged(problems, f"other processes use at most {format_memory(max(held.values()))} of a GPU")


def _is_most(gpu: Gpu, size_bytes: int) -> bool:
    return gpu.memory_total_bytes is not None and size_bytes > MOST * gpu.memory_total_bytes


def _words(process: GpuProcess) -> str:
    size = "memory not reported" if process.used_bytes is None else format_memory(process.used_bytes)
    return f"pid {process.pid} ({process.name or 'unknown name'}) {size}"


def _total(gpu: Gpu) -> str:
    return "memory" if gpu.memory_total_bytes is None else format_memory(gpu.memory_total_bytes)


def _by_memory(node: Node, gpus: list[Gpu]) -> Answer:
    """Judge the memory in use beyond this job's own, when other processes cannot be seen."""
    if not gpus:
        return skipped("the kernel caches files in the memory of these GPUs, and their processes are not visible")
    allowed = TRIAL_BYTES if known(node.gpu_trial) is not None else 0
    used = {gpu.index: max(0, (gpu.memory_used_bytes or 0) - _own(gpu) - allowed) for gpu in gpus}
    problems = []
    for gpu in gpus:
        most = _is_most(gpu, used[gpu.index])
        if not most and not (is_data_center(gpu) and used[gpu.index] > UNSEEN_BYTES):
            continue
        problems.append(
            Problem(
                summary=f"{gpu_list([gpu])} has {format_memory(used[gpu.index])} of {_total(gpu)} in use by processes "
                "that are not visible from here",
                evidence=("this process runs in a container and cannot see the host's processes",),
                fix="run nvidia-smi on the host, outside the container, to find the processes",
                severity=Severity.ERROR if most and is_data_center(gpu) else Severity.WARNING,
                confidence=Confidence.MEDIUM,
            )
        )
    return judged(
        problems, f"at most {format_memory(max(used.values()))} of a GPU in use; its processes are not visible"
    )


def _own(gpu: Gpu) -> int:
    return sum(one.used_bytes or 0 for one in gpu.processes or () if one.ours)


@rule(
    "DD319", "zombie-ctx", Severity.WARNING, "GPU memory is in use, but no process uses it",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: memory in use, processes",
)  # fmt: skip
def check_zombie_ctx(node: Node) -> Answer:
    """Report GPU memory that is in use although no process is on the GPU.

    ## What it means

    A process that was killed while the driver worked for it can stay behind and hold its memory. It may be defunct, or
    kept alive by another process (a data loader's worker, a debugger).

    ## How it is recognized

    More than 1 GiB is in use and NVML lists no process. The limit is our choice; NVML's figure leaves out the driver's
    own memory. The check needs to see the machine's processes, so it cannot run in a container. It also skips GPUs in
    MIG mode and GPUs whose memory the kernel uses too (GH200, GB200).

    ## What else looks like it

    A GPU that was handed to a virtual machine.

    ## What to do

    List the processes that have the GPU open with `sudo fuser -v /dev/nvidia*` and end them. If that does not help,
    reset the GPU.
    """
    gpus = listed(node)
    if not gpus.host_pids:
        return skipped("the host's processes are not visible from this container")
    readable = [
        gpu
        for gpu in in_use(node)
        if gpu.processes is not None and gpu.memory_used_bytes is not None and not gpu.mig_enabled
        and not is_coherent(gpu)
    ]  # fmt: skip
    if not readable:
        return skipped("no GPU here reports both its memory and its processes")
    held = [gpu for gpu in readable if not gpu.processes and (gpu.memory_used_bytes or 0) > UNSEEN_BYTES]
    what = "{has/have} memory in use but no process: a killed process still holds it"
    fix = "sudo fuser -v /dev/nvidia*; end leftover processes, or run sudo nvidia-smi -r -i {ids}"
    problems = gpu_problem(node, held, what, detail=_in_use, fix=fix)
    free = sum(1 for gpu in readable if not gpu.processes)
    return judged(problems, f"{free} of {len(readable)} GPUs without a process")


def _in_use(gpu: Gpu) -> str:
    return f"{format_memory(gpu.memory_used_bytes or 0)} in use, no process listed"
