"""Reads the limits that the shell, the control groups and the machine set for a job, and how busy it is otherwise.

/proc/self/cgroup names the group; each above it limits it too. The path is "/" in a container with its own cgroup
namespace. In one without, it is the host's, and only the mount's top exists.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_one
from ddpdoctor.collect.proc import below, by_parent, read_processes
from ddpdoctor.collect.system import HERE, UNLIMITED, ReadingPlan, System, mount_of
from ddpdoctor.model.facts import Space
from ddpdoctor.model.node import BusyCpu, Clock, Governor, Limit, Limits, Load, SharedMemory, Volume
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LOADER_WORKER = "pt_data_worker"  # torch's name for them (torch/utils/data/_utils/worker.py, since 2.6)
CGROUPS = "/sys/fs/cgroup"
UNLIMITED_BYTES = 1 << 60  # more than any machine has; version 1 writes nearly 2**63 for "no limit"
NODES = "/sys/devices/system/node"  # a GPU's own node, as on Grace Hopper, has an empty list of processors
SHARED = "/dev/shm"  # noqa: S108 - only read
MIN_AGE_S = 600.0  # our choice: NCCL unlinks a segment as soon as both sides have opened it
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO: every process of the machine is seen in it
_OF_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")  # torch/csrc/.../StorageSharing.cpp: PID, random, counter
_OF_NCCL = re.compile(r"nccl-\w{6}")
LIMIT_S = 2.0  # needed because a network file system with a dead server blocks every caller
WRITE_S = 1.0
WRITE_LIMIT_S = 4.0
BLOCK = bytes(4 << 20)
MAX_WRITE_BYTES = 256 << 20  # our choice: more than a disk caches, and soon written
TEMPORARY = frozenset({"temporary files", "/tmp"})  # noqa: S108 - purposes, no files
FREE_SHARE = 4  # we write at most one part in this many of the free space
WINDOW_S = 0.4  # our choice: long compared with the kernel's ticks of 1 to 10 ms, and short compared with the benchmark
TICKS_PER_S = 100  # USER_HZ, the unit in /proc/stat and /proc/PID/stat on every Linux that torch runs on
LEAST_SHARE = 0.05  # Our choice: two ticks in the window. A processor that others used less counts as idle.
CPU_FOLDER = "/sys/devices/system/cpu"
# Fields after the name in /proc/PID/task/TID/stat, counted from 0: utime, stime, processor (14, 15 and 39 in proc(5)).
_UTIME, _STIME, _PROCESSOR = 11, 12, 36
OwnTimes = dict[str, tuple[float, int]]  # by "PID/TID": CPU seconds since its start, and its last processor


def read_limits(system: System, plan: ReadingPlan) -> Limits:
    """Return all limits, None for those that this system lacks; a container counts its own processes."""
    statuses = [
        system.text_or(f"/proc/{pid}/status") for pid in ("self", *filter(str.isdecimal, system.names("/proc")))
    ]
    own, *others = [dict(re.findall(r"^(\w+):\s+(\S+)", status, re.MULTILINE)) for status in statuses]
    user = own.get("Uid")  # the real user id, because the limit applies to that user
    uid = int(user) if user else None
    user_threads = sum(int(other.get("Threads", "0")) for other in others if other.get("Uid") == user) if user else None
    loader_workers = sum(other.get("Name") == LOADER_WORKER for other in others) if user else 0
    tasks = []
    for folder in cgroup_folders("pids", system):
        most, current = (system.number_or_none(f"{folder}/{name}") for name in ("pids.max", "pids.current"))
        if most is not None and current is not None:
            tasks.append((most, current))
    task_limit = min(tasks, key=lambda task: task[0] - task[1], default=None)
    sizes: dict[str, int] = parse_meminfo(system.text_or("/proc/meminfo"))
    if not sizes and system.live:  # such as macOS
        import psutil

        memory = psutil.virtual_memory()
        swap_bytes = psutil.swap_memory().total
        sizes = {"MemTotal": memory.total, "MemAvailable": memory.available, "SwapTotal": swap_bytes}
    resources: dict[str, Limit] = {}
    for name in ("NOFILE", "MEMLOCK", "NPROC"):
        with contextlib.suppress(OSError):
            soft, hard = (None if value == UNLIMITED else value for value in system.calls.rlimit(name))
            resources[name] = Limit(soft=soft, hard=hard)
    shm = None
    if system.exists(SHARED):
        volume = read_volume(system, SHARED, mount_of(system, SHARED)[1], "shared memory", deep=plan.deep)
        stale = _stale_files(system, uid)
        stale_bytes = sum(stat.st_size for stat in stale.values())
        names = tuple(sorted(stale))
        shm = SharedMemory(volume=volume, stale_files=names, stale_bytes=stale_bytes, loader_workers=loader_workers)
    limit = read_memory_limit(system)
    cpus = system.calls.cpus()
    return Limits(
        nofile=resources.get("NOFILE"), memlock=resources.get("MEMLOCK"), nproc=resources.get("NPROC"),
        user_processes=user_threads, pids_max=task_limit[0] if task_limit is not None else None,
        pids_current=task_limit[1] if task_limit is not None else None,
        cpus_online=len(parse_cpu_list(system.text_or("/sys/devices/system/cpu/online"))) or len(cpus),
        cpus_allowed=cpus, cpu_quota=read_cpu_quota(system), memory_total_bytes=sizes.get("MemTotal"),
        memory_available_bytes=sizes.get("MemAvailable"), swap_total_bytes=sizes.get("SwapTotal"),
        memory_limit_bytes=limit.limit_bytes if limit is not None else None,
        memory_used_bytes=limit.used_bytes if limit is not None else None,
        oom_kills=limit.oom_kills if limit is not None else None,
        shm=shm, volumes=read_volumes(system, deep=plan.deep),
        somaxconn=system.number_or_none("/proc/sys/net/core/somaxconn"),
        numa_nodes=len(memory_nodes(system)), numa_balancing=system.number_or_none("/proc/sys/kernel/numa_balancing"),
        nproc_applies=uid != 0,
    )  # fmt: skip


def read_clock(system: System, plan: ReadingPlan) -> Clock:  # noqa: ARG001 - all collectors get both
    """Return whether the clock is synchronized, from adjtimex; the node that gathers facts measures the offset."""
    try:
        unsynchronized = system.calls.clock_unsynchronized()
    except OSError:
        return Clock(synchronized=None, offset_s=None)
    return Clock(synchronized=not unsynchronized, offset_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit(Space):
    """A limit on memory, the use that counts against it, and how often the kernel has killed a process for it."""

    oom_kills: int | None


def cgroup_folders(controller: str, system: System) -> tuple[str, ...]:
    """Return a controller's folders: this process's group, then those above; outside the namespace only the top."""
    folders: list[str] = []
    for line in system.text_or("/proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            tops = [CGROUPS, f"{CGROUPS}/unified"]
        elif controller in controllers.split(","):
            tops = [f"{CGROUPS}/{controller}", f"{CGROUPS}/{controllers}"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        folders += ["/".join((top, *parts[:count])) for top in tops for count in range(len(parts), -1, -1)]
    return tuple(dict.fromkeys(folder for folder in [*folders, CGROUPS] if system.path(folder).is_dir()))


def _oom_kills(folder: str, system: System) -> int | None:
    texts = (system.text_or(f"{folder}/{name}") for name in ("memory.events", "memory.oom_control"))
    found = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts)
    return next((int(match[1]) for match in found if match), None)


def read_oom_kills(system: System = HERE) -> int | None:
    """Return how often the kernel has killed a process of our group for memory, or None if that cannot be read."""
    counts = (_oom_kills(folder, system) for folder in cgroup_folders("memory", system))
    return next((count for count in counts if count is not None), None)


def read_memory_limit(system: System = HERE) -> MemoryLimit | None:
    """Return the memory limit that leaves the least, or None if memory is not limited."""
    limits = []
    for folder in cgroup_folders("memory", system):
        limit, used = (
            system.number_or_none(f"{folder}/memory.{new}") or system.number_or_none(f"{folder}/memory.{old}_in_bytes")
            for new, old in (("max", "limit"), ("current", "usage"))
        )
        if limit is None or limit >= UNLIMITED_BYTES:
            continue
        # The kernel drops inactive page cache when a job needs memory. In version 1, "total_" has child groups too.
        stat = system.text_or(f"{folder}/memory.stat")
        name = "total_inactive_file" if re.search("^total_", stat, re.MULTILINE) else "inactive_file"
        cache = re.search(rf"^{name} (\d+)$", stat, re.MULTILINE)
        used_bytes = max(0, (used or 0) - (int(cache[1]) if cache else 0))
        limits.append(MemoryLimit(limit_bytes=limit, used_bytes=used_bytes, oom_kills=_oom_kills(folder, system)))
    return min(limits, key=lambda limit: limit.limit_bytes - limit.used_bytes, default=None)


def read_cpu_quota(system: System) -> float | None:
    """Return the CPU quota in CPUs, or None if there is none."""
    quotas = []
    for folder in cgroup_folders("cpu", system):
        words = system.text_or(f"{folder}/cpu.max").split() or [
            system.text_or(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def read_machine(system: System = HERE) -> Space | None:
    """Return the machine's total memory, and how much of it is not available."""
    sizes = parse_meminfo(system.text_or("/proc/meminfo"))
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return None if total is None or available is None else Space(limit_bytes=total, used_bytes=total - available)


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes, by name."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def read_shared() -> Space | None:
    """Return the size and use of /dev/shm, or None if it does not exist or has no limit."""
    try:
        total, free = HERE.calls.statvfs(SHARED)
    except OSError:
        return None
    return Space(limit_bytes=total, used_bytes=total - free) if total else None


