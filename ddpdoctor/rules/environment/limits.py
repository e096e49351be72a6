"""DD121 to DD128 and DD326: open files, processes, memory, CPUs, disks, and how many of each a job needs."""

# ruff: noqa: S108 - this file only names /dev/shm in texts and writes nothing there

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.launch import by_torchrun
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.words import count_of, format_about
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.environment.gpus import nvidia_gpus
from ddpdoctor.rules.environment.launch import (
    cpus_here,
    cpus_words,
    effective_cpus,
    number,
    ranks_here,
    ranks_words,
    world_size,
)
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Node, SharedMemory


# Our choice: what training images and batch systems commonly set. A loader that shares tensors by file descriptor holds
# one for each tensor that waits (torch.multiprocessing, sharing strategies).
ENOUGH_FILES = 65536
# Our choice: eight ranks with eight loader workers that each keep a hundred tensors in flight reach it.
FEW_FILES = 8192
# Our choice: rank 0 holds the store's connections of every rank, and Gloo holds one to each peer in every group.
FILES_PER_RANK = 4
FILES_OF_A_PROCESS = 128  # our choice: what Python, torch and CUDA have open by themselves
# Our choice: threads of autograd, NCCL, CUDA, pinned memory and the watchdogs, and some loader workers.
TASKS_PER_RANK = 64
# Our choice: less does not hold a checkpoint, a compiler's cache or the flight recorder's dumps of a node.
MIN_FREE_BYTES = 1 << 30
SLOW_MB_S = 20.0  # our choice: below this a checkpoint of 1 GB takes about a minute


@rule(
    "DD122", "nofile", Severity.WARNING, "The limit on open files is low", group=CheckGroup.LIMITS,
    needs=("limits", "software"), reads="RLIMIT_NOFILE, WORLD_SIZE",
)  # fmt: skip
def check_nofile(node: Node) -> Answer:
    """Report a limit on open files that is too low for the job."""
    limit = need(node.limits).nofile
    if limit is None:
        return skipped("this system does not report its limit of open files")
    soft, hard = ("unlimited" if value is None else value for value in (limit.soft, limit.hard))
    seen = f"soft limit {soft}, hard limit {hard}"
    if limit.soft is None or limit.soft >= ENOUGH_FILES:
        return passed(seen)
    ranks = world_size(node)
    least = FILES_OF_A_PROCESS + FILES_PER_RANK * ranks if ranks else 0
    short = limit.soft < least
    why = f"a job of {ranks} ranks needs {least} on rank 0" if short else "loader workers and large jobs need more"
    severity = Severity.WARNING if limit.soft < FEW_FILES else Severity.INFO
    software = known(node.software)
    container = software.container if software else None
    own = f"ulimit -n {limit.hard}, and " if limit.hard is not None and limit.hard > limit.soft else ""
    if limit.hard is None or limit.hard >= ENOUGH_FILES:
        fix = f"ulimit -n {ENOUGH_FILES}"
    elif container in {"docker", "podman"}:
        fix = f"{own}{container} run --ulimit nofile={ENOUGH_FILES}:{ENOUGH_FILES} for the container"
    elif container is not None:
        fix = f"{own}raise the hard limit in the container runtime (LimitNOFILE={ENOUGH_FILES})"
    else:
        fix = f'{own}echo "* - nofile {ENOUGH_FILES}" | sudo tee -a /etc/security/limits.conf, then log in again'
    summary = f"The limit of open files is only {limit.soft}: {why}"
    return found(summary, seen, evidence=(seen,), fix=fix, severity=Severity.ERROR if short else severity)


