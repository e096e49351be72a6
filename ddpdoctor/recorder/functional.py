"""Records functional collectives, which DTensor, tensor parallelism and compiled code make.

They call no function of torch.distributed. Each is an operator under ``torch.ops``, and C++ passes it to the process
group. Python sees two objects of an operator, the packet and its default overload. Both hold the C++ function in
``_op``, so the record wraps that function, and torch.compile still sees the objects that it knows.
"""

from __future__ import annotations

import _thread
import functools
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import calls, groups, hooks
from .state import guarded, here, sealed, wall
from .step_clock import begin_wait, end_wait, is_capturing
from .storage import ring_layout

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

_plain: Tuple[Any, ...] = ()  # Tensor classes that hold their own data. Set once torch is imported.
# Returns the number of active torch dispatch modes, such as tracing, which intercept a call.
_modes: Callable[[], int] = int
_outputs: Dict[int, int] = {}  # by the storage of a result: the record of the collective that fills it


class Function:
    """Replaces an operator's C++ function. It compares equal to it, because torch keys operators by that hash."""

    __slots__ = ("original", "recorded")

    def __init__(self, original: Any, recorded: Callable[..., Any]) -> None:
        self.original = original
        self.recorded = recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call, with a record around it."""
        return self.recorded(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the C++ function."""
        return getattr(self.original, name)

    def __eq__(self, other: object) -> bool:
        """Return whether this stands for the same function."""
        return bool(self.original == (other.original if isinstance(other, Function) else other))

    def __hash__(self) -> int:
        """Return the hash of the C++ function."""
        return hash(self.original)


class _Operator:
    """What is known of one operator before it is called."""

    def __init__(self, op: str, arguments: List[str]) -> None:
        self.op = op
        self.p2p = op in calls.POINT_TO_POINT
        self.arguments = arguments
        self.group_at = arguments.index("group_name")
        self.about_at = next((i for i, name in enumerate(arguments) if name in _TENSORS), 0)
        self.redop_at = arguments.index("reduce_op") if "reduce_op" in arguments else None
        self.peer_at = next((i for i, name in enumerate(arguments) if name in ("src", "dst")), None)

    def given(self, at: Optional[int], args: Any, kwargs: Any) -> Any:
        """Return an argument by its position, or None if it was not given."""
        if at is None:
            return None
        return args[at] if at < len(args) else kwargs.get(self.arguments[at])

    def begin(self, frame: Any, args: Any, kwargs: Any) -> Tuple[int, Any, int]:
        """Return the record's index, the group, and its count of collectives. The group is None if torch is tracing."""
        ring = here.ring
        about = self.given(self.about_at, args, kwargs)
        if ring is None or not _is_real(about):
            return 0, None, 0
        group = self.given(self.group_at, args, kwargs)
        if isinstance(group, str):
            group = groups.c10d._resolve_process_group(group)
        found = groups.known(group)
        found = found.aside if found.aside is not None and calls.is_on_cpu(about) else found
        begun = groups.begun_by(found)
        counts = begun >= 0 and not self.p2p
        redop = self.given(self.redop_at, args, kwargs)
        flags = (ring_layout.FLAG_P2P if self.p2p else 0) | (
            ring_layout.FLAG_MAIN if _thread.get_ident() == here.main_thread else 0
        )
        peer = self.given(self.peer_at, args, kwargs)
        if not isinstance(peer, int):
            peer = ring_layout.NO_PEER
        elif not self.p2p:  # torch gives a broadcast's root as the rank in the group
            peer = int(groups.c10d.get_global_rank(group, peer))
        kind = calls.kind_of(
            ring, frame, self.op, groups.name_id(ring, found), *calls.tensors_of(about),
            redop.upper() if isinstance(redop, str) else "", peer, flags,
        )  # fmt: skip
        return ring.begin(kind.packed, begun + 1 if counts else ring_layout.NO_SEQ), found, begun

    def end(self, index: int, found: Any, begun: int, result: Any) -> None:
        """Leave the end of the record to the operator that waits for the result."""
        if found is None or here.ring is None:
            return
        if self.p2p:
            found.moved += groups.begun_by(found) - begun
        if is_capturing():  # it runs only when the graph is replayed, and nobody waits for it before
            here.ring.end(index)
            return
        here.ring.returned(index)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            _keep(tensor, index)


_TENSORS = ("input", "inputs", "tensor", "tensors", "self")


def _is_real(about: Any) -> bool:
    """Return whether a call really runs: it is not traced, and its tensors are not wrappers around others."""
    if isinstance(about, (list, tuple)):
        about = about[0] if about else None
    return type(about) in _plain and not _modes()


def _keep(tensor: Any, index: int) -> None:
    """Remember whose result a tensor is. End the record of a result that was dropped, because nobody waits for it."""
    key = tensor.untyped_storage()._cdata
    dropped = _outputs.pop(key, 0)  # the storage of a dropped result is soon used again
    if not dropped and len(_outputs) >= MAX_OUTPUTS:
        dropped = _outputs.pop(next(iter(_outputs), 0), 0)
    if dropped != index:
        calls.ended(dropped)
    _outputs[key] = index


def record(op: str, waits: bool, original: Callable[..., Any], arguments: List[str]) -> Callable[..., Any]:
    """Return the function of an operator with a record around each call."""
    operator = _Operator(op, arguments)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        index, group, begun, began = 0, None, 0, 0
        try:
            index, group, begun = operator.begin(sys._getframe(2), args, kwargs)
        except Exception as error:
            if not sealed[wall.gi_running][operator.op, error]:
                raise
        try:
            began = begin_wait() if group is not None else 0
            result = original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, began, not operator.p2p]
            sealed[wall.gi_running][calls.failed, index, operator.op, error]
            raise
        end_wait(began, not operator.p2p)
        if waits:
            calls.ended(index)
            return result
        try:
            operator.end(index, group, begun, result)
        except BaseException as error:
            sealed[wall.gi_running][calls.ended, index]
            if not sealed[wall.gi_running][operator.op, error]:
                raise
        return result

    return recorded


def record_wait(original: Callable[..., Any], arguments: List[str]) -> Callable[..., Any]:
    """Return ``wait_tensor``, or ``wait_tensors``, with a record of which collective is waited for."""

    def wait(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        call = index = began = 0
        try:
            call, index = (_begin_wait(tensor) or (0, 0)) if _outputs else (0, 0)
            began = begin_wait() if call else 0
            result = original(tensor, *args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, began, True]
            sealed[wall.gi_running][calls.failed, index, "work_wait", error]
            raise
        end_wait(began, counts=True)
        if call:
            calls.ended(index)
            calls.ended(call)
        return result

    return wait


@guarded("wait_tensor")
def _begin_wait(about: Any) -> Tuple[int, int]:
    """Return the record of the collective whose results are waited for, and that of the wait; 0 if there is none."""
    if not _is_real(about):
        return 0, 0
    tensors = about if isinstance(about, (list, tuple)) else (about,)
    call = max([_outputs.pop(tensor.untyped_storage()._cdata, 0) for tensor in tensors])
    return call, calls.begin("work_wait", seq=call) if call else 0


def patch(unused: Any) -> None:
    """Put the records around the operators, once ``torch.distributed._functional_collectives`` is imported."""
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
