"""Records collectives and point-to-point calls of torch.distributed, when they begin and when they end.

A script makes few different calls, and repeats them. What they have in common, their *kind* (the user's line, the
names, the shape, packed as the ring stores them), is computed once. After a wait for other ranks the processor's caches
are cold, and Python takes ten times as long as in a loop (40 us instead of 4 for all of this). So the amount of code
that each call runs is what counts.

The record of an asynchronous call ends when its Work object is waited for or found to have completed.

``all_gather_object`` and its like pickle objects, send the bytes, and unpickle what came. On a CPU pickling can take
longer than sending. Without the call it would not be there, so it is no computation of the step, and counts as a part
of the collective.
"""

from __future__ import annotations

import _thread
import functools
import inspect
import os
import sys
import time
import weakref
from types import FrameType
from typing import Any, Callable, Dict, Optional, Tuple

from . import detail, frames, groups, hooks, surroundings
from .errors import note_exception, note_handled
from .state import came_from_outside, guarded, here, pass_on, sealed, wall
from .step_clock import begin_wait, clock, end_wait, is_capturing
from .storage import ring_layout
from .wrappers import hide_own_frames, wraps

# By name of the call: the argument whose dtype and shape are recorded.
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
POINT_TO_POINT = {"send": "tensor", "recv": "tensor", "isend": "tensor", "irecv": "tensor", "batch_isend_irecv": None}
# New names of collectives (torch 2.13 and 2.15), recorded under the old one, which functional collectives keep.
RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "gather_single": "gather_into_tensor",
}
_PEER = ("dst", "src", "group_dst", "group_src")
# It is made of sends and receives. It is recorded under the next sequence number like a collective, but does not use it
# up.
MONITORED = "monitored_barrier"
_redops: Dict[int, Tuple[Any, str]] = {}
MAX_REDOPS = 64
_NO_REDOP = (None, "")
_NOWHERE = 99  # a position that no argument has
_UNRECORDED = (0, 0, 0, None, 0)  # what ``_Hook.begin`` returns for a call that is not recorded
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
    kind = kind_of(ring, sys._getframe(2), op, group, flags=flags)
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
        # Whether ``barrier`` uses the device that the group was made for (torch 2.7 and later).
        self.binds_device = "bound_device_id" in code.co_consts

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
        kind = kind_of(ring, frame, self.op, name, dtype, shape, tensors, redop, peer, flags)
        if clock.number == surroundings.WATCHED_AFTER and self.op in surroundings.REDUCTIONS:
            surroundings.hand_made_reduction(about, frame)
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
        if result is not None and hasattr(result, "is_completed") and not is_capturing():
            end_wait(waited_since, self.counted, now)
            hand_out(result, index)
        else:
            ring.end(index, 0, now, waited_since > 0 and not clock.phases)
            if waited_since:
                clock.waiting = False
                if self.counted:
                    clock.waits[clock.phase] += now - waited_since
        # It ends a step if nothing better marks steps.
        may_end = site and self.counted and waited_since and clock.level <= ring_layout.STEP_COLLECTIVE
        if may_end and clock.ends_step(ring_layout.STEP_COLLECTIVE, site):
            clock.take(now).write()


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
            sealed[wall.gi_running][failed, call[0], op, error]
            raise
        try:
            hook.end(call, result)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, call[1], False]
            sealed[wall.gi_running][ended, call[0]]
            if not sealed[wall.gi_running][op, error]:
                raise
        return result

    return recorded


@guarded("detail")
def _other_way(hook: _Hook, known: Any, args: Any, kwargs: Any) -> Optional[Callable[[], Any]]:
    """Return what to call instead of a point-to-point call that DETAIL would break, or None if it would not."""
    if known is None or not detail.helpers:
        return None
    peer: Optional[int] = hook.peer(args, kwargs)
    peer = None if peer == ring_layout.NO_PEER else int(groups.c10d.get_group_rank(hook.group(args, kwargs), peer))
    tag = hook.argument("tag", args, kwargs) or 0
    return detail.reroute(hook.op, known.reference(), hook.argument("tensor", args, kwargs), peer, tag)


def groups_now() -> Any:
    """Describe the groups of this process for the evidence."""
    settle()
    return groups.groups_now()


def patch(module: Any) -> None:
    """Put the records around the functions of torch.distributed.distributed_c10d."""
    groups.c10d = module
    tensors = {**COLLECTIVES, **POINT_TO_POINT}
    for name, op in {**RENAMED, **dict(zip(tensors, tensors))}.items():
        # A collective that only calls the one with its new name is already recorded.
        code = getattr(inspect.unwrap(getattr(module, op, lambda: None)), "__code__", None)
        if name in COLLECTIVES and RENAMED.keys() & {*getattr(code, "co_names", ())}:
            continue
        hooks.put(module, name, functools.partial(wrap, op, tensor=tensors[op], p2p=op in POINT_TO_POINT), is_api=True)
    hooks.put(module.Work, "wait", wrap_wait)
    for name in PICKLING:
        hooks.put(module, name, count_pickling)