@rule(
    "DD123", "nproc-pids", Severity.WARNING, "The limit of processes and threads is almost reached",
    group=CheckGroup.LIMITS, needs=("limits",),
    reads="RLIMIT_NPROC, the cgroup's pids.max and pids.current, OMP_NUM_THREADS",
)  # fmt: skip
def check_nproc_pids(node: Node) -> Answer:
    """Report too little room for the processes and threads of the ranks."""
    limits = need(node.limits)
    wanted = ranks_here(node) * (TASKS_PER_RANK + (node.first.number("OMP_NUM_THREADS") or 1))
    nproc = limits.nproc
    room = []
    if limits.nproc_applies and nproc is not None and nproc.soft is not None and limits.user_processes is not None:
        higher = nproc.hard is None or nproc.hard > nproc.soft
        fix = f"ulimit -u {nproc.hard or 'unlimited'}" if higher else "raise nproc in /etc/security/limits.conf"
        room.append((max(0, nproc.soft - limits.user_processes), nproc.soft, "RLIMIT_NPROC of this user", fix))
    if limits.pids_max is not None and limits.pids_current is not None:
        fix = "raise pids.max: docker run --pids-limit=-1, podPidsLimit of the kubelet, or TasksMax= of the service"
        room.append((max(0, limits.pids_max - limits.pids_current), limits.pids_max, "pids.max of the cgroup", fix))
    problems = [
        Problem(
            summary=f"The limit of processes and threads is almost reached: {what} is {most}",
            evidence=(f"{left} are left, and {ranks_words(node)} may want {wanted}",),
            fix=fix,
        )
        for left, most, what, fix in room
        if left < wanted
    ]
    seen = [f"{left} of {most} left ({what})" for left, most, what, _ in room]
    return judged(problems, "; ".join(seen) or "no limit on processes and threads")


@rule(
    "DD127", "somaxconn", Severity.WARNING, "The connection queue (somaxconn) is smaller than the number of ranks",
    group=CheckGroup.LIMITS, needs=("limits",), reads="/proc/sys/net/core/somaxconn, WORLD_SIZE",
)  # fmt: skip
def check_somaxconn(node: Node) -> Answer:
    """Report a listen queue that overflows if all ranks connect simultaneously."""
    ranks, queue = world_size(node), need(node.limits).somaxconn
    if queue is None:
        return skipped("this system does not report net.core.somaxconn")
    if ranks is None:
        return skipped("WORLD_SIZE is not set, so the size of the job is unknown")
    if node.ranks and node.ranks[0] != 0:
        return skipped("the store is on the node of rank 0")
    seen = f"somaxconn {queue}, {ranks} ranks"
    if queue >= ranks:
        return passed(seen)
    summary = f"net.core.somaxconn is {queue}, but {ranks} ranks connect to rank 0 simultaneously"
    return found(summary, seen, fix=f"sudo sysctl -w net.core.somaxconn={max(4096, ranks)}")


@rule(
    "DD128", "disk", Severity.WARNING, "A file system of the job is full, read-only or not responding",
    group=CheckGroup.LIMITS, needs=("limits",),
    reads="statvfs of $TMPDIR, /tmp, the cache and the working directory; with --deep their write speed",
)  # fmt: skip
def check_disk(node: Node) -> Answer:
    """Report a full or broken folder for temporary files, for caches, or for the job's output."""
    volumes = need(node.limits).volumes
    problems, seen = [], []
    for volume in volumes:
        speed = f", writes {number(volume.write_mb_s)} MB/s" if volume.write_mb_s is not None else ""
        closed = "" if volume.writable else ", not writable"
        state = volume.error or f"{format_about(volume.free_bytes)} left{closed}{speed}"
        seen.append(f"{volume.path}: {state}")
        place, evidence, severity = f"{volume.path} ({volume.purpose})", "", None
        fix = f"free space: du -xh --max-depth=1 {volume.path}"
        if volume.temporary:
            fix = "export TMPDIR=/path/on/another/disk"
        if volume.error:
            summary = f"{place}{' cannot be used: it' if volume.timed_out else ':'} {volume.error}"
            fix = f"check its server or mount: grep {volume.path} /proc/mounts"
        elif not volume.writable and volume.temporary:
            summary = f"{place} is not writable"
        elif volume.writable and volume.free_bytes < MIN_FREE_BYTES:
            summary = f"{place} is nearly full: less than {format_about(MIN_FREE_BYTES)} left for this user"
            evidence = f"{format_about(volume.free_bytes)} of {format_about(volume.total_bytes)} left"
        elif volume.writable and volume.write_mb_s is not None and volume.write_mb_s < SLOW_MB_S:
            summary = f"{place} is slow: less than {number(SLOW_MB_S)} MB/s reach the device"
            evidence, severity = f"{number(volume.write_mb_s)} MB/s", Severity.INFO
            fix = "write checkpoints to a faster disk"
        else:
            continue
        said = (evidence,) if evidence else ()
        problems.append(Problem(summary=summary, evidence=said, fix=fix, severity=severity))
    return judged(problems, "; ".join(seen) or "no file system was seen")


