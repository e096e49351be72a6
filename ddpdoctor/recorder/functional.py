"""Records functional collectives, which DTensor, tensor parallelism and compiled code make: operators of torch.

Python sees two objects of an operator, the packet and its default overload. Both hold the C++ function in ``_op``, so
the record wraps that function, and torch.compile still sees the objects that it knows.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple

from . import calls, groups, hooks
from .state import here
from .step_clock import begin_wait, end_wait, is_capturing

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
# By operation as ``calls`` records it: its operators. Ranks may make the same one in any way.
OPERATORS = {
    "broadcast": ("broadcast", "broadcast_"),
    "all_reduce": ("all_reduce", "all_reduce_"),
    "all_reduce_coalesced": ("all_reduce_coalesced", "all_reduce_coalesced_"),
    "all_gather_into_tensor": ("all_gather_into_tensor", "all_gather_into_tensor_out"),
    "all_gather_coalesced": ("all_gather_into_tensor_coalesced",),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", "reduce_scatter_tensor_out"),
    "reduce_scatter_coalesced": ("reduce_scatter_tensor_coalesced",),
    "all_to_all_single": ("all_to_all_single",),
    "isend": ("isend",),
    "irecv": ("irecv",),
    "batch_isend_irecv": ("batch_p2p_ops",),
}
# Operators that wait for one result, or (torch 2.15) for all results of one collective.
WAITS = ("wait_tensor", "wait_tensors")
# Operators that wait for their own result: namespace, name, operation.
WAITING_OPERATORS = (("_dtensor", "shard_dim_alltoall", "all_to_all_single"),)
# Results that are remembered until they are waited for. Our choice: code that drops results must not fill memory.
MAX_OUTPUTS = 4096
_TENSORS = ("input", "inputs", "tensor", "tensors", "self")
_plain: Tuple[Any, ...] = ()  # Tensor classes that hold their own data. Set once torch is imported.
# Returns the number of active torch dispatch modes, such as tracing, which intercept a call.
_modes: Callable[[], int] = int
_outputs: Dict[int, int] = {}  # by the storage of a result: the record of the collective that fills it


class Function:
    """Replaces an operator's C++ function. It compares equal to it, because torch keys operators by that hash."""

    __slots__ = ("original", "recorded")

    def __init__(self, original: Any, recorded: Callable[..., Any]) -> None:
        self.original, self.recorded = original, recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorded(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.original == (other.original if isinstance(other, Function) else other))

    def __hash__(self) -> int:
        return hash(self.original)


class _Operator(calls.Hook):
    """What is known of one operator before it is called. ``waits``: whether it waits for its own result."""

    def __init__(self, op: str, waits: bool, arguments: List[str]) -> None:
        super().__init__(op, arguments, next((name for name in arguments if name in _TENSORS), arguments[0]))
        self.waits = waits

    def begin(self, frame: Any, args: Any, kwargs: Any) -> calls.Call:
        if not _is_real(self.argument(self.tensor or "", args, kwargs)):
            return calls.UNRECORDED
        return super().begin(frame.f_back, args, kwargs)

    def end(self, call: calls.Call, result: Any) -> None:
        index, since, _, known, begun = call
        end_wait(since, self.counted)
        if not index or here.ring is None:
            return
        if self.moves:
            known.moved += groups.begun_by(known) - begun
        if self.waits or is_capturing():  # what is captured runs only in a replay, and nobody waits for it before
            here.ring.end(index)
            return
        here.ring.returned(index)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            key = tensor.untyped_storage()._cdata
            # The record of a result that was dropped ends here: nobody waits for it, and its storage is used again.
            dropped = _outputs.pop(key, 0)
            if not dropped and len(_outputs) >= MAX_OUTPUTS:
                dropped = _outputs.pop(next(iter(_outputs), 0), 0)
            if dropped != index:
                calls.ended(dropped)
            _outputs[key] = index


def _is_real(about: Any) -> bool:
    """Return whether a call really runs: it is not traced, and its tensors are not wrappers around others."""
    if isinstance(about, (list, tuple)):
        about = about[0] if about else None
    return type(about) in _plain and not _modes()


def record(op: str, waits: bool, original: Callable[..., Any], arguments: List[str]) -> Callable[..., Any]:
    operator = _Operator(op, waits, arguments)
    return calls.recording(op, original, operator.begin, operator.end, counts=operator.counted)


def record_wait(original: Callable[..., Any], arguments: List[str]) -> Callable[..., Any]:
    def begin(unused: Any, args: Any, also_unused: Any) -> Any:
        if not _outputs or not args or not _is_real(args[0]):
            return calls.UNRECORDED
        tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        call = max([_outputs.pop(tensor.untyped_storage()._cdata, 0) for tensor in tensors])
        return (calls.begin("work_wait", seq=call), begin_wait(), call) if call else calls.UNRECORDED

    def end(waiting: Any, unused: Any) -> None:
        index, since, call = waiting
        end_wait(since, counts=True)
        calls.ended(index)
        calls.ended(call)

    return calls.recording("work_wait", original, begin, end)


def patch(unused: Any) -> None:
    global _plain, _modes
    import torch

    _plain, _modes = (torch.Tensor, torch.nn.Parameter), torch._C._len_torch_dispatch_stack
    found = [
        _patch_operator(torch, namespace, name, functools.partial(record, op, False))
        for namespace in NAMESPACES for op, names in OPERATORS.items() for name in names
    ]  # fmt: skip
    for namespace, name, op in WAITING_OPERATORS:
        _patch_operator(torch, namespace, name, functools.partial(record, op, True))
    waits = [_patch_operator(torch, NAMESPACES[0], name, record_wait) for name in WAITS]
    hooks.note("functional collectives", any(found) and any(waits))


def _patch_operator(torch: Any, namespace: str, name: str, around: Callable[[Any, List[str]], Any]) -> bool:
    """Put a record around the functions that a packet and its overload hold; return whether torch has the operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return False
    hooks.note("%s.%s" % (namespace, name), found=True)
    overload = packet.default
    arguments = [argument.name for argument in overload._schema.arguments]
    for holder in (overload, packet):
        if not isinstance(holder._op, Function):
            holder._op = Function(holder._op, around(holder._op, arguments))
    return True
