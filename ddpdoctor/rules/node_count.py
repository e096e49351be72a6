"""How many nodes a job has, as far as anybody says: much that is fatal between nodes does no harm on one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rendezvous import NodeCount, nodes_told

if TYPE_CHECKING:
    from ddpdoctor.model.node import Fleet

ONE_NODE = "the job has one node, as far as the launcher and the variables tell"


def count_nodes(fleet: Fleet) -> NodeCount | None:
    """Return the most that anybody tells of: the nodes that answered, the launcher, the variables. None: nobody."""
    told = [count for _, process in fleet.processes() if (count := nodes_told(process)) is not None]
    if fleet.gathered:
        told.append(NodeCount(nodes=len(fleet.nodes), source=f"{len(fleet.nodes)} nodes answered"))
    if fleet.nnodes is not None:
        told.append(NodeCount(nodes=fleet.nnodes, source=f"the launcher was told of {fleet.nnodes} nodes"))
    return max(told, key=lambda count: count.nodes, default=None)


def has_several_nodes(fleet: Fleet) -> bool:
    """Say whether the job has more than one node."""
    count = count_nodes(fleet)
    return len(fleet.nodes) > 1 or (count is not None and count.nodes > 1)