MIB, GIB = 1 << 20, 1 << 30
# The default of `docker run` and Kubernetes (https://docs.docker.com/reference/cli/docker/container/run).
DOCKER_SHM_BYTES = 64 * MIB
LOW_SHM_BYTES = 512 * MIB  # the limit below which DeepSpeed's ds_report warns (deepspeed/env_report.py)
LOADER_SHM_BYTES = 2 * GIB  # our choice: a few prefetched batches of images for some workers per rank
STALE_SHARE = 10  # our choice: leftovers are a warning from a tenth of the size on
NAMED_FILES = 8
MEMORY_PER_RANK_BYTES = 2 << 30  # our choice: torch with CUDA takes about half of this before a model is loaded


@rule(
    "DD121", "shm", Severity.WARNING, "/dev/shm is small, full or not writable", group=CheckGroup.LIMITS,
    needs=("limits", "software"),
    reads="statvfs of /dev/shm, the files in it, loader workers that run here; with --deep its write speed",
)  # fmt: skip
def check_shm(node: Node) -> Answer:
    """Report shared memory that is too small for loader workers and NCCL."""
    shm, software = need(node.limits).shm, known(node.software)
    if shm is None:
        if software is None or software.platform != "linux":
            return skipped("this system has no /dev/shm")
        summary = "There is no /dev/shm: loader workers and NCCL cannot share memory"
        fix = "sudo mount -t tmpfs shm /dev/shm"
        return found(summary, "none", fix=fix, severity=Severity.ERROR)
    if shm.volume.error:
        return unknown(f"/dev/shm could not be read: {shm.volume.error}")
    workers = f", {shm.loader_workers} loader workers" if shm.loader_workers else ""
    speed = f", writes {number(shm.volume.write_mb_s)} MB/s" if shm.volume.write_mb_s is not None else ""
    left = f"{format_about(shm.volume.free_bytes)} of {format_about(shm.volume.total_bytes)} left"
    seen, stale = f"{left}{workers}{speed}", shm.stale_files
    problems = [*_small_shm(shm, software.container if software else None, seen)]
    if stale:
        large = shm.stale_bytes * STALE_SHARE >= shm.volume.total_bytes
        summary = "/dev/shm has leftover files of dead processes"
        evidence = (f"{format_about(shm.stale_bytes)} in {count_of(len(stale), 'file')} of torch and NCCL",)
        fix = f"rm {' '.join(stale[:NAMED_FILES])}" + (" …" if len(stale) > NAMED_FILES else "")
        severity = None if large else Severity.INFO
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=severity))
    return judged(problems, seen)


