"""Records collectives and point-to-point calls of torch.distributed, when they begin and when they end.

What calls share, their *kind*, is computed once. After a wait for other ranks the processor's caches are cold, and
Python takes ten times as long as in a loop (40 us instead of 4 for all of this): so the amount of code matters.
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
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from . import detail, frames, groups, hooks, surroundings
from .errors import note_exception, note_handled
from .state import came_from_outside, guarded, here, pass_on, sealed, wall
from .step_clock import begin_wait, clock, end_wait, is_capturing
from .storage import ring_layout
from .wrappers import around, hide_own_frames, wraps

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
# It is made of sends and receives: recorded under the next sequence number like a collective, it does not use it up.
MONITORED = "monitored_barrier"
_redops: Dict[int, Tuple[Any, str]] = {}
MAX_REDOPS = 64
_NO_REDOP = (None, "")
_NOWHERE = 99  # a position that no argument has
# A call: its index, since when the main thread waits in it (both 0 if not recorded), line, group, the group's count.
Call = Tuple[int, int, int, Any, int]
UNRECORDED: Call = (0, 0, 0, None, 0)
_NO_PEER = ring_layout.NO_PEER
_NO_SEQ = ring_layout.NO_SEQ
_exc_info = sys.exc_info
_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def begin(op: str, group: int = 0, seq: int = ring_layout.NO_SEQ) -> int:
    """Record that a phase or a wait begins; return its index. Only a hook may call this: the call is two frames up."""
    ring = here.ring
    if ring is None:
        return 0
    flags = ring_layout.FLAG_MAIN if _get_ident() == here.main_thread else 0
    kind = kind_of(ring, sys._getframe(2), op, group, flags=flags)
    now = _now_ns()
    if flags and _exc_info()[1] is not None:
        note_handled(_exc_info()[1], now)
    return ring.begin(kind.packed, seq, now)


class Hook:
    """What is known of a function of torch.distributed, or of an operator with named groups, before it is called."""

    def __init__(self, op: str, names: Sequence[str], tensor: Optional[str], *, binds_device: bool = False) -> None:
        self.op = op
        self.at = {name: i for i, name in enumerate(names)}
        self.is_operator = "group_name" in self.at
        self.p2p = op in POINT_TO_POINT
        self.counted = not self.p2p
        self.flags = ring_layout.FLAG_P2P if self.p2p else 0
        if op in ("isend", "irecv") and not self.is_operator:
            self.flags |= ring_layout.FLAG_ASYNC
        self.main_flags = self.flags | ring_layout.FLAG_MAIN
        self.rerouted = op in detail.OPERATIONS and not self.is_operator
        self.moves = self.rerouted or op == MONITORED or (self.p2p and self.is_operator)
        self.peers = tuple(name for name in _PEER if name in self.at)
        self.tensor = tensor
        self.is_batch = "p2p_op_list" in self.at
        self.group, self.redop = ("group_name", "reduce_op") if self.is_operator else ("group", "op")
        self.group_at = self.at.get(self.group, _NOWHERE)
        self.tensor_at = self.at.get(tensor or "", _NOWHERE)
        self.binds_device = binds_device
        self.may_be_by_hand = op in surroundings.REDUCTIONS and not self.is_operator

    def argument(self, name: str, args: Any, kwargs: Any) -> Any:
        i = self.at.get(name, _NOWHERE)
        return args[i] if i < len(args) else kwargs.get(name)

    def peer(self, group: Any, args: Any, kwargs: Any) -> int:
        """Return the global rank of the peer or the root; ``ring_layout.NO_PEER`` if none is named."""
        for name in self.peers:
            value = self.argument(name, args, kwargs)
            if isinstance(value, int):
                if name.startswith("group_") or (self.is_operator and self.counted):
                    value = groups.c10d.get_global_rank(group, value)
                return int(value)
        return ring_layout.NO_PEER

    def begin(self, frame: Any, args: Any, kwargs: Any) -> Call:
        """Record a call. Nothing that may be interrupted follows the record: who has no index has nothing to end."""
        given = len(args)
        if self.is_batch:
            operations = self.argument("p2p_op_list", args, kwargs)
            named = getattr(operations[0], "group", None) if operations else None
        else:
            named = args[self.group_at] if self.group_at < given else kwargs.get(self.group) if kwargs else None
        group, known, begun = groups.look_up(named)
        ring = here.ring
        if group is None or ring is None:
            return 0, 0, 0, known, begun
        is_main = _get_ident() == here.main_thread
        flags, redop, peer = self.main_flags if is_main else self.flags, "", _NO_PEER
        if kwargs or given > 1:
            if self.argument("async_op", args, kwargs):
                flags |= ring_layout.FLAG_ASYNC
            redop = "" if self.p2p else _redop_name(self.argument(self.redop, args, kwargs))
            peer = self.peer(group, args, kwargs)
        about = args[self.tensor_at] if self.tensor_at < given else kwargs.get(self.tensor)
        try:
            dtype, shape, tensors = about.dtype, about.shape, 1
        except AttributeError as error:  # several, or none
            pass_on(error)
            first: Any = (about[0] if about else None) if isinstance(about, (list, tuple)) else about
            dtype = getattr(first, "dtype", None)
            shape = () if dtype is None else first.shape
            tensors = 0 if first is None else 1 if first is about else len(about)
        if known.aside is not None and self.is_aside(group, about, args, kwargs):
            known, begun = known.aside, groups.begun_by(known.aside)
        name = known.id if known.ring is ring else groups.name_id(ring, known)
        kind = kind_of(ring, frame, self.op, name, dtype, shape, tensors, redop, peer, flags)
        if clock.number == surroundings.WATCHED_AFTER and self.may_be_by_hand:
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
        about = about[0] if isinstance(about, (list, tuple)) and about else about
        return bool(getattr(getattr(about, "device", None), "type", "") == "cpu")

    def end(self, call: Call, result: Any) -> None:
        """Complete the record, or leave that to the work that the call returned."""
        # A point-to-point call moves the backend's sequence number, but it is no collective. The moves are counted, so
        # they can be subtracted. torch may move the number twice, when it implements ``recv`` with ``irecv``.
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
        name = str(redop).rsplit(".", 1)[-1].rstrip(">").split(":")[0].upper()
        if len(_redops) < MAX_REDOPS:
            _redops[id(redop)] = (redop, name)
    return name


def wrap(op: str, original: Callable[..., Any], tensor: Optional[str]) -> Callable[..., Any]:
    code = inspect.unwrap(original).__code__
    # Whether ``barrier`` uses the device that the group was made for (torch 2.7 and later).
    binds_device = "bound_device_id" in code.co_consts
    hook = Hook(op, code.co_varnames[: code.co_argcount], tensor, binds_device=binds_device)

    @guarded("detail")
    def other_way(call: Call, args: Any, kwargs: Any) -> Optional[Callable[[], Any]]:
        """Return what to call instead of a point-to-point call that DETAIL would break, or None if it would not."""
        if call[3] is None or not detail.helpers:
            return None
        group = call[3].reference()
        peer: Optional[int] = hook.peer(group, args, kwargs)
        peer = None if peer == ring_layout.NO_PEER else int(groups.c10d.get_group_rank(group, peer))
        tag = hook.argument("tag", args, kwargs) or 0
        return detail.reroute(op, group, hook.argument("tensor", args, kwargs), peer, tag)

    instead = other_way if hook.rerouted else None
    return recording(op, original, hook.begin, hook.end, counts=hook.counted, instead=instead)


def recording(
    op: str, original: Callable[..., Any], begin: Callable[..., Any], end: Callable[..., None], *, counts: bool = True,
    instead: Any = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return ``original`` with ``begin(frame, args, kwargs)`` before each call, and ``end(call, result)`` after it.

    ``begin`` returns the call, whose index and begin of waiting come first. ``counts`` says whether the wait of a call
    that fails counts, ``instead(call, args, kwargs)`` what is called in the place of ``original``, if anything.
    """

    @wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        call: Any = UNRECORDED
        try:
            call = begin(sys._getframe(1), args, kwargs)
            if call[1]:
                clock.waiting = True
        except Exception as error:
            if not sealed[wall.gi_running][op, error]:
                raise
            # The call is made outside of this clause, so that its own error does not get ours as its context.
        try:
            other = instead(call, args, kwargs) if instead is not None else None
            result = original(*args, **kwargs) if other is None else other()
        except BaseException as error:
            if call[1]:
                clock.waiting = False  # first of all, because a second signal may end what follows
            sealed[wall.gi_running][end_wait, call[1], counts and call[0] > 0]
            sealed[wall.gi_running][failed, call[0], op, error]
            raise
        if call is UNRECORDED:
            return result
        try:
            end(call, result)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, call[1], False]
            sealed[wall.gi_running][ended, call[0]]
            if not sealed[wall.gi_running][op, error]:
                raise
        return result

    return recorded


