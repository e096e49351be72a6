"""DD124 and DD126: CPUs, and how many threads the ranks start on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import need
from ddpdoctor.model.rendezvous import by_torchrun
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.launch import (
    cpus_here,
    cpus_words,
    effective_cpus,
    number,
    ranks_here,
    ranks_words,
)
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.limits import Limits
    from ddpdoctor.model.node import Node

MANY_MORE = 2
"""Our choice: with a quota of at most half of the CPUs that a process sees, its threads wait most of the time."""


@rule(
    "DD124",
    "cpu-quota",
    Severity.WARNING,
    "Ranks and threads need more CPUs than they have",
    group=CheckGroup.LIMITS,
    needs=("limits",),
    reads="the cgroup's cpu.max, sched_getaffinity, LOCAL_WORLD_SIZE, OMP_NUM_THREADS",
)
def check_cpu_quota(node: Node) -> Answer:
    """Report more ranks or threads than CPUs, by affinity or by the cgroup's quota."""
    limits = need(node.limits)
    cpus, ranks = effective_cpus(node, limits), ranks_here(node)
    threads = node.first.number("OMP_NUM_THREADS")
    said = f", OMP_NUM_THREADS={threads}" if threads is not None else ""
    seen = f"{cpus_words(node, limits)} for {ranks_words(node)}{said}"
    fitting = max(1, int(cpus // ranks))
    if cpus < ranks:
        summary = f"Fewer CPUs than ranks: {cpus_words(node, limits)} for {ranks_words(node)}"
        fix = f"give the ranks at least {ranks} CPUs: srun --cpus-per-task, resources.limits.cpu, docker run --cpus"
        return judged([Problem(summary=summary, evidence=(seen,), fix=fix)], seen)
    if threads is not None and threads > 0 and ranks * threads > cpus:
        summary = f"{ranks_words(node)} with {threads} threads each share {cpus_words(node, limits)}"
        return judged([Problem(summary=summary, evidence=(seen,), fix=f"export OMP_NUM_THREADS={fitting}")], seen)
    if threads is None and _is_throttled(node, limits):
        visible = len(cpus_here(node, limits))
        summary = f"torch starts {visible} threads per rank on a quota of {number(cpus)} CPUs, so they are throttled"
        return judged([Problem(summary=summary, evidence=(seen,), fix=f"export OMP_NUM_THREADS={fitting}")], seen)
    return passed(seen)


def _is_throttled(node: Node, limits: Limits) -> bool:
    return limits.cpu_quota is not None and limits.cpu_quota * MANY_MORE <= len(cpus_here(node, limits))


@rule(
    "DD126",
    "omp",
    Severity.WARNING,
    "OMP_NUM_THREADS does not match the CPUs per rank",
    group=CheckGroup.LIMITS,
    needs=("limits",),
    reads="OMP_NUM_THREADS, LOCAL_WORLD_SIZE, sched_getaffinity, whether torchrun started the ranks",
)
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
    if threads is None and _overlap(node, cpus):
        summary = f"OMP_NUM_THREADS is not set: each of {ranks} ranks starts one thread for each of {number(cpus)} CPUs"
        return judged([Problem(summary=summary, fix=fix)], seen)
    if threads == "1" and by_torchrun(node.first) and share > 1:
        summary = f"OMP_NUM_THREADS is 1, torchrun's default: each rank uses one of its {share} CPUs"
        return judged([Problem(summary=summary, fix=fix, severity=Severity.INFO)], seen)
    return passed(seen)


def _overlap(node: Node, cpus: float) -> bool:
    """Say whether the ranks would start more threads than they have CPUs."""
    own = [len(process.cpus) for process in node.processes if process.cpus]
    if len(own) < ranks_here(node):
        # Not every rank has reported: assume that the others are like the one with the most CPUs.
        return ranks_here(node) * max(own, default=0) > cpus
    return sum(own) > cpus
