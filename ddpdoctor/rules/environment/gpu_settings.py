"""DD314 to DD317: the settings of GPUs: clocks, persistence, MIG, compute mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.devices import (
    gpu_list,
    gpu_problem,
    in_use,
    is_data_center,
    label,
    listed,
    numbers,
    ranks_on,
    strangers,
    verb,
)
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.gpus import Gpu
    from ddpdoctor.model.node import Fleet, Node

SHARING_ALLOWED = "NCCL_MULTI_RANK_GPU_ENABLE"


@rule(
    "DD314", "app-clocks", Severity.WARNING, "Application clocks are lowered, or clocks differ between GPUs",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: application clocks, default clocks, maximum clocks",
)  # fmt: skip
def check_app_clocks(fleet: Fleet) -> Answer:
    """Report GPUs whose application clock is lowered, and GPUs of one model with different maximum clocks.

    ## What it means

    `nvidia-smi -ac` sets application clocks, and they stay until a reset. A GPU with a lower one is slower than its
    peers in every step.

    ## How it is recognized

    The check compares the application clock of the multiprocessors with its default on each GPU. Over all nodes, it
    compares the maximum clocks of GPUs with the same name. Both are warnings, as in azurehpc-health-checks and gcm's
    clock policy.

    ## What else looks like it

    Newer drivers have no application clocks; these are not checked then. Locked clocks (`nvidia-smi -lgc`) do not show
    here. A higher maximum clock on some nodes often comes from a different VBIOS: see version-same.

    ## What to do

    Reset application clocks with `nvidia-smi -rac`.
    """
    readings = fleet.each(lambda node: node.gpus)
    gpus = [(node, gpu) for node, those in readings for gpu in those.devices]
    readable = [gpu for _, gpu in gpus if gpu.app_clock_sm_mhz is not None or gpu.max_clock_sm_mhz is not None]
    if not readable:
        return skipped("no GPU here reports its clocks")
    problems = [*_lowered(gpus), *_differing(gpus)]
    clocks = sorted({gpu.max_clock_sm_mhz for gpu in readable if gpu.max_clock_sm_mhz is not None})
    return judged(problems, f"highest clocks of {len(readable)} GPUs: {', '.join(map(str, clocks))} MHz")


def _lowered(gpus: list[tuple[Node, Gpu]]) -> Iterator[Problem]:
    lowered = [
        (node, gpu)
        for node, gpu in gpus
        if None not in {gpu.app_clock_sm_mhz, gpu.default_app_clock_sm_mhz}
        and (gpu.app_clock_sm_mhz or 0) < (gpu.default_app_clock_sm_mhz or 0)
    ]
    for host in dict.fromkeys(node.host for node, _ in lowered):
        those = [(node, gpu) for node, gpu in lowered if node.host == host]
        node, found = those[0][0], [gpu for _, gpu in those]
        yield Problem(
            summary=f"{gpu_list(found)} {verb(found, 'has', 'have')} a lowered application clock",
            evidence=tuple(
                f"{label(gpu)}: {gpu.app_clock_sm_mhz} MHz, default {gpu.default_app_clock_sm_mhz} MHz" for gpu in found
            ),
            fix=f"sudo nvidia-smi -rac -i {numbers(found)}",
            ranks=ranks_on(node, found),
            hosts=(host,),
        )


def _differing(gpus: list[tuple[Node, Gpu]]) -> Iterator[Problem]:
    for name in dict.fromkeys(gpu.name for _, gpu in gpus):
        voices = [
            Voice(host=node.host, value=gpu.max_clock_sm_mhz, ranks=ranks_on(node, [gpu]))
            for node, gpu in gpus
            if gpu.name == name
        ]
        split = compare(voices)
        if split is not None:
            yield Problem(
                summary=describe(split, f"the highest clock of {name} is", words=lambda clock: f"{clock} MHz"),
                fix="compare nvidia-smi -q -d CLOCK, the driver and the VBIOS of both",
                confidence=split.confidence,
                hosts=split.hosts,
                ranks=split.ranks,
            )


@rule(
    "DD315", "persistence", Severity.WARNING, "Persistence mode is off",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: persistence mode; /run/nvidia-persistenced/socket",
)  # fmt: skip
def check_persistence(node: Node) -> Answer:
    """Report data-center GPUs that the driver puts to sleep when nobody uses them.

    ## What it means

    Without persistence mode, the driver unloads a GPU's state when its last process ends. The next process waits for
    seconds on each GPU: ranks start at different times, and `nvidia-smi` is slow. Volatile ECC counters and settings
    such as a power limit are lost each time.

    ## How it is recognized

    The check reads NVML's persistence mode and looks for the socket of nvidia-persistenced. Having it off is a warning
    on data-center GPUs. Others are sold with it off, so there it is an info. Source:
    docs.nvidia.com/deploy/driver-persistence.

    ## What else looks like it

    In a container the daemon's socket is not visible, but the mode is.

    ## What to do

    Run `sudo systemctl enable --now nvidia-persistenced`, or `sudo nvidia-smi -pm 1`, which lasts until the next
    reboot.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.persistence is not None]
    if not gpus:
        return skipped("no GPU here has persistence mode")
    if listed(node).persistenced:
        return passed("nvidia-persistenced runs")
    off = [gpu for gpu in gpus if not gpu.persistence]
    fix = "sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1"
    problems = []
    for server, severity in ((True, Severity.WARNING), (False, Severity.INFO)):
        problems += gpu_problem(
            node,
            [gpu for gpu in off if is_data_center(gpu) is server],
            "{takes/take} seconds to wake after idling: persistence mode is off",
            detail=lambda _: "persistence mode is off",
            fix=fix,
            severity=severity,
        )
    return judged(problems, f"on for {len(gpus) - len(off)} of {len(gpus)}")


