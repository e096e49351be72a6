"""Records collectives and point-to-point calls of torch.distributed, when they begin and when they end."""

from __future__ import annotations

import _thread
import inspect
import sys
import time
from typing import Any, Callable, Dict, Optional, Tuple

from .. import capture, hooks
from ..speed import hand_made
from ..stacks.errors import note_handled
from ..state import guarded, here, pass_on, sealed, wall
from ..storage import ring_layout
from ..training.step_clock import clock, ended_collective
from ..wrappers import wraps
from . import detail, groups, records, works
from .waiting import end_wait

COLLECTIVES = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "gather": "tensor",
    "gather_into_tensor": "tensor",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": None,
    "monitored_barrier": None,
}  # type: Dict[str, Optional[str]]
"""By name of the call: the argument whose dtype and shape are recorded."""
POINT_TO_POINT = {"send": "tensor", "recv": "tensor", "isend": "tensor", "irecv": "tensor", "batch_isend_irecv": None}
RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "gather_single": "gather_into_tensor",
}
"""New names of collectives (torch 2.13 and 2.15), recorded under the old one, which functional collectives keep."""
_PEER = ("dst", "src", "group_dst", "group_src")
MONITORED = "monitored_barrier"
"""It is made of sends and receives. It is recorded under the next sequence number like a collective, but does not use
it up."""
_redops: Dict[int, Tuple[Any, str]] = {}
MAX_REDOPS = 64
_NO_REDOP = (None, "")
_NOWHERE = 99
"""A position that no argument has."""
_UNRECORDED = (0, 0, 0, None, 0)
"""What ``_Hook.begin`` returns for a call that is not recorded."""
_NO_PEER = ring_layout.NO_PEER
_NO_SEQ = ring_layout.NO_SEQ
_exc_info = sys.exc_info
_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def begin(op: str, group: int = 0, seq: int = ring_layout.NO_SEQ) -> int:
    """Record that a phase of training or a wait begins; return the record's index.

    Only a hook itself may call this, because the frame of the call is two levels up. ``group`` is an interned name.
    """
    ring = here.ring
    if ring is None:
        return 0
    flags = ring_layout.FLAG_MAIN if _get_ident() == here.main_thread else 0
    kind = records.kind_of(ring, sys._getframe(2), op, group, flags=flags)
    now = _now_ns()
    if flags and _exc_info()[1] is not None:
        note_handled(_exc_info()[1], now)
    return ring.begin(kind.packed, seq, now)


def tensors_of(about: Any) -> Tuple[Any, Any, int]:
    """Return dtype, shape and number of the tensors that a call is given. The dtype is None if there is no tensor."""
    tensors = 1
    if isinstance(about, (list, tuple)):
        tensors = len(about)
        about = about[0] if about else None
    dtype = getattr(about, "dtype", None)
    if dtype is None:
        return None, (), 0 if about is None else tensors
    return dtype, about.shape, tensors


def is_on_cpu(about: Any) -> bool:
    """Return whether a tensor, or the first of several, is on the CPU."""
    about = about[0] if isinstance(about, (list, tuple)) and about else about
    return bool(getattr(getattr(about, "device", None), "type", "") == "cpu")


