"""DD121: the size and state of /dev/shm."""
# ruff: noqa: S108 - this file only names the folder in texts and writes nothing there

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.environment.processes import number
from ddpdoctor.rules.registry import Group, rule

if TYPE_CHECKING:
    from ddpdoctor.model.limits import SharedMemory
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


@rule(
    "DD121",
    "shm",
    Severity.WARNING,
    "/dev/shm is small, full or may not be written to",
    group=Group.LIMITS,
    needs=("limits", "software"),
    reads="statvfs of /dev/shm, the files in it, loader workers that run here; with --deep its write speed",
)
def check_shm(node: Node) -> Answer:
    """Report shared memory that is too small for loader workers and NCCL.

    ## What it means

    Workers of a DataLoader pass their batches through /dev/shm, and NCCL's ranks on one node exchange data through it.
    When it is full, SIGBUS kills the process that writes to it ("DataLoader worker is killed by signal: Bus error"), or
    NCCL says "unhandled system error".

    ## How it is recognized

    | /dev/shm | severity |
    |---|---|
    | not there, less than 64 MiB in all, or not writable | error |
    | 64 MiB, what Docker and Kubernetes give | warning; an error while loader workers run here |
    | below 512 MiB, where DeepSpeed's ds_report warns | warning |
    | below 2 GiB (our choice) while loader workers run here | warning |
    | large enough, and less than 64 MiB of it is free | warning |

    Files of torch and NCCL that are older than ten minutes and whose owners have ended are a warning if they fill a
    tenth of /dev/shm or more, otherwise an info. The check looks for them only if it can see all processes of the
    machine.

    ## What to do

    With Docker, use `docker run --shm-size=16g` (or `--ipc=host`). In Kubernetes, mount a volume
    `emptyDir: {medium: Memory}` at /dev/shm. On a machine, run `mount -o remount,size=...`. NVIDIA recommends at least
    1 GB for NCCL.
    """
    shm, software = need(node.limits).shm, known(node.software)
    if shm is None:
        if software is None or software.platform != "linux":
            return skipped("this system has no /dev/shm")
        summary = "There is no /dev/shm: loader workers and NCCL have nothing to share memory through"
        return judged(
            [Problem(summary=summary, fix="sudo mount -t tmpfs shm /dev/shm", severity=Severity.ERROR)], "none"
        )
    if shm.volume.error:
        return unknown(f"/dev/shm could not be looked at: {shm.volume.error}")
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
        summary = "/dev/shm may not be written to: loader workers and NCCL cannot share memory"
        return Problem(summary=summary, fix="sudo chmod 1777 /dev/shm", severity=Severity.ERROR)
    fix = _enlarge(container)
    if total <= DOCKER_SHM_BYTES:
        bad = workers or total < DOCKER_SHM_BYTES
        what = "Docker's default" if total == DOCKER_SHM_BYTES else "less than any container has by default"
        return Problem(
            summary=f"/dev/shm has {format_about(total)}, {what}: loader workers and NCCL run out of it (bus errors)",
            evidence=evidence,
            fix=fix,
            severity=Severity.ERROR if bad else None,
        )
    least = LOADER_SHM_BYTES if workers else LOW_SHM_BYTES
    if total < least:
        summary = (
            f"/dev/shm has {format_about(total)}: less than the {format_about(least)} that loader workers and NCCL want"
        )
        return Problem(summary=summary, evidence=evidence, fix=fix)
    if free < DOCKER_SHM_BYTES:
        summary = f"/dev/shm is full: less than {format_about(DOCKER_SHM_BYTES)} of {format_about(total)} is left"
        return Problem(summary=summary, evidence=evidence, fix="ls -lS /dev/shm | head shows what fills it")
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
        summary="/dev/shm holds files of processes that have gone",
        evidence=(f"{format_about(shm.stale_bytes)} in {count} file{'s' if count > 1 else ''} of torch and NCCL",),
        fix=f"rm {some}",
        severity=None if shm.stale_bytes * STALE_SHARE >= shm.volume.total_bytes else Severity.INFO,
    )