def _small_shm(shm: SharedMemory, container: str | None, seen: str) -> Iterator[Problem]:
    total, workers = shm.volume.total_bytes, shm.loader_workers > 0
    least = LOADER_SHM_BYTES if workers else LOW_SHM_BYTES
    if container == "kubernetes":
        fix = "mount a volume emptyDir {medium: Memory, sizeLimit: 16Gi} at /dev/shm"
    elif container in {"docker", "podman"}:
        fix = f"{container} run --shm-size=16g (or --ipc=host)"
    else:
        fix = "sudo mount -o remount,size=16G /dev/shm"
    severity = None
    if not shm.volume.writable:
        summary = "/dev/shm is not writable: loader workers and NCCL cannot share memory"
        yield Problem(summary=summary, fix="sudo chmod 1777 /dev/shm", severity=Severity.ERROR)
        return
    if total <= DOCKER_SHM_BYTES:
        what = "Docker's default" if total == DOCKER_SHM_BYTES else "less than the container default"
        summary = f"/dev/shm has {format_about(total)}, {what}: too little for loader workers and NCCL (bus errors)"
        severity = Severity.ERROR if workers or total < DOCKER_SHM_BYTES else None
    elif total < least:
        summary = f"/dev/shm has {format_about(total)}: loader workers and NCCL need {format_about(least)}"
    elif shm.volume.free_bytes < DOCKER_SHM_BYTES:
        summary = f"/dev/shm is full: less than {format_about(DOCKER_SHM_BYTES)} of {format_about(total)} is left"
        fix = "run `ls -lS /dev/shm | head` to find the large files"
    else:
        return
    yield Problem(summary=summary, evidence=(seen,), fix=fix, severity=severity)


@rule(
    "DD125", "mem-limit", Severity.WARNING, "Little memory is left, or the OOM killer was active before",
    group=CheckGroup.LIMITS, needs=("limits",),
    reads="MemAvailable, the cgroup's memory.max, memory.current and memory.events, LOCAL_WORLD_SIZE",
)  # fmt: skip
def check_mem_limit(node: Node) -> Answer:
    """Report too little memory for the ranks, and processes that the kernel killed under the same memory limit."""
    limits = need(node.limits)
    amounts, words = [], []
    available, limit, used = limits.memory_available_bytes, limits.memory_limit_bytes, limits.memory_used_bytes
    if available is not None:
        amounts.append((available, "on the machine"))
        if limits.memory_total_bytes is not None:
            words.append(f"{format_about(available)} of {format_about(limits.memory_total_bytes)} available")
    if limit is not None and used is not None:
        amounts.append((max(0, limit - used), "under the cgroup's limit"))
        words.append(f"cgroup: {format_about(used)} of {format_about(limit)} used")
    if limits.oom_kills is not None:
        words.append(count_of(limits.oom_kills, "OOM kill"))
    if limits.swap_total_bytes:
        words.append(f"swap {format_about(limits.swap_total_bytes)}")
    if not amounts:
        return skipped("this system does not report its available memory")
    problems, seen = [], ", ".join(words)
    left, of_what = min(amounts, key=lambda amount: amount[0])
    if left < MEMORY_PER_RANK_BYTES * ranks_here(node):
        summary = f"Less than {format_about(MEMORY_PER_RANK_BYTES)} of memory per rank is left {of_what}"
        evidence = (f"{format_about(left)} left for {ranks_words(node)}", seen)
        fix = "raise the job's memory limit, or end other processes: ps aux --sort=-rss | head"
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix))
    if limits.oom_kills:
        times = "once" if limits.oom_kills == 1 else f"{limits.oom_kills} times"
        summary = "The OOM killer was active before under the current memory limit"
        evidence = (f"it killed {times} since the cgroup was created", seen)
        fix = "raise the memory limit, or use fewer loader workers and smaller batches"
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix))
    return judged(problems, seen)


@rule(
    "DD326", "numa-balancing", Severity.WARNING, "Automatic NUMA balancing is on", group=CheckGroup.LINKS,
    needs=("limits", "software", "gpus"), reads="/proc/sys/kernel/numa_balancing, /sys/devices/system/node",
)  # fmt: skip
def check_numa_balancing(node: Node) -> Answer:
    """Report automatic NUMA balancing on a machine with several memory nodes and GPUs."""
    limits = need(node.limits)
    if limits.numa_balancing is None:
        return skipped("this kernel has no NUMA balancing")
    seen = f"numa_balancing {limits.numa_balancing}, {count_of(limits.numa_nodes, 'memory node')}"
    if limits.numa_nodes < 2 or not limits.numa_balancing:
        return passed(seen)
    summary = f"Automatic NUMA balancing over {limits.numa_nodes} NUMA nodes is on, which can stall ranks"
    fix = "sudo sysctl -w kernel.numa_balancing=0"
    return found(summary, seen, evidence=(seen,), fix=fix, severity=None if nvidia_gpus(node) else Severity.INFO)


