"""Names that torch's C++ gives to operations and dtypes, and those by which Python knows them. No judgment, no I/O."""

from __future__ import annotations

_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all_v_single": "all_to_all_single",
    "allgather_coalesced": "all_gather_coalesced",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced": "all_gather_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "ALLGATHER_coalesced": "all_gather_coalesced",
    "REDUCE_SCATTER_coalesced": "reduce_scatter_coalesced",
    "all_reduce_barrier": "barrier",
    "all_reduce_sparse": "all_reduce",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recvanysource": "recv",
    "unknown": "",
}
"""By the names of torch's profiler and flight recorder, and of c10d's ``opTypeToString`` in lower case."""
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "ComplexHalf": "complex32",
}  # fmt: skip


def op_name(profiled: str) -> str:
    """Return Python's name for an operation, by the name that torch's profiler and flight recorder use."""
    return _OPS.get(profiled, profiled)


def op_type_name(op_type: str) -> str:
    """Return Python's name for an ``OpType``: "all_reduce" for "ALLREDUCE", "" for "UNKNOWN"."""
    return op_name(op_type.lower())


def dtype_name(scalar_type: str) -> str:
    """Return Python's name for a dtype of c10/core/ScalarType.h. Those that are not listed are capitalized only."""
    return _DTYPES.get(scalar_type, scalar_type.lower())