# The readers by field of ``HostCauses``.
MEMORY_READERS: dict[str, Callable[[], Space | None]] = {
    "group": read_memory_limit,
    "machine": read_machine,
    "shared_memory": read_shared,
}


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs in "0-3,8,10-11", or () for any other text."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return ()
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def memory_nodes(system: System) -> tuple[str, ...]:
    """Return the memory nodes of the machine."""
    return tuple(name for name in system.names(NODES) if re.fullmatch(r"node\d+", name))


def _stale_files(system: System, uid: int | None) -> dict[str, os.stat_result]:
    # In a container, the process may belong to another container or to the host, so we return nothing there. We skip
    # other users' files, because their processes may be hidden, but root sees all processes.
    try:
        if system.live and system.path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE:
            return {}
    except OSError:
        return {}
    stale = {}
    for name in system.names(SHARED):
        path = f"{SHARED}/{name}"
        try:
            stat = system.path(path).stat()
        except OSError:
            continue
        if (system.live and uid not in {0, stat.st_uid}) or time.time() - stat.st_mtime <= MIN_AGE_S:
            continue
        of_torch = _OF_TORCH.fullmatch(name)
        if of_torch:
            used = system.exists(f"/proc/{of_torch.group(1)}")
        else:  # to look who has the file mapped is slow, so it comes last
            pids = (pid for pid in system.names("/proc") if pid.isdecimal())
            used = not _OF_NCCL.fullmatch(name) or any(path in system.text_or(f"/proc/{pid}/maps") for pid in pids)
        if not used:
            stale[path] = stat
    return stale


