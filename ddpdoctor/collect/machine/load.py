"""Reads how busy other work keeps the processors, and how the kernel chooses their clock rates.

The kernel counts the idle time of every processor (/proc/stat). The rest of a short window is work. From that we
subtract the work of our own processes (/proc/PID/task/TID/stat, which names the processor that a thread last ran on).
The result includes neighbors in other containers and virtual machines, whose processes we cannot see.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.proc import descendants, read_processes
from ddpdoctor.model.limits import BusyCpu, Governor, Load
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

WINDOW_S = 0.4
"""Our choice: long compared with the kernel's ticks of 1 to 10 ms, and short compared with the benchmark."""
TICKS_PER_S = 100
"""USER_HZ, the unit in /proc/stat and /proc/PID/stat on every Linux that torch runs on."""
LEAST_SHARE = 0.05
"""Our choice: two ticks in the window. A processor that others used less counts as idle."""
CPU_FOLDER = "/sys/devices/system/cpu"
# Fields after the name in /proc/PID/task/TID/stat, counted from 0: utime, stime, processor (14, 15 and 39 in proc(5)).
_UTIME, _STIME, _PROCESSOR = 11, 12, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """One processor's times in /proc/stat since boot, in seconds."""

    idle_s: float
    """Includes waiting for a disk, because nobody computes meanwhile."""
    busy_s: float
    steal_s: float
    """The part of ``busy_s`` that a hypervisor gave to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTimes:
    """The CPU time of our threads since they started."""

    seconds: dict[str, float]
    """By "PID/TID"."""
    cpus: dict[str, int]
    """The processor that each thread last ran on."""


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
    return Load(
        window_s=window_s,
        busy=find_busy(before, after, window_s, own_work(own_before, read_own_times(system))),
        steal_share=steal_share(after.values()),
        governors=read_governors(system),
    )


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

    If one of our threads moves to another processor meanwhile, we subtract its time from the wrong one, which can
    become negative. We then scale the others down by as much, so that the sum contains none of our work.
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
    found: dict[int, float] = defaultdict(float)
    for thread, seconds in after.seconds.items():
        found[after.cpus[thread]] += seconds - before.seconds.get(thread, 0.0)
    return dict(found)


def steal_share(times: Iterable[CpuTimes]) -> float | None:
    """Return the share of busy time since boot that a hypervisor gave to others, or None without busy time."""
    times = tuple(times)
    wanted = sum(one.busy_s for one in times)
    return sum(one.steal_s for one in times) / wanted if wanted else None


def read_own_times(system: System) -> OwnTimes:
    """Return the CPU time of our threads so far."""
    seconds: dict[str, float] = {}
    cpus: dict[str, int] = {}
    for pid in own_pids(system):
        for thread in system.names(f"/proc/{pid}/task"):
            words = system.text_or(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
            if len(words) > _PROCESSOR:
                seconds[f"{pid}/{thread}"] = (int(words[_UTIME]) + int(words[_STIME])) / TICKS_PER_S
                cpus[f"{pid}/{thread}"] = int(words[_PROCESSOR])
    return OwnTimes(seconds=seconds, cpus=cpus)


def own_pids(system: System) -> set[int]:
    """Return this process and the other ranks here, which have the same command line, with all their descendants.

    Their parents, which are launchers that may serve the store, also count, but not the parents' other children.
    """
    processes = read_processes(system.path("/proc"))
    own = system.text_or("/proc/self/cmdline")
    ranks = [process for process in processes.values() if system.text_or(f"/proc/{process.pid}/cmdline") == own]
    below = {child.pid for rank in ranks for child in descendants(rank.pid, processes)}
    return {rank.pid for rank in ranks} | {rank.ppid for rank in ranks} | below


def read_governors(system: System) -> tuple[Governor, ...]:
    """Return the distinct frequency settings of the processors that this process may use."""
    found = Counter(_governors(system))
    return tuple(
        Governor(name=name, driver=driver, preference=preference, cpus=cpus)
        for (name, driver, preference), cpus in sorted(found.items())
    )


def _governors(system: System) -> Iterator[tuple[str, str, str]]:
    for cpu in system.calls.cpus():
        folder = f"{CPU_FOLDER}/cpu{cpu}/cpufreq"
        name = system.text_or(f"{folder}/scaling_governor")
        if name:
            driver = system.text_or(f"{folder}/scaling_driver")
            yield name, driver, system.text_or(f"{folder}/energy_performance_preference")