# Works that are followed at a time. Our choice: code that never waits for them must not fill memory.
MAX_HANDED_OUT = 1024

_MAIN = ring_layout.FLAG_MAIN


_NOT_HANDED_OUT: Tuple[Any, int] = (lambda: None, 0)
# By id of the work, in the order of the calls: a weak reference to it, and the record of its call.
_handed_out: Dict[int, Tuple[Any, int]] = {}


def hand_out(work: Any, index: int) -> None:
    """Leave the end of a record to the Work that its call returned. If there are too many, the record ends at once.

    Then the older ones are followed, because the other calls wait for the oldest.
    """
    if _handed_out:
        settle()
        gone = _handed_out.pop(id(work), None)
        if gone is not None:
            ended(gone[1])
        elif len(_handed_out) >= MAX_HANDED_OUT:
            ended(index)
            return
    _handed_out[id(work)] = (weakref.ref(work), index)


def settle() -> None:
    """End the records of asynchronous calls that have completed, oldest first, up to the first that has not.

    Does nothing while a CUDA graph is being captured.
    """
    ring = here.ring
    if not _handed_out or ring is None or is_capturing():
        return
    while _handed_out:
        key = next(iter(_handed_out), 0)
        reference, index = _handed_out.get(key, _NOT_HANDED_OUT)  # the sampler's thread may have removed it
        work = reference()
        if work is not None and not _has_ended(work):
            return
        if _handed_out.pop(key, None) is not None:
            ring.end(index)


def _has_ended(work: Any) -> bool:
    """Return whether a work has completed, or raises when asked because it was aborted or its device failed."""
    try:
        return bool(work.is_completed())
    except Exception as error:  # noqa: BLE001 - the operation has failed, and the script gets its own error
        pass_on(error)
        return True


def wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Work.wait`` with a record of which call is waited for."""

    @wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = since = call = 0
        # A synchronous call waits for its own work, and that wait is already recorded.
        if _handed_out or not clock.waiting:
            try:
                index, since, call = _begin_work_wait(self, sys._getframe(1))
                if since:
                    clock.waiting = True
            except Exception as error:
                if not sealed[wall.gi_running]["wait", error]:
                    raise
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, since, index > 0]
            sealed[wall.gi_running][failed, index, "work_wait", error]
            raise
        if index or since:
            try:
                now = _now_ns()
                end_wait(since, index > 0, now)
                if index and here.ring is not None:
                    here.ring.end(index, ended_ns=now)
                    if not is_capturing() and _has_ended(self):  # after a time limit it may still be running
                        _handed_out.pop(id(self), None)
                        here.ring.end(call, ended_ns=now)
            except BaseException as error:
                sealed[wall.gi_running][end_wait, since, False]
                sealed[wall.gi_running][ended, index]
                if not sealed[wall.gi_running]["wait", error]:
                    raise
        return result

    return wait


def _begin_work_wait(work: Any, frame: Any) -> Tuple[int, int, int]:
    """Return the record of the wait, when the main thread began to wait, and the record of the call; 0 for none."""
    ring = here.ring
    reference, call = _handed_out.get(id(work), _NOT_HANDED_OUT)
    if ring is None or reference() is not work:
        return 0, begin_wait(), 0
    is_main = _get_ident() == here.main_thread
    waits = is_main and not clock.waiting
    kind = kind_of(ring, frame, "work_wait", flags=_MAIN if is_main else 0)
    now = _now_ns()
    index = ring.begin(kind.packed, call, now, waits and not clock.phases)
    return index, now if waits else 0, call


MAX_KINDS = 1024  # Kinds that are kept. Our choice: code whose calls have ever new shapes must not fill memory.


class CallTemplate:
    """What calls have in common."""

    __slots__ = ("packed", "reference", "site")

    def __init__(self, packed: bytes, site: int, reference: Any) -> None:
        self.packed = packed
        self.site = site  # the id of the user's line
        # A weak reference to the user's code. When the code is freed, the kind is dropped too.
        self.reference = reference


def kind_of(
    ring: Any, frame: FrameType, op: str, group: int = 0, dtype: Any = None, shape: Any = (), tensors: int = 0,
    redop: str = "", peer: int = ring_layout.NO_PEER, flags: int = 0,
) -> CallTemplate:  # fmt: skip
    """Return the kind of the call that ``frame`` makes. ``group`` is an interned name."""
    key = (id(frame.f_code), frame.f_lasti, "", op, group, dtype, shape, tensors, redop, peer, flags)
    try:
        kind: Optional[CallTemplate] = ring.kinds.get(key)
    except TypeError as error:  # a size that torch traces has no hash
        pass_on(error)
        return kind_of(ring, frame, op, group, str(dtype), tuple(map(int, shape)), tensors, redop, peer, flags)
    return kind if kind is not None else _kind_by_user(ring, frame, key)


def _kind_by_user(ring: Any, frame: FrameType, given: Any) -> CallTemplate:
    """Return the kind of a call that is new, or that a library makes on behalf of the user's line."""
    user, api = _user_frame(frame)
    code = None if user is None else user.f_code
    key = (id(code), 0 if user is None else user.f_lasti, api, *given[3:])
    kinds: Dict[Any, CallTemplate] = ring.kinds
    kind = kinds.get(key)
    if kind is None:
        if len(kinds) >= MAX_KINDS:
            kinds.clear()
        site, reference = 0, None
        if user is not None and code is not None:
            line = (code.co_filename, user.f_lineno, code.co_name)
            known = ring.known_site(line)
            site = ring.intern_site(line, frames.describe(line[0], line[1] or 0, line[2])) if known is None else known
            reference = weakref.ref(code, functools.partial(kinds.pop, key))  # C: see ``groups``
        _, _, _, op, group, dtype, shape, tensors, redop, peer, flags = key
        op_id = ring.intern(op)
        api_id = ring.intern(api) or op_id
        dtype_id = ring.intern(str(dtype)) if dtype is not None else 0
        redop_id = ring.intern(redop)
        packed = ring_layout.pack_kind(op_id, api_id, group, site, redop_id, dtype_id, peer, tensors, flags, shape)
        kind = kinds[key] = CallTemplate(packed, site, reference)
    return kind


