"""How many nodes a job has, as far as known: many faults that are fatal between nodes do no harm on one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rendezvous import NodeCount, nodes_told

if TYPE_CHECKING:
    from ddpdoctor.model.node import Fleet, Process

ONE_NODE = "the job has one node, as far as the launcher and the variables tell"


def count_nodes(fleet: Fleet) -> NodeCount | None:
    """Return the largest count from the nodes that answered, the launcher and the variables, or None."""
    told = [count for _, process in fleet.processes() for count in (nodes_told(process), _slurm_job(process)) if count]
    if fleet.gathered:
        told.append(NodeCount(nodes=len(fleet.nodes), source=f"{len(fleet.nodes)} nodes answered"))
    if fleet.nnodes is not None:
        told.append(NodeCount(nodes=fleet.nnodes, source=f"the launcher was told of {fleet.nnodes} nodes"))
    return max(told, key=lambda count: count.nodes, default=None)


def _slurm_job(process: Process) -> NodeCount | None:
    """Return the nodes of the Slurm job whose batch script runs here; `srun` will start ranks on all of them.

    The shell of `salloc` on a login node has no SLURM_NODEID, because that host is not part of the job.
    """
    nodes = process.number("SLURM_NNODES")
    if nodes is None or process.number("SLURM_NODEID") is None or nodes_told(process) is not None:
        return None
    return NodeCount(nodes=nodes, source=f"SLURM_NNODES is {nodes}")


def has_several_nodes(fleet: Fleet) -> bool:
    """Say whether the job has more than one node."""
    count = count_nodes(fleet)
    return len(fleet.nodes) > 1 or (count is not None and count.nodes > 1)
