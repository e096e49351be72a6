"""Reads how busy the machine is with what is not ours, and how the kernel chooses the processors' clocks.

The kernel counts, for every processor, how long it was idle (/proc/stat); the rest of a short moment is work. What our
own processes worked in it (/proc/PID/task/TID/stat, with the processor that a thread ran on last) is taken off. That
sees neighbours in other containers and on other virtual machines too, whose processes do not show.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.process.proc import descendants, read_processes
from ddpdoctor.model.load import BusyCpu, Governor, Load
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

WINDOW_S = 0.4
"""Ours: long against the kernel's ticks of 1 to 10 ms, and short against the bench."""
TICKS_PER_S = 100
"""USER_HZ, the unit of /proc/stat and /proc/PID/stat on every Linux that torch runs on."""
LEAST_SHARE = 0.05
"""Ours: twice the unit above in the window; a processor that others used less was idle."""
CPU_FOLDER = "/sys/devices/system/cpu"
# Places in /proc/PID/task/TID/stat behind the name, counted from 0: utime, stime, processor (proc(5): 14, 15 and 39).
_UTIME, _STIME, _PROCESSOR = 11, 12, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """What /proc/stat says of one processor since the start, in seconds."""

    idle_s: float
    """Waiting for a disk included: nobody computes meanwhile."""
    busy_s: float
    steal_s: float
    """Of busy_s, what a hypervisor gave to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTimes:
    """What our threads have worked since they started."""

    seconds: dict[str, float]
    """By "PID/TID"."""
    cpus: dict[str, int]
    """The processor that each ran on last."""


def read_load(system: System, _plan: ReadingPlan) -> Load:
    """Look for a moment; raises ``NotRead`` where the kernel does not count, as in a sandbox or on a Mac."""
    before = parse_cpu_times(system.text_or("/proc/stat"))
    if not before:
        raise NotRead(Unread(why=Why.ABSENT, reason="this system does not tell how busy its processors are"))
    own_before, started = read_own_times(system), time.monotonic()
    before = parse_cpu_times(system.text_or("/proc/stat"))
    time.sleep(WINDOW_S)
    after, window_s = parse_cpu_times(system.text_or("/proc/stat")), time.monotonic() - started
    if before == after:
        raise NotRead(Unread(why=Why.ABSENT, reason="/proc/stat stands still here, as in a sandbox"))
    return Load(
        window_s=window_s,
        busy=find_busy(before, after, window_s, own_work(own_before, read_own_times(system))),
        steal_share=steal_share(after.values()),
        governors=read_governors(system),
    )


def parse_cpu_times(text: str) -> dict[int, CpuTimes]:
    """Return the lines "cpu0 …" of /proc/stat by processor."""
    found = {}
    for number, words in re.findall(r"^cpu(\d+) (.+)$", text, re.MULTILINE):
        user, nice, system, idle, iowait, irq, softirq, steal = [
            int(word) / TICKS_PER_S for word in [*words.split(), *["0"] * 8][:8]
        ]  # guest time, which comes next, is in user already
        busy_s = user + nice + system + irq + softirq + steal
        found[int(number)] = CpuTimes(idle_s=idle + iowait, busy_s=busy_s, steal_s=steal)
    return found


def find_busy(
    before: dict[int, CpuTimes], after: dict[int, CpuTimes], window_s: float, own_s: dict[int, float]
) -> tuple[BusyCpu, ...]:
    """Return what of each processor's time was neither idle nor our own; ``own_s`` is by processor.

    A thread of ours that changes its processor meanwhile is taken off the wrong one, which then has less than nothing
    left: the others are lowered by as much, so that in sum nothing of ours is left.
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
    """Return the seconds that our threads worked in between, by the processor that each was seen on."""
    found: dict[int, float] = defaultdict(float)
    for thread, seconds in after.seconds.items():
        found[after.cpus[thread]] += seconds - before.seconds.get(thread, 0.0)
    return dict(found)


def steal_share(times: Iterable[CpuTimes]) -> float | None:
    """Return which part of the time that was worked or wanted a hypervisor took, since the start."""
    times = tuple(times)
    wanted = sum(one.busy_s for one in times)
    return sum(one.steal_s for one in times) / wanted if wanted else None


def read_own_times(system: System) -> OwnTimes:
    """Return what our threads have worked so far."""
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
    """Return this process and the ranks beside it, which have its very command line, with all their children.

    Their parents are ours too: the launcher, which may serve their store. Its other children are not.
    """
    processes = read_processes(system.path("/proc"))
    own = system.text_or("/proc/self/cmdline")
    ranks = [process for process in processes.values() if system.text_or(f"/proc/{process.pid}/cmdline") == own]
    below = {child.pid for rank in ranks for child in descendants(rank.pid, processes)}
    return {rank.pid for rank in ranks} | {rank.ppid for rank in ranks} | below


def read_governors(system: System) -> tuple[Governor, ...]:
    """Return the different settings of the processors that this process may use."""
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
