"""DD125 and DD326: the memory that a job may use, and whether the kernel moves it between NUMA nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.processes import ranks_here, ranks_words
from ddpdoctor.rules.environment.wheels import nvidia_gpus
from ddpdoctor.rules.registry import Group, rule

if TYPE_CHECKING:
    from ddpdoctor.model.limits import Limits
    from ddpdoctor.model.node import Node

MEMORY_PER_RANK_BYTES = 2 << 30
"""Our choice: torch with CUDA takes about half of this before a model is loaded."""


@rule(
    "DD125",
    "mem-limit",
    Severity.WARNING,
    "Little memory is left, or the kernel has killed for memory before",
    group=Group.LIMITS,
    needs=("limits",),
    reads="MemAvailable, the cgroup's memory.max, memory.current and memory.events, LOCAL_WORLD_SIZE",
)
def check_mem_limit(node: Node) -> Answer:
    """Report too little memory for the ranks, and processes that the kernel killed under the same memory limit.

    ## What it means

    When memory runs out, the kernel kills a process with SIGKILL. A rank or a loader worker is gone without a message,
    and the others wait.

    ## How it is recognized

    The memory left is the smaller of MemAvailable and the cgroup's limit minus its use. Page cache that can be dropped
    does not count as used. Less than 2 GiB a rank (our choice) is a warning. So are past kills in the cgroup whose
    limit applies here. Kills on the machine outside such a limit are not counted.

    ## What else looks like it

    An earlier job in the same container or pod may have been killed: the counter lasts as long as the cgroup.

    ## What to do

    Raise the limit (`docker run --memory`, `resources.limits.memory`, `sbatch --mem`), or use fewer loader workers,
    less prefetching or smaller batches.
    """
    limits = need(node.limits)
    left, of_what = _memory_left(limits)
    if left is None:
        return skipped("this system does not tell how much memory is left")
    problems = []
    wanted = MEMORY_PER_RANK_BYTES * ranks_here(node)
    if left < wanted:
        problems.append(
            Problem(
                summary=f"Less than {format_about(MEMORY_PER_RANK_BYTES)} of memory a rank is left {of_what}",
                evidence=(f"{format_about(left)} left for {ranks_words(node)}", _memory_words(limits)),
                fix="raise the memory limit of the job, or end what else uses memory: ps aux --sort=-rss | head",
            )
        )
    if limits.oom_kills:
        times = "once" if limits.oom_kills == 1 else f"{limits.oom_kills} times"
        problems.append(
            Problem(
                summary="The kernel has killed for memory before, under the limit that holds here",
                evidence=(f"it has killed {times} since the cgroup was made", _memory_words(limits)),
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
        found.append((max(0, limits.memory_limit_bytes - limits.memory_used_bytes), "below the cgroup's limit"))
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
        words.append(f"{limits.oom_kills} kills for memory")
    if limits.swap_total_bytes:
        words.append(f"swap {format_about(limits.swap_total_bytes)}")
    return ", ".join(words)


@rule(
    "DD326",
    "numa-balancing",
    Severity.WARNING,
    "The kernel moves memory between NUMA nodes by itself",
    group=Group.LINKS,
    needs=("limits", "software", "gpus"),
    reads="/proc/sys/kernel/numa_balancing, /sys/devices/system/node",
)
def check_numa_balancing(node: Node) -> Answer:
    """Report automatic NUMA balancing on a machine with several memory nodes and GPUs.

    ## What it means

    The kernel unmaps pages at intervals to see which CPU uses them, and moves them. Ranks that copy to GPUs and network
    cards then stall now and then. That slows every collective and makes steps differ in length.

    ## How it is recognized

    `kernel.numa_balancing` is not 0 and there are two or more memory nodes. It is a warning if there are NVIDIA GPUs,
    otherwise an info. AMD's guide to training and NVIDIA's guide to Grace advise turning it off.

    ## What to do

    Run the command that is shown, as root on the host. Put `kernel.numa_balancing=0` into `/etc/sysctl.d/` to keep it.
    Ranks that are bound to the memory node of their GPU (`torchrun --numa-binding`) lose nothing.
    """
    limits = need(node.limits)
    if limits.numa_balancing is None:
        return skipped("this kernel has no NUMA balancing")
    seen = f"numa_balancing {limits.numa_balancing}, {limits.numa_nodes} memory node{'s' * (limits.numa_nodes != 1)}"
    if limits.numa_nodes < 2 or not limits.numa_balancing:
        return passed(seen)
    problem = Problem(
        summary=f"The kernel balances memory over {limits.numa_nodes} NUMA nodes by itself, which makes ranks stall",
        evidence=(seen,),
        fix="sudo sysctl -w kernel.numa_balancing=0",
        severity=None if nvidia_gpus(node) else Severity.INFO,
    )
    return judged([problem], seen)
