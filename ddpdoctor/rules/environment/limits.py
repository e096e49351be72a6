"""DD122, DD123, DD127 and DD128: open files, processes, the listen queue, and disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.launch import number, ranks_here, ranks_words, world_size
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.limits import Limit, Limits, Volume
    from ddpdoctor.model.node import Node

ENOUGH_FILES = 65536
"""Our choice: what training images and batch systems commonly set. A loader that shares tensors by file descriptor
holds one for each tensor that waits (torch.multiprocessing, sharing strategies)."""
FEW_FILES = 8192
"""Our choice: eight ranks with eight loader workers that each keep a hundred tensors in flight reach it."""
FILES_PER_RANK = 4
"""Our choice: rank 0 holds the store's connections of every rank, and Gloo holds one to each peer in every group."""
FILES_OF_A_PROCESS = 128
"""Our choice: what Python, torch and CUDA have open by themselves."""
TASKS_PER_RANK = 64
"""Our choice: threads of autograd, NCCL, CUDA, pinned memory and the watchdogs, and some loader workers."""
MIN_FREE_BYTES = 1 << 30
"""Our choice: less does not hold a checkpoint, a compiler's cache or the flight recorder's dumps of a node."""
SLOW_MB_S = 20.0
"""Our choice: below this a checkpoint of 1 GB takes about a minute."""


@rule(
    "DD122",
    "nofile",
    Severity.WARNING,
    "The limit on open files is low",
    group=CheckGroup.LIMITS,
    needs=("limits", "software"),
    reads="RLIMIT_NOFILE, WORLD_SIZE",
)
def check_nofile(node: Node) -> Answer:
    """Report a limit on open files that is too low for the job."""
    limit = need(node.limits).nofile
    if limit is None:
        return skipped("this system does not report its limit of open files")
    seen = f"soft limit {_number(limit.soft)}, hard limit {_number(limit.hard)}"
    if limit.soft is None or limit.soft >= ENOUGH_FILES:
        return passed(seen)
    ranks = world_size(node)
    least = FILES_OF_A_PROCESS + FILES_PER_RANK * ranks if ranks else 0
    short = limit.soft < least
    why = f"a job of {ranks} ranks needs {least} on rank 0" if short else "loader workers and large jobs need more"
    problem = Problem(
        summary=f"The limit of open files is only {limit.soft}: {why}",
        evidence=(seen,),
        fix=_raise_files(node, limit),
        severity=_severity_of_files(limit.soft, short=short),
    )
    return judged([problem], seen)


def _severity_of_files(soft: int, *, short: bool) -> Severity:
    if short:
        return Severity.ERROR
    return Severity.WARNING if soft < FEW_FILES else Severity.INFO


def _number(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _raise_files(node: Node, limit: Limit) -> str:
    """Return the command that raises the soft limit, and the hard limit too if it is too low."""
    if limit.hard is None or limit.hard >= ENOUGH_FILES:
        return f"ulimit -n {ENOUGH_FILES}"
    own = f"ulimit -n {limit.hard}, and " if limit.soft is not None and limit.hard > limit.soft else ""
    software = known(node.software)
    container = software.container if software else None
    if container in {"docker", "podman"}:
        return f"{own}{container} run --ulimit nofile={ENOUGH_FILES}:{ENOUGH_FILES} for the container"
    if container is not None:
        return f"{own}raise the hard limit in the container runtime (LimitNOFILE={ENOUGH_FILES})"
    return f'{own}echo "* - nofile {ENOUGH_FILES}" | sudo tee -a /etc/security/limits.conf, then log in again'


@rule(
    "DD123",
    "nproc-pids",
    Severity.WARNING,
    "The limit of processes and threads is almost reached",
    group=CheckGroup.LIMITS,
    needs=("limits",),
    reads="RLIMIT_NPROC, the cgroup's pids.max and pids.current, OMP_NUM_THREADS",
)
def check_nproc_pids(node: Node) -> Answer:
    """Report too little room for the processes and threads of the ranks."""
    limits = need(node.limits)
    wanted = ranks_here(node) * (TASKS_PER_RANK + (node.first.number("OMP_NUM_THREADS") or 1))
    problems = []
    seen = []
    for left, most, what, fix in _task_limits(limits):
        seen.append(f"{left} of {most} left ({what})")
        if left < wanted:
            summary = f"The limit of processes and threads is almost reached: {what} is {most}"
            evidence = (f"{left} are left, and {ranks_words(node)} may want {wanted}",)
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix))
    return judged(problems, "; ".join(seen) or "no limit on processes and threads")