# Our choice: with a quota of at most half of the CPUs that a process sees, its threads wait most of the time.
MANY_MORE = 2


@rule(
    "DD124", "cpu-quota", Severity.WARNING, "Ranks and threads need more CPUs than they have", group=CheckGroup.LIMITS,
    needs=("limits",), reads="the cgroup's cpu.max, sched_getaffinity, LOCAL_WORLD_SIZE, OMP_NUM_THREADS",
)  # fmt: skip
def check_cpu_quota(node: Node) -> Answer:
    """Report more ranks or threads than CPUs, by affinity or by the cgroup's quota."""
    limits = need(node.limits)
    cpus, ranks = effective_cpus(node, limits), ranks_here(node)
    threads = node.first.number("OMP_NUM_THREADS")
    said = f", OMP_NUM_THREADS={threads}" if threads is not None else ""
    seen = f"{cpus_words(node, limits)} for {ranks_words(node)}{said}"
    visible = len(cpus_here(node, limits))
    fix = f"export OMP_NUM_THREADS={max(1, int(cpus // ranks))}"
    if cpus < ranks:
        summary = f"Fewer CPUs than ranks: {cpus_words(node, limits)} for {ranks_words(node)}"
        fix = f"give the ranks at least {ranks} CPUs: srun --cpus-per-task, resources.limits.cpu, docker run --cpus"
    elif threads is not None and threads > 0 and ranks * threads > cpus:
        summary = f"{ranks_words(node)} with {threads} threads each share {cpus_words(node, limits)}"
    elif threads is None and limits.cpu_quota is not None and limits.cpu_quota * MANY_MORE <= visible:
        summary = f"torch starts {visible} threads per rank on a quota of {number(cpus)} CPUs, so they are throttled"
    else:
        return passed(seen)
    return found(summary, seen, evidence=(seen,), fix=fix)


@rule(
    "DD126", "omp", Severity.WARNING, "OMP_NUM_THREADS does not match the CPUs per rank", group=CheckGroup.LIMITS,
    needs=("limits",), reads="OMP_NUM_THREADS, LOCAL_WORLD_SIZE, sched_getaffinity, whether torchrun started the ranks",
)  # fmt: skip
def check_omp(node: Node) -> Answer:
    """Report ranks that start too many CPU threads, or only one although more CPUs are free."""
    limits, ranks = need(node.limits), ranks_here(node)
    threads = node.first.variables.get("OMP_NUM_THREADS")
    cpus = effective_cpus(node, limits)
    share = max(1, int(cpus // ranks))
    seen = f"OMP_NUM_THREADS={threads}" if threads is not None else "OMP_NUM_THREADS is not set"
    seen += f", {cpus_words(node, limits)} for {ranks_words(node)}"
    fix = f"export OMP_NUM_THREADS={share}"
    if ranks < 2:
        return skipped("one rank on this node: it can use all CPUs")
    own = [len(process.cpus) for process in node.processes if process.cpus]
    # If not every rank has reported, the others are assumed to be like the one with the most CPUs.
    started = sum(own) if len(own) >= ranks else ranks * max(own, default=0)
    if threads is None and started > cpus:
        summary = f"OMP_NUM_THREADS is not set: each of {ranks} ranks starts one thread for each of {number(cpus)} CPUs"
        return found(summary, seen, fix=fix)
    if threads == "1" and by_torchrun(node.first) and share > 1:
        summary = f"OMP_NUM_THREADS is 1, torchrun's default: each rank uses one of its {share} CPUs"
        return found(summary, seen, fix=fix, severity=Severity.INFO)
    return passed(seen)
