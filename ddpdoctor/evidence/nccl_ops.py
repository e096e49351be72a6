"""Operations as ProcessGroupNCCL names them in its texts, in the names of torch's Python functions."""

from __future__ import annotations

_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recvanysource": "recv",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "unknown": "",
}
"""From c10d's ``opTypeToString`` in lower case; the others are Python's names."""


def python_name(op_type: str) -> str:
    """Return Python's name for an ``OpType``: "all_reduce" for "ALLREDUCE", "" for "UNKNOWN"."""
    name = op_type.lower()
    return _OPS.get(name, name)