class _Hook:
    """What is known of one function of torch.distributed before it is called."""

    def __init__(self, op: str, original: Callable[..., Any], tensor: Optional[str], p2p: bool) -> None:
        self.op = op
        self.p2p = p2p
        self.counted = not p2p
        self.flags = (ring_layout.FLAG_P2P if p2p else 0) | (ring_layout.FLAG_ASYNC if op in ("isend", "irecv") else 0)
        self.main_flags = self.flags | ring_layout.FLAG_MAIN
        self.rerouted = p2p and op in detail.OPERATIONS
        self.moves = self.rerouted or op == MONITORED
        code = inspect.unwrap(original).__code__
        self.at = {name: i for i, name in enumerate(code.co_varnames[: code.co_argcount])}
        self.peers = tuple(name for name in _PEER if name in self.at)
        self.tensor = tensor
        self.is_batch = op == "batch_isend_irecv"
        self.group_at = self.at.get("group", _NOWHERE)
        self.tensor_at = self.at.get(tensor or "", _NOWHERE)
        self.binds_device = "bound_device_id" in code.co_consts
        """Whether ``barrier`` uses the device that the group was made for (torch 2.7 and later)."""

    def argument(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return an argument by its name, or None if it was not given."""
        i = self.at.get(name, _NOWHERE)
        return args[i] if i < len(args) else kwargs.get(name)

    def group(self, args: Any, kwargs: Any) -> Any:
        """Return the group of a call, or None if torch.distributed is not initialized."""
        if self.is_batch:
            operations = self.argument("p2p_op_list", args, kwargs)
            group = getattr(operations[0], "group", None) if operations else None
        else:
            group = self.argument("group", args, kwargs)
        return group if group is not None else groups.default()

    def peer(self, args: Any, kwargs: Any) -> int:
        """Return the global rank of the peer or the root; ``ring_layout.NO_PEER`` if none is named."""
        for name in self.peers:
            value = self.argument(name, args, kwargs)
            if isinstance(value, int):
                if name.startswith("group_"):
                    value = groups.c10d.get_global_rank(self.group(args, kwargs), value)
                return int(value)
        return ring_layout.NO_PEER

    def group_peer(self, args: Any, kwargs: Any) -> Optional[int]:
        """Return the peer's rank within the group, or None if none is named."""
        peer = self.peer(args, kwargs)
        return None if peer == ring_layout.NO_PEER else int(groups.c10d.get_group_rank(self.group(args, kwargs), peer))

    def begin(self, frame: Any, args: Any, kwargs: Any) -> Tuple[int, int, int, Any, int]:
        """Record a call. Return its index, when its wait began, its line, its group, and the group's count of calls.

        Index, wait and line are 0 if the call is not recorded. Nothing that may be interrupted follows the record, so
        that whoever has no index has nothing to end.
        """
        given = len(args)
        if self.is_batch:
            named = self.group(args, kwargs)
        else:
            named = args[self.group_at] if self.group_at < given else kwargs.get("group") if kwargs else None
        group, known, begun = groups.look_up(named)
        ring = here.ring
        if group is None or ring is None:
            return 0, 0, 0, known, begun
        is_main = _get_ident() == here.main_thread
        flags, redop, peer = self.main_flags if is_main else self.flags, "", _NO_PEER
        if kwargs or given > 1:
            if self.argument("async_op", args, kwargs):
                flags |= ring_layout.FLAG_ASYNC
            redop = "" if self.p2p else _redop_name(self.argument("op", args, kwargs))
            peer = self.peer(args, kwargs)
        about = args[self.tensor_at] if self.tensor_at < given else kwargs.get(self.tensor)
        try:
            dtype, shape, tensors = about.dtype, about.shape, 1
        except AttributeError as error:
            pass_on(error)
            dtype, shape, tensors = tensors_of(about)
        if known.aside is not None and self.is_aside(group, about, args, kwargs):
            known, begun = known.aside, groups.begun_by(known.aside)
        name = known.id if known.ring is ring else groups.name_id(ring, known)
        kind = records.kind_of(ring, frame, self.op, name, dtype, shape, tensors, redop, peer, flags)
        if clock.number == hand_made.WATCHED_AFTER and self.op in hand_made.REDUCTIONS:
            hand_made.reduction_begins(about, frame)
        waits = is_main and not clock.waiting
        now = _now_ns()
        if waits and _exc_info()[1] is not None:  # where the call ends the process, nothing else shows the error
            note_handled(_exc_info()[1], now)
        seq = begun + 1 if self.counted and begun >= 0 else _NO_SEQ
        index = ring.begin(kind.packed, seq, now, waits and not clock.phases)
        return index, now if waits else 0, kind.site, known, begun

    def is_aside(self, group: Any, about: Any, args: Any, kwargs: Any) -> bool:
        """Return whether Gloo handles a call in a group that has NCCL as well."""
        if self.op == MONITORED:
            return True
        if self.op == "barrier":
            bound = self.argument("device_ids", args, kwargs) or getattr(group, "bound_device_id", None)
            return not (self.binds_device and bound)
        if self.is_batch:
            about = getattr(self.argument("p2p_op_list", args, kwargs)[0], "tensor", None)
        return is_on_cpu(about)

    def end(self, call: Tuple[int, int, int, Any, int], result: Any) -> None:
        """Complete the record, or leave that to the work that the call returned.

        A point-to-point call moves the backend's sequence number, but it is no collective. The moves are counted, so
        they can be subtracted. torch may move the number twice, when it implements ``recv`` with ``irecv``.
        """
        index, waited_since, site, known, begun = call
        if self.moves and known is not None:
            known.moved += groups.begun_by(known) - begun
        ring = here.ring
        if not index or ring is None:
            end_wait(waited_since, counts=False)
            return
        now = _now_ns()
        if result is not None and hasattr(result, "is_completed") and not capture.is_capturing():
            end_wait(waited_since, self.counted, now)
            works.hand_out(result, index)
        else:
            ring.end(index, 0, now, waited_since > 0 and not clock.phases)
            if waited_since:
                clock.waiting = False
                if self.counted:
                    clock.waits[clock.phase] += now - waited_since
        if site and self.counted and waited_since:
            ended_collective(site, now)


def _redop_name(redop: Any) -> str:
    """Return ``SUM`` for ReduceOp.SUM, from a cache, because its own text is slow to make; "" for None."""
    known, name = _redops.get(id(redop), _NO_REDOP)
    if known is not redop:
        name = str(redop).rsplit(".", 1)[-1].rstrip(">").split(":")[0]
        if len(_redops) < MAX_REDOPS:
            _redops[id(redop)] = (redop, name)
    return name


def wrap(op: str, original: Callable[..., Any], tensor: Optional[str], p2p: bool) -> Callable[..., Any]:
    """Return ``original`` with a record around each call."""
    hook = _Hook(op, original, tensor, p2p)

    @wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        call: Tuple[int, int, int, Any, int] = _UNRECORDED
        try:
            call = hook.begin(sys._getframe(1), args, kwargs)
            if call[1]:
                clock.waiting = True
        except Exception as error:
            if not sealed[wall.gi_running][op, error]:
                raise
            # The call is made outside of this clause, so that its own error does not get ours as its context.
        try:
            instead = _other_way(hook, call[3], args, kwargs) if hook.rerouted else None
            result = original(*args, **kwargs) if instead is None else instead()
        except BaseException as error:
            if call[1]:
                clock.waiting = False  # first of all, because a second signal may end what follows
            sealed[wall.gi_running][end_wait, call[1], hook.counted]
            sealed[wall.gi_running][records.failed, call[0], op, error]
            raise
        try:
            hook.end(call, result)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, call[1], False]
            sealed[wall.gi_running][records.ended, call[0]]
            if not sealed[wall.gi_running][op, error]:
                raise
        return result

    return recorded