def _user_frame(frame: Optional[FrameType]) -> Tuple[Optional[FrameType], str]:
    """Return the user's innermost frame, and the function or layer of torch.distributed that it called."""
    api = ""
    depth = 0
    while frame is not None and depth < frames.MAX_DEPTH:
        code = frame.f_code
        file = code.co_filename
        if frames.is_user_file(file):
            return frame, api
        layer = layer_of(file)
        if layer:
            api = code.co_name if layer == OWN_NAME else layer
        frame = frame.f_back
        depth += 1
    return None, ""


@guarded("call ends")
def ended(index: int) -> None:
    """Record that a call has returned."""
    if index and here.ring is not None:
        here.ring.end(index)


@guarded("call failed")
def failed(index: int, op: str, error: BaseException) -> None:
    """Record that a call has raised, and remove our frames from its traceback."""
    hide_own_frames(error)
    if index and here.ring is not None:
        here.ring.end(index, ring_layout.FLAG_FAILED)
        if not came_from_outside(error):
            note_exception(error, uncaught=False, call=op)


_TORCH_DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep
# By path below torch.distributed: what users call a layer. Its functions are hooks and wrappers that no user calls.
LAYERS = (
    ("fsdp/_fully_shard/", "fully_shard"), ("fsdp/", "FullyShardedDataParallel"),
    ("tensor/parallel/", "parallelize_module"), ("tensor/", "DTensor"), ("pipelining/", "schedule.step"),
    ("optim/zero_redundancy_optimizer.py", "ZeroRedundancyOptimizer"),
)  # fmt: skip
_NOT_TYPED = ("c10d_logger.py", "checkpoint/logger.py")  # files whose functions only wrap others
OWN_NAME = "*"  # stands for the function's own name, which is what the user typed


@functools.lru_cache(maxsize=4096)
def layer_of(file: str) -> str:
    """Return the layer that a source file belongs to, ``OWN_NAME``, or "" for a file outside torch.distributed."""
    _, found, inner = file.partition(_TORCH_DISTRIBUTED)
    inner = inner.replace(os.sep, "/")
    if not found or inner in _NOT_TYPED:
        return ""
    return next((name for start, name in LAYERS if inner.startswith(start)), OWN_NAME)


# Calls in which all ranks wait for the pickling, and unpickle alike. In ``gather_object`` one rank alone unpickles: the
# others go on, and wait for it later as for any slow rank.
SHARED_OBJECTS = frozenset({"all_gather_object", "broadcast_object_list", "scatter_object_list"})
PICKLING = ("_object_to_tensor", "_tensor_to_object")


def count_pickling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a helper of torch that pickles or unpickles, and that counts its time in the calls of ``SHARED``."""

    def add(began_ns: int) -> None:
        clock.waits[clock.phase] += _now_ns() - began_ns

    @wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if clock.waiting or _get_ident() != here.main_thread or _pickling_for(sys._getframe(1)) not in SHARED_OBJECTS:
            return original(*args, **kwargs)
        began = _now_ns()
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            raise
        finally:
            sealed[wall.gi_running][add, began]

    return counted


@guarded("objects")
def _pickling_for(frame: Any) -> str:
    """Return the function that calls a helper. Before Python 3.12 a list comprehension in it has a frame of its own."""
    is_inside = frame.f_code.co_name.startswith("<") and frame.f_back is not None
    return str((frame.f_back if is_inside else frame).f_code.co_name)
