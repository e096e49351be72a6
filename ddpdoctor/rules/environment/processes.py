"""Shared by rules over processes: their ranks and variables, and how many nodes, ranks and CPUs the job has.

Without a job one rank is assumed, so that only sure problems are reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.rendezvous import NodeCount, read_node_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.limits import Limits
    from ddpdoctor.model.node import Fleet, Node, NodeProcess

ONE_NODE = "the job has one node, according to the launcher and the variables"
"""Many faults that are fatal between nodes do no harm on one."""
FIRST_HOST_OF_SLURM = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def ranks_of(processes: Iterable[NodeProcess]) -> tuple[int, ...]:
    """Return the sorted ranks of processes, without those that have no rank."""
    return tuple(sorted({process.rank for process in processes if process.rank is not None}))


def show_variables(process: NodeProcess, names: Iterable[str]) -> str:
    """Return "RANK=0, WORLD_SIZE=8" for the variables that are set."""
    return ", ".join(f"{name}={process.variables[name]}" for name in names if name in process.variables)


def count_nodes(fleet: Fleet) -> NodeCount | None:
    """Return the largest count from the nodes that answered, the launcher and the variables, or None."""
    counts = [
        count for _, process in fleet.processes() for count in (read_node_count(process), _slurm_job(process)) if count
    ]
    if fleet.gathered:
        counts.append(NodeCount(nodes=len(fleet.nodes), source=f"{len(fleet.nodes)} nodes answered"))
    if fleet.nnodes is not None:
        counts.append(NodeCount(nodes=fleet.nnodes, source=f"the launcher was started for {fleet.nnodes} nodes"))
    return max(counts, key=lambda count: count.nodes, default=None)


def _slurm_job(process: NodeProcess) -> NodeCount | None:
    """Return the nodes of the Slurm job whose batch script runs here; `srun` will start ranks on all of them.

    The shell of `salloc` on a login node has no SLURM_NODEID, because that host is not part of the job.
    """
    nodes = process.number("SLURM_NNODES")
    if nodes is None or process.number("SLURM_NODEID") is None or read_node_count(process) is not None:
        return None
    return NodeCount(nodes=nodes, source=f"SLURM_NNODES is {nodes}")


def has_several_nodes(fleet: Fleet) -> bool:
    """Say whether the job has more than one node."""
    count = count_nodes(fleet)
    return len(fleet.nodes) > 1 or (count is not None and count.nodes > 1)


def ranks_here(node: Node) -> int:
    """Return LOCAL_WORLD_SIZE, else the number of ranks that reported from this node, else 1."""
    said = node.first.number("LOCAL_WORLD_SIZE")
    return said if said is not None and said > 0 else max(1, len(node.ranks))


def ranks_words(node: Node) -> str:
    """Return "1 rank" or "8 ranks"."""
    return count_of(ranks_here(node), "rank")


def world_size(node: Node) -> int | None:
    """Return WORLD_SIZE, or None if it is not a number above 0."""
    said = node.first.number("WORLD_SIZE")
    return said if said is not None and said > 0 else None


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
    return count_of(allowed, "CPU")


def number(value: float) -> str:
    """Return "2" or "2.5"."""
    return f"{value:.1f}".removesuffix(".0")