@guarded("detail")
def _other_way(hook: _Hook, known: Any, args: Any, kwargs: Any) -> Optional[Callable[[], Any]]:
    """Return what to call instead of a point-to-point call that DETAIL would break, or None if it would not."""
    if known is None or not detail.is_needed():
        return None
    tag = hook.argument("tag", args, kwargs) or 0
    return detail.reroute(
        hook.op, known.reference(), hook.argument("tensor", args, kwargs), hook.group_peer(args, kwargs), tag
    )


def groups_now() -> Any:
    """Describe the groups of this process for the evidence."""
    works.settle()
    return groups.groups_now()


def _only_renamed(function: Callable[..., Any]) -> bool:
    """Return whether a collective only calls the one with its new name, which is already recorded."""
    return not RENAMED.keys().isdisjoint(inspect.unwrap(function).__code__.co_names)


def patch(module: Any) -> None:
    """Put the records around the functions of torch.distributed.distributed_c10d."""
    groups.c10d = module
    for name, op in RENAMED.items():
        _patch(module, name, op, COLLECTIVES[op], p2p=False)
    for op, tensor in COLLECTIVES.items():
        if not hasattr(module, op) or not _only_renamed(getattr(module, op)):
            _patch(module, op, op, tensor, p2p=False)
    for op, tensor in POINT_TO_POINT.items():
        _patch(module, op, op, tensor, p2p=True)
    hooks.put(module.Work, "wait", works.wrap_wait)


def _patch(module: Any, name: str, op: str, tensor: Optional[str], p2p: bool) -> None:
    hooks.put(module, name, lambda original: wrap(op, original, tensor, p2p), is_api=True)
