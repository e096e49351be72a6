"""DD121, DD125 and DD326: shared memory, the memory that a job may use, and whether the kernel moves it."""
# ruff: noqa: S108 - this file only names /dev/shm in texts and writes nothing there

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.reading import known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.environment.gpus import nvidia_gpus
from ddpdoctor.rules.environment.launch import number, ranks_here, ranks_words
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.limits import Limits, SharedMemory
    from ddpdoctor.model.node import Node

MIB, GIB = 1 << 20, 1 << 30
DOCKER_SHM_BYTES = 64 * MIB
"""The default of `docker run` and Kubernetes (https://docs.docker.com/reference/cli/docker/container/run)."""
LOW_SHM_BYTES = 512 * MIB
"""The limit below which DeepSpeed's ds_report warns (deepspeed/env_report.py)."""
LOADER_SHM_BYTES = 2 * GIB
"""Our choice: a few prefetched batches of images for some workers per rank."""
STALE_SHARE = 10
"""Our choice: leftovers are a warning from a tenth of the size on."""
NAMED_FILES = 8
MEMORY_PER_RANK_BYTES = 2 << 30
"""Our choice: torch with CUDA takes about half of this before a model is loaded."""


@rule(
    "DD121",
    "shm",
    Severity.WARNING,
    "/dev/shm is small, full or not writable",
    group=CheckGroup.LIMITS,
    needs=("limits", "software"),
    reads="statvfs of /dev/shm, the files in it, loader workers that run here; with --deep its write speed",
)
def check_shm(node: Node) -> Answer:
    """Report shared memory that is too small for loader workers and NCCL."""
    shm, software = need(node.limits).shm, known(node.software)
    if shm is None:
        if software is None or software.platform != "linux":
            return skipped("this system has no /dev/shm")
        summary = "There is no /dev/shm: loader workers and NCCL cannot share memory"
        return judged(
            [Problem(summary=summary, fix="sudo mount -t tmpfs shm /dev/shm", severity=Severity.ERROR)], "none"
        )
    if shm.volume.error:
        return unknown(f"/dev/shm could not be read: {shm.volume.error}")
    small = _small_shm(shm, software.container if software else None)
    found = [problem for problem in (small, _stale(shm)) if problem is not None]
    return judged(found, _shm_words(shm))


def _shm_words(shm: SharedMemory) -> str:
    workers = f", {shm.loader_workers} loader workers" if shm.loader_workers else ""
    speed = f", writes {number(shm.volume.write_mb_s)} MB/s" if shm.volume.write_mb_s is not None else ""
    return f"{format_about(shm.volume.free_bytes)} of {format_about(shm.volume.total_bytes)} left{workers}{speed}"


def _small_shm(shm: SharedMemory, container: str | None) -> Problem | None:
    total, free, workers = shm.volume.total_bytes, shm.volume.free_bytes, shm.loader_workers > 0
    evidence = (_shm_words(shm),)
    if not shm.volume.writable:
        summary = "/dev/shm is not writable: loader workers and NCCL cannot share memory"
        return Problem(summary=summary, fix="sudo chmod 1777 /dev/shm", severity=Severity.ERROR)
    fix = _enlarge(container)
    if total <= DOCKER_SHM_BYTES:
        bad = workers or total < DOCKER_SHM_BYTES
        what = "Docker's default" if total == DOCKER_SHM_BYTES else "less than the container default"
        return Problem(
            summary=f"/dev/shm has {format_about(total)}, {what}: too little for loader workers and NCCL (bus errors)",
            evidence=evidence,
            fix=fix,
            severity=Severity.ERROR if bad else None,
        )
    least = LOADER_SHM_BYTES if workers else LOW_SHM_BYTES
    if total < least:
        summary = f"/dev/shm has {format_about(total)}: loader workers and NCCL need {format_about(least)}"
        return Problem(summary=summary, evidence=evidence, fix=fix)
    if free < DOCKER_SHM_BYTES:
        summary = f"/dev/shm is full: less than {format_about(DOCKER_SHM_BYTES)} of {format_about(total)} is left"
        return Problem(summary=summary, evidence=evidence, fix="run `ls -lS /dev/shm | head` to find the large files")
    return None


def _enlarge(container: str | None) -> str:
    if container == "kubernetes":
        return "mount a volume emptyDir {medium: Memory, sizeLimit: 16Gi} at /dev/shm"
    if container in {"docker", "podman"}:
        return f"{container} run --shm-size=16g (or --ipc=host)"
    return "sudo mount -o remount,size=16G /dev/shm"


