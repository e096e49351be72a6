"""How many ranks and CPUs a node has. Without a job one rank is assumed, so that only sure problems are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.limits import Limits
    from ddpdoctor.model.node import Node


def ranks_here(node: Node) -> int:
    """Return LOCAL_WORLD_SIZE, else the number of ranks that reported from this node, else 1."""
    said = node.first.number("LOCAL_WORLD_SIZE")
    return said if said is not None and said > 0 else max(1, len(node.ranks))


def ranks_words(node: Node) -> str:
    """Return "1 rank" or "8 ranks"."""
    count = ranks_here(node)
    return f"{count} rank" + ("" if count == 1 else "s")


def world_size(node: Node) -> int | None:
    """Return WORLD_SIZE, or None if it is not a number above 0."""
    said = node.first.number("WORLD_SIZE")
    return said if said is not None and said > 0 else None


def by_torchrun(node: Node) -> bool:
    """Say whether torchrun started the processes of a node."""
    return "TORCHELASTIC_RUN_ID" in node.first.variables


def cpus_here(node: Node, limits: Limits) -> frozenset[int]:
    """Return the CPUs that any process of the job may run on."""
    return frozenset(cpu for process in node.processes for cpu in process.cpus) or frozenset(limits.cpus_allowed)


def effective_cpus(node: Node, limits: Limits) -> float:
    """Return how many CPUs the processes of a node can use, by affinity and quota."""
    allowed = len(cpus_here(node, limits)) or limits.cpus_online
    return allowed if limits.cpu_quota is None else min(float(allowed), limits.cpu_quota)


def cpus_words(node: Node, limits: Limits) -> str:
    """Return "8 CPUs", or "a quota of 2.5 of 64 CPUs"."""
    allowed = len(cpus_here(node, limits)) or limits.cpus_online
    if limits.cpu_quota is not None and limits.cpu_quota < allowed:
        return f"a quota of {number(limits.cpu_quota)} of {allowed} CPUs"
    return f"{allowed} CPU" + ("" if allowed == 1 else "s")


def number(value: float) -> str:
    """Return "2" or "2.5"."""
    return f"{value:.1f}".removesuffix(".0")