def groups_now() -> Any:
    settle()
    return groups.groups_now()


def patch(module: Any) -> None:
    groups.c10d = module
    tensors = {**COLLECTIVES, **POINT_TO_POINT}
    for name, op in {**RENAMED, **dict(zip(tensors, tensors))}.items():
        # A collective that only calls the one with its new name is already recorded.
        code = getattr(inspect.unwrap(getattr(module, op, lambda: None)), "__code__", None)
        if name in COLLECTIVES and RENAMED.keys() & {*getattr(code, "co_names", ())}:
            continue
        hooks.put(module, name, functools.partial(wrap, op, tensor=tensors[op]), is_api=True)
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
    """Leave a record's end to the call's Work. If there are too many, it ends right away: calls wait for the oldest."""
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
    """End the records of asynchronous calls that have completed, up to the first that has not. Not in a capture."""
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
    def begin(frame: Any, args: Any, unused: Any) -> Any:
        # A synchronous call waits for its own work, and that wait is already recorded.
        if clock.waiting and not _handed_out:
            return UNRECORDED
        ring, work = here.ring, args[0]
        reference, call = _handed_out.get(id(work), _NOT_HANDED_OUT)
        if ring is None or reference() is not work:
            return 0, begin_wait()
        is_main = _get_ident() == here.main_thread
        waits = is_main and not clock.waiting
        kind = kind_of(ring, frame, "work_wait", flags=_MAIN if is_main else 0)
        now = _now_ns()
        index = ring.begin(kind.packed, call, now, waits and not clock.phases)
        return index, now if waits else 0, call, work

    def end(waiting: Any, unused: Any) -> None:
        index, since = waiting[:2]
        if not (index or since):
            return
        now = _now_ns()
        end_wait(since, index > 0, now)
        if index and here.ring is not None:
            here.ring.end(index, ended_ns=now)
            call, work = waiting[2:]
            if not is_capturing() and _has_ended(work):  # after a time limit it may still be running
                _handed_out.pop(id(work), None)
                here.ring.end(call, ended_ns=now)

    return recording("work_wait", original, begin, end)