def _task_limits(limits: Limits) -> list[tuple[int, int, str, str]]:
    """Return, for each limit: what is left, the limit, its name, and how to raise it."""
    found = []
    nproc = limits.nproc
    if limits.nproc_applies and nproc is not None and nproc.soft is not None and limits.user_processes is not None:
        higher = nproc.hard is None or nproc.hard > nproc.soft
        fix = f"ulimit -u {nproc.hard or 'unlimited'}" if higher else "raise nproc in /etc/security/limits.conf"
        found.append((max(0, nproc.soft - limits.user_processes), nproc.soft, "RLIMIT_NPROC of this user", fix))
    if limits.pids_max is not None and limits.pids_current is not None:
        fix = "raise pids.max: docker run --pids-limit=-1, podPidsLimit of the kubelet, or TasksMax= of the service"
        found.append((max(0, limits.pids_max - limits.pids_current), limits.pids_max, "pids.max of the cgroup", fix))
    return found


@rule(
    "DD127",
    "somaxconn",
    Severity.WARNING,
    "The connection queue (somaxconn) is smaller than the number of ranks",
    group=CheckGroup.LIMITS,
    needs=("limits",),
    reads="/proc/sys/net/core/somaxconn, WORLD_SIZE",
)
def check_somaxconn(node: Node) -> Answer:
    """Report a listen queue that overflows if all ranks connect at once."""
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
    problem = Problem(
        summary=f"net.core.somaxconn is {queue}, but {ranks} ranks connect to rank 0 at once",
        fix=f"sudo sysctl -w net.core.somaxconn={max(4096, ranks)}",
    )
    return judged([problem], seen)


@rule(
    "DD128",
    "disk",
    Severity.WARNING,
    "A file system of the job is full, read-only or not responding",
    group=CheckGroup.LIMITS,
    needs=("limits",),
    reads="statvfs of $TMPDIR, /tmp, the cache and the working directory; with --deep their write speed",
)
def check_disk(node: Node) -> Answer:
    """Report a full or broken folder for temporary files, for caches, or for the job's output."""
    volumes = need(node.limits).volumes
    problems = [problem for volume in volumes if (problem := _judge_volume(volume)) is not None]
    return judged(problems, "; ".join(_volume_words(volume) for volume in volumes) or "no file system was seen")


def _volume_words(volume: Volume) -> str:
    if volume.error:
        return f"{volume.path}: {volume.error}"
    speed = f", writes {number(volume.write_mb_s)} MB/s" if volume.write_mb_s is not None else ""
    closed = "" if volume.writable else ", not writable"
    return f"{volume.path}: {format_about(volume.free_bytes)} left{closed}{speed}"


def _judge_volume(volume: Volume) -> Problem | None:
    place = f"{volume.path} ({volume.purpose})"
    elsewhere = (
        "export TMPDIR=/path/on/another/disk" if volume.temporary else f"free space: du -xh --max-depth=1 {volume.path}"
    )
    if volume.error:
        return Problem(
            summary=f"{place}{' cannot be used: it' if volume.timed_out else ':'} {volume.error}",
            fix=f"check its server or mount: grep {volume.path} /proc/mounts",
        )
    if not volume.writable:
        return Problem(summary=f"{place} is not writable", fix=elsewhere) if volume.temporary else None
    if volume.free_bytes < MIN_FREE_BYTES:
        summary = f"{place} is nearly full: less than {format_about(MIN_FREE_BYTES)} left for this user"
        left = f"{format_about(volume.free_bytes)} of {format_about(volume.total_bytes)} left"
        return Problem(summary=summary, evidence=(left,), fix=elsewhere)
    if volume.write_mb_s is not None and volume.write_mb_s < SLOW_MB_S:
        return Problem(
            summary=f"{place} is slow: less than {number(SLOW_MB_S)} MB/s reach the device",
            evidence=(f"{number(volume.write_mb_s)} MB/s",),
            fix="write checkpoints to a faster disk",
            severity=Severity.INFO,
        )
    return None