@rule(
    "DD316", "mig", Severity.ERROR, "GPUs are split into MIG slices",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: MIG mode; CUDA_VISIBLE_DEVICES",
)  # fmt: skip
def check_mig(node: Node) -> Answer:
    """Report GPUs in MIG mode: a process sees one slice, and slices cannot access each other's memory.

    ## What it means

    A process can use only one MIG slice, whatever it lists in `CUDA_VISIBLE_DEVICES`. Slices have no peer access, by
    NVLink or PCIe, and NCCL before 2.30.3 refuses several ranks on slices of one GPU.

    ## How it is recognized

    The check reads NVML's MIG mode of the GPUs in use. With several ranks on the node it is an error, with one rank a
    warning. It is also a warning if `NCCL_MULTI_RANK_GPU_ENABLE=1` asks for NCCL's experimental support of slices.
    Source: github.com/NVIDIA/nccl/issues/1716.

    ## What else looks like it

    A single process on its own slice works well.

    ## What to do

    Use whole GPUs: run `nvidia-smi -mig 0` when no process runs, or request whole GPUs from the batch
    system.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.mig_enabled is not None]
    if not gpus:
        return skipped("no GPU here has MIG")
    on = [gpu for gpu in gpus if gpu.mig_enabled]
    if not on:
        return passed(f"off on {len(gpus)} GPUs")
    meant = all(process.variables.get(SHARING_ALLOWED) == "1" for process in node.processes)
    several = len(node.ranks) > 1
    consequence = (
        "ranks on slices have no NVLink, no peer access and, before NCCL 2.30.3, no NCCL"
        if several
        else "a process sees only one slice, and ranks on slices cannot access each other directly"
    )
    problems = gpu_problem(
        node,
        on,
        f"{{is/are}} in MIG mode: {consequence}",
        detail=lambda _: "MIG is on",
        fix="sudo nvidia-smi -mig 0 -i {ids} when no process runs, or request whole GPUs",
        severity=Severity.ERROR if several and not meant else Severity.WARNING,
    )
    return judged(problems, f"on for {len(on)} of {len(gpus)}")


@rule(
    "DD317", "compute-mode", Severity.ERROR, "A GPU's compute mode blocks a rank",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: compute mode, processes on each GPU",
)  # fmt: skip
def check_compute_mode(node: Node) -> Answer:
    """Report GPUs whose compute mode allows no process, or no second one.

    ## What it means

    In compute mode "prohibited", CUDA reports that there is no such device. In "exclusive process", the second process
    on a GPU gets "CUDA-capable device(s) is/are busy or unavailable".

    ## How it is recognized

    The check reads NVML's compute mode. Prohibited is an error. Exclusive is an error if another process already
    computes on the GPU, or if several ranks use it (dup-gpu explains how that is found). With one rank on a GPU it is
    fine.

    ## What else looks like it

    Data loader workers and check-env itself open no CUDA context, and do not count as a process on the GPU.

    ## What to do

    Set the default mode with `sudo nvidia-smi -c 0`.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.compute_mode is not None]
    if not gpus:
        return skipped("no GPU here has a compute mode")
    exclusive = [gpu for gpu in gpus if (gpu.compute_mode or "").startswith("exclusive")]
    fix = "sudo nvidia-smi -c 0 -i {ids}"
    shut = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    what = "cannot run work: the compute mode is prohibited"
    problems = gpu_problem(node, shut, what, detail=_mode, fix=fix)
    taken = [gpu for gpu in exclusive if strangers(gpu, node)]
    what = "{allows/allow} only one process, and another job's process uses {it/them}"
    problems += gpu_problem(node, taken, what, detail=lambda gpu: f"{_mode(gpu)}, pids {_pids(node, gpu)}", fix=fix)
    shared = [gpu for gpu in exclusive if len(ranks_on(node, [gpu])) > 1]
    what = "{allows/allow} only one process, but several ranks use {it/each of them}"
    problems += gpu_problem(
        node, shared, what, detail=lambda gpu: f"{_mode(gpu)}, {len(ranks_on(node, [gpu]))} ranks", fix=fix
    )
    return judged(problems, ", ".join(sorted({gpu.compute_mode or "" for gpu in gpus})))


def _mode(gpu: Gpu) -> str:
    return f"compute mode {gpu.compute_mode}"


def _pids(node: Node, gpu: Gpu) -> str:
    return ", ".join(str(one.pid) for one in strangers(gpu, node))