MAX_KINDS = 1024  # Kinds that are kept. Our choice: code whose calls have ever new shapes must not fill memory.


class CallTemplate:
    """What calls have in common."""

    __slots__ = ("packed", "reference", "site")

    def __init__(self, packed: bytes, site: int, reference: Any) -> None:
        self.packed = packed
        self.site = site  # the id of the user's line
        self.reference = reference  # a weak one to the user's code: when that is freed, the kind is dropped too


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
    user: Optional[FrameType] = frame
    api, depth = "", 0  # the function or layer of torch.distributed that the user's innermost frame called
    while user is not None and not frames.is_user_file(user.f_code.co_filename):
        layer = layer_of(user.f_code.co_filename)
        if layer:
            api = user.f_code.co_name if layer == OWN_NAME else layer
        depth += 1
        user = user.f_back if depth < frames.MAX_DEPTH else None
    api = api if user is not None else ""
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
        api_id, redop_id = ring.intern(api) or op_id, ring.intern(redop)
        dtype_id = ring.intern(str(dtype)) if dtype is not None else 0
        packed = ring_layout.pack_kind(op_id, api_id, group, site, redop_id, dtype_id, peer, tensors, flags, shape)
        kind = kinds[key] = CallTemplate(packed, site, reference)
    return kind


@guarded("call ends")
def ended(index: int) -> None:
    if index and here.ring is not None:
        here.ring.end(index)


@guarded("call failed")
def failed(index: int, op: str, error: BaseException) -> None:
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


# Calls in which all ranks wait for the pickling, and unpickle alike. It can take longer than sending, and without the
# call it would not be there: it counts as a part of the collective, and is no computation of the step. In
# ``gather_object`` one rank alone unpickles: the others go on, and wait for it later as for any slow rank.
SHARED_OBJECTS = frozenset({"all_gather_object", "broadcast_object_list", "scatter_object_list"})
PICKLING = ("_object_to_tensor", "_tensor_to_object")


def count_pickling(original: Callable[..., Any]) -> Any:
    """Return a helper of torch that pickles or unpickles, and that counts its time in calls of ``SHARED_OBJECTS``."""

    def begins(*unused: Any, **also_unused: Any) -> Optional[int]:
        if clock.waiting or _get_ident() != here.main_thread:
            return None
        caller: Any = sys._getframe(2)
        if caller.f_code.co_name.startswith("<") and caller.f_back is not None:
            caller = caller.f_back  # before Python 3.12 a list comprehension has a frame of its own
        return _now_ns() if caller.f_code.co_name in SHARED_OBJECTS else None

    def add(began_ns: int) -> None:
        clock.waits[clock.phase] += _now_ns() - began_ns

    return around(before=begins, last=add)(original)