def read_volumes(system: System, *, deep: bool) -> tuple[Volume, ...]:
    """Return the file systems for temporary files, caches and the working directory, without repeats."""
    temporary, folder = system.env.get("TMPDIR"), system.env.get("PWD", "/")
    if system.live:
        try:
            folder = os.getcwd()  # noqa: PTH109 - a System's paths are strings
        except OSError:
            folder = "/"
    cache = system.env.get("XDG_CACHE_HOME") or f"{system.env.get('HOME', '/root')}/.cache"
    places = [("temporary files", temporary or "/tmp"), ("cache", cache)]  # noqa: S108 - only read
    if temporary:
        places.append(("/tmp", "/tmp"))  # noqa: S108 - torch's flight recorder ignores TMPDIR
    volumes: dict[str, tuple[str, str | None, list[str]]] = {}
    for purpose, place in [*places, ("working directory", folder)]:
        path = place
        while len(path) > 1 and not system.exists(path):  # ~/.cache may not exist yet
            path = path.rstrip("/").rpartition("/")[0] or "/"
        mount, fstype = mount_of(system, path)
        volumes.setdefault(mount, (path, fstype, []))[2].append(purpose)
    return tuple(
        replace(read_volume(system, path, fstype, ", ".join(of), deep=deep), temporary=not TEMPORARY.isdisjoint(of))
        for path, fstype, of in volumes.values()
    )


