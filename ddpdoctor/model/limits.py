"""The limits of a machine, its container and its shell for a job, its clock, and the load of other work."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit. None means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A mounted folder and its free space."""

    path: str
    purpose: str
    """Such as "temporary files, working directory", for people to read."""
    fstype: str | None
    total_bytes: int
    free_bytes: int
    writable: bool
    write_mb_s: float | None = None
    """Measured with --deep; MB is 1e6 bytes."""
    error: str | None = None
    """Why it could not be read: "did not answer within 2 s". Sizes are 0 then."""
    temporary: bool = False
    """Whether it is for temporary files."""
    timed_out: bool = False
    """It did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """What is mounted at /dev/shm."""

    volume: Volume
    stale_files: tuple[str, ...]
    """Files of NCCL and torch whose owners no longer exist."""
    stale_bytes: int
    loader_workers: int = 0
    """Number of torch DataLoader workers that run here now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this process, its cgroup and the machine. None: unlimited, or unknown if the field says so."""

    nofile: Limit | None
    memlock: Limit | None
    nproc: Limit | None
    user_processes: int | None
    """Threads that this user runs now, as RLIMIT_NPROC counts them, or None if unknown."""
    pids_max: int | None
    """The tightest limit on tasks among the cgroup and those above it."""
    pids_current: int | None
    cpus_online: int
    cpus_allowed: tuple[int, ...]
    """CPU affinity of the collecting process."""
    cpu_quota: float | None
    """CPUs that the cgroup grants, such as 2.5. None: no quota."""
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    swap_total_bytes: int | None
    memory_limit_bytes: int | None
    """The tightest memory limit among the cgroup and those above it. None: no limit."""
    memory_used_bytes: int | None
    """Memory in use by the cgroup of that limit, without droppable page cache."""
    oom_kills: int | None
    """How many OOM kills the cgroup of that limit has had. None: no limit, or unknown."""
    shm: SharedMemory | None
    volumes: tuple[Volume, ...]
    somaxconn: int | None
    numa_nodes: int
    """Number of memory nodes, also of those without processors, such as a GPU's."""
    numa_balancing: int | None
    nproc_applies: bool = True
    """False for root, because RLIMIT_NPROC does not apply to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The wall clock."""

    synchronized: bool | None = field(metadata={"json": "synchronised"})
    """The kernel's state (STA_UNSYNC), or None if it cannot be read."""
    offset_s: float | None
    """Offset from the clock of rank 0, positive if this clock is ahead. None on rank 0's node and without gathering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyCpu:
    """A processor that others used while the ranks slept."""

    cpu: int
    share: float
    """Share of the sampled time, 0 to 1, that other processes, the kernel and a hypervisor used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Governor:
    """How the kernel sets the frequency of some processors."""

    name: str
    """scaling_governor: performance, powersave, schedutil."""
    driver: str
    """scaling_driver: intel_pstate, amd-pstate-epp, acpi-cpufreq; empty if unknown."""
    preference: str
    """energy_performance_preference, such as balance_power; empty if there is none."""
    cpus: int
    """To how many of this process's allowed processors this applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy other work keeps a machine. The ranks, their children and their launcher do not count."""

    window_s: float
    """Length of the sample."""
    busy: tuple[BusyCpu, ...]
    """Processors with any other use, by number."""
    steal_share: float | None
    """The share of its busy time since boot that this virtual machine lost to others by its hypervisor, or None if
    unknown."""
    governors: tuple[Governor, ...]
    """Empty if the kernel does not show them, as in most virtual machines."""