def _stale(shm: SharedMemory) -> Problem | None:
    if not shm.stale_files:
        return None
    count = len(shm.stale_files)
    some = " ".join(shm.stale_files[:NAMED_FILES]) + (" …" if count > NAMED_FILES else "")
    return Problem(
        summary="/dev/shm has leftover files of dead processes",
        evidence=(f"{format_about(shm.stale_bytes)} in {count} file{'s' if count > 1 else ''} of torch and NCCL",),
        fix=f"rm {some}",
        severity=None if shm.stale_bytes * STALE_SHARE >= shm.volume.total_bytes else Severity.INFO,
    )


@rule(
    "DD125",
    "mem-limit",
    Severity.WARNING,
    "Little memory is left, or the OOM killer was active before",
    group=CheckGroup.LIMITS,
    needs=("limits",),
    reads="MemAvailable, the cgroup's memory.max, memory.current and memory.events, LOCAL_WORLD_SIZE",
)
def check_mem_limit(node: Node) -> Answer:
    """Report too little memory for the ranks, and processes that the kernel killed under the same memory limit."""
    limits = need(node.limits)
    left, of_what = _memory_left(limits)
    if left is None:
        return skipped("this system does not report its available memory")
    problems = []
    wanted = MEMORY_PER_RANK_BYTES * ranks_here(node)
    if left < wanted:
        problems.append(
            Problem(
                summary=f"Less than {format_about(MEMORY_PER_RANK_BYTES)} of memory per rank is left {of_what}",
                evidence=(f"{format_about(left)} left for {ranks_words(node)}", _memory_words(limits)),
                fix="raise the job's memory limit, or end other processes: ps aux --sort=-rss | head",
            )
        )
    if limits.oom_kills:
        times = "once" if limits.oom_kills == 1 else f"{limits.oom_kills} times"
        problems.append(
            Problem(
                summary="The OOM killer was active before under the current memory limit",
                evidence=(f"it killed {times} since the cgroup was created", _memory_words(limits)),
                fix="raise the memory limit, or use fewer loader workers and smaller batches",
            )
        )
    return judged(problems, _memory_words(limits))


def _memory_left(limits: Limits) -> tuple[int | None, str]:
    """Return how much memory is left, and what limits it."""
    found = []
    if limits.memory_available_bytes is not None:
        found.append((limits.memory_available_bytes, "on the machine"))
    if limits.memory_limit_bytes is not None and limits.memory_used_bytes is not None:
        found.append((max(0, limits.memory_limit_bytes - limits.memory_used_bytes), "under the cgroup's limit"))
    return min(found, default=(None, ""), key=lambda one: one[0] or 0)


def _memory_words(limits: Limits) -> str:
    words = []
    if limits.memory_available_bytes is not None and limits.memory_total_bytes is not None:
        left, total = map(format_about, (limits.memory_available_bytes, limits.memory_total_bytes))
        words.append(f"{left} of {total} available")
    if limits.memory_limit_bytes is not None and limits.memory_used_bytes is not None:
        used, limit = map(format_about, (limits.memory_used_bytes, limits.memory_limit_bytes))
        words.append(f"cgroup: {used} of {limit} used")
    if limits.oom_kills is not None:
        words.append(count_of(limits.oom_kills, "OOM kill"))
    if limits.swap_total_bytes:
        words.append(f"swap {format_about(limits.swap_total_bytes)}")
    return ", ".join(words)


@rule(
    "DD326",
    "numa-balancing",
    Severity.WARNING,
    "Automatic NUMA balancing is on",
    group=CheckGroup.LINKS,
    needs=("limits", "software", "gpus"),
    reads="/proc/sys/kernel/numa_balancing, /sys/devices/system/node",
)
def check_numa_balancing(node: Node) -> Answer:
    """Report automatic NUMA balancing on a machine with several memory nodes and GPUs."""
    limits = need(node.limits)
    if limits.numa_balancing is None:
        return skipped("this kernel has no NUMA balancing")
    seen = f"numa_balancing {limits.numa_balancing}, {count_of(limits.numa_nodes, 'memory node')}"
    if limits.numa_nodes < 2 or not limits.numa_balancing:
        return passed(seen)
    problem = Problem(
        summary=f"Automatic NUMA balancing over {limits.numa_nodes} NUMA nodes is on, which can stall ranks",
        evidence=(seen,),
        fix="sudo sysctl -w kernel.numa_balancing=0",
        severity=None if nvidia_gpus(node) else Severity.INFO,
    )
    return judged([problem], seen)