def read_volume(system: System, path: str, fstype: str | None, purpose: str, *, deep: bool) -> Volume:
    """Return one file system; if it does not answer, ``error`` says so."""
    size = ask_one(lambda: (system.calls.statvfs(path), system.calls.writable(path)), LIMIT_S)
    (total, free), writable = size.value or ((0, 0), False)
    speed = None
    if deep and writable and system.live:
        most = min(MAX_WRITE_BYTES, free // FREE_SHARE)
        speed = ask_one(lambda: measure_writing(path, most), WRITE_LIMIT_S).value
    error = None if size.error is None else size.error.strerror or str(size.error)
    return Volume(
        path=path, purpose=purpose, fstype=fstype, total_bytes=total, free_bytes=free,
        writable=writable, write_mb_s=speed,
        error=f"did not answer within {LIMIT_S:.0f} s" if size.timed_out else error, timed_out=size.timed_out,
    )  # fmt: skip


def measure_writing(path: str, max_bytes: int, limit_s: float = WRITE_S) -> float | None:
    """Write a nameless file and sync for at most ``limit_s``; return MB/s, or None if the disk is full."""
    if max_bytes < len(BLOCK):
        return None
    written = 0
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        started = time.monotonic()
        while written + len(BLOCK) <= max_bytes and time.monotonic() - started < limit_s:
            written += os.write(file.fileno(), BLOCK)
            os.fsync(file.fileno())
        return written / 1e6 / max(time.monotonic() - started, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """One processor's times in /proc/stat since boot, in seconds."""

    idle_s: float  # includes waiting for a disk, because nobody computes meanwhile
    busy_s: float
    steal_s: float  # the part of ``busy_s`` that a hypervisor gave to others


def read_load(system: System, _plan: ReadingPlan) -> Load:
    """Measure for ``WINDOW_S``; raises ``NotRead`` if the kernel does not count, as in a sandbox or on a Mac."""
    before = parse_cpu_times(system.text_or("/proc/stat"))
    if not before:
        raise NotRead(Unread(why=Why.ABSENT, reason="this system does not report how busy its processors are"))
    own_before, started = read_own_times(system), time.monotonic()
    before = parse_cpu_times(system.text_or("/proc/stat"))
    time.sleep(WINDOW_S)
    after, window_s = parse_cpu_times(system.text_or("/proc/stat")), time.monotonic() - started
    if before == after:
        raise NotRead(Unread(why=Why.ABSENT, reason="/proc/stat does not change here, as in a sandbox"))
    busy = find_busy(before, after, window_s, own_work(own_before, read_own_times(system)))
    steal, governors = steal_share(after.values()), read_governors(system)
    return Load(window_s=window_s, busy=busy, steal_share=steal, governors=governors)


def parse_cpu_times(text: str) -> dict[int, CpuTimes]:
    """Return the times from the lines "cpu0 …" of /proc/stat, by processor."""
    found = {}
    for number, words in re.findall(r"^cpu(\d+) (.+)$", text, re.MULTILINE):
        user, nice, system, idle, iowait, irq, softirq, steal = [
            int(word) / TICKS_PER_S for word in [*words.split(), *["0"] * 8][:8]
        ]  # guest time comes next; user already includes it
        busy_s = user + nice + system + irq + softirq + steal
        found[int(number)] = CpuTimes(idle_s=idle + iowait, busy_s=busy_s, steal_s=steal)
    return found


def find_busy(
    before: dict[int, CpuTimes], after: dict[int, CpuTimes], window_s: float, own_s: dict[int, float]
) -> tuple[BusyCpu, ...]:
    """Return the share of each processor's time that was neither idle nor ours; ``own_s`` is by processor.

    If one of our threads moves, its time is taken from the wrong processor, which can become negative: we scale the
    others down by as much.
    """
    left = {
        cpu: 1 - (after[cpu].idle_s - before[cpu].idle_s + own_s.get(cpu, 0.0)) / window_s
        for cpu in sorted(before.keys() & after.keys())
    }
    positive = sum(share for share in left.values() if share > 0)
    scale = max(0.0, sum(left.values())) / positive if positive else 0.0
    shares = {cpu: min(1.0, share * scale) for cpu, share in left.items()}
    return tuple(BusyCpu(cpu=cpu, share=share) for cpu, share in shares.items() if share >= LEAST_SHARE)


def own_work(before: OwnTimes, after: OwnTimes) -> dict[int, float]:
    """Return the seconds that our threads worked between two readings, by processor."""
    seconds_by_cpu: dict[int, float] = defaultdict(float)
    for thread, (seconds, cpu) in after.items():
        seconds_by_cpu[cpu] += seconds - before.get(thread, (0.0, 0))[0]
    return dict(seconds_by_cpu)


def steal_share(times: Iterable[CpuTimes]) -> float | None:
    """Return the share of busy time since boot that a hypervisor gave to others, or None without busy time."""
    times = tuple(times)
    wanted = sum(time.busy_s for time in times)
    return sum(time.steal_s for time in times) / wanted if wanted else None


def read_own_times(system: System) -> OwnTimes:
    """Return the CPU time of our threads so far."""
    times: OwnTimes = {}
    for pid in own_pids(system):
        for thread in system.names(f"/proc/{pid}/task"):
            words = system.text_or(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
            if len(words) > _PROCESSOR:
                seconds = (int(words[_UTIME]) + int(words[_STIME])) / TICKS_PER_S
                times[f"{pid}/{thread}"] = (seconds, int(words[_PROCESSOR]))
    return times


def own_pids(system: System) -> set[int]:
    """Return the ranks here (with our command line), all below them, and their parents, which may serve the store."""
    processes = read_processes(system.path("/proc"))
    own = system.text_or("/proc/self/cmdline")
    ranks = [process for process in processes.values() if system.text_or(f"/proc/{process.pid}/cmdline") == own]
    children = by_parent(processes)
    return {pid for rank in ranks for pid in (rank.pid, rank.ppid, *(child.pid for child in below(rank.pid, children)))}


def read_governors(system: System) -> tuple[Governor, ...]:
    """Return the distinct frequency settings of the processors that this process may use."""
    settings = Counter[tuple[str, str, str]]()
    for cpu in system.calls.cpus():
        folder = f"{CPU_FOLDER}/cpu{cpu}/cpufreq"
        name, driver = system.text_or(f"{folder}/scaling_governor"), system.text_or(f"{folder}/scaling_driver")
        if name:
            settings[name, driver, system.text_or(f"{folder}/energy_performance_preference")] += 1
    return tuple(
        Governor(name=name, driver=driver, preference=preference, cpus=cpus)
        for (name, driver, preference), cpus in sorted(settings.items())
    )
