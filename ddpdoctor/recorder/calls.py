"""Records collectives and point-to-point calls of torch.distributed, before they are made and when they end."""

from __future__ import annotations

import _thread
import collections
import inspect
import sys
import time
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

from . import detail, frames, groups, wire
from .errors import hide_own_frames, note_exception
from .layers import OWN_NAME, layer_of
from .state import guarded, here
from .stepclock import clock, ended_collective
from .wrappers import standing_for

COLLECTIVES = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "gather": "tensor",
    "gather_single": "input",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": None,
    "monitored_barrier": None,
}  # type: Dict[str, Optional[str]]
"""Name of the call, and of the argument whose dtype and shape are recorded."""
POINT_TO_POINT = {"send": "tensor", "recv": "tensor", "isend": "tensor", "irecv": "tensor", "batch_isend_irecv": None}
RENAMED = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""New names of collectives (torch 2.13) that are recorded under the old one: functional collectives keep that."""
_PEER = ("dst", "src", "group_dst", "group_src")
MONITORED = "monitored_barrier"
"""Made of sends and receives: it stands under the next number, as a collective would, and does not use it up."""

_pending: collections.deque[Tuple[Any, int]] = collections.deque(maxlen=256)
_works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_redops: Dict[int, Tuple[Any, str]] = {}
MAX_REDOPS = 64
_NOWHERE = 99
"""A position that no argument has."""
_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def call_site(ring: Any, frame: Any) -> Tuple[int, str]:
    """Return the id of the user's innermost line, and the function or layer of torch.distributed that it called.

    ``frame`` is the one that called a hook: those of the hooks cost time to be made.
    """
    api = ""
    depth = 0
    while frame is not None and depth < frames.MAX_DEPTH:
        code = frame.f_code
        file = code.co_filename
        if frames.is_user_file(file):
            # No code object: one that a script has made at run time would live for as long as the ring.
            key = (file, frame.f_lineno, code.co_name)
            site = ring.known_site(key)
            if site is None:
                place = frames.describe(file, frame.f_lineno or 0, code.co_name)
                site = ring.intern_site(key, place)
            return site, api
        layer = layer_of(file)
        if layer:
            api = code.co_name if layer == OWN_NAME else layer
        frame = frame.f_back
        depth += 1
    return 0, ""


def begin(op: str, group: int = 0, seq: int = wire.NO_SEQ) -> int:
    """Record that a phase of training or a wait begins; return the record's index. Only a hook itself calls this."""
    ring = here.ring
    if ring is None:
        return 0
    site, api = call_site(ring, sys._getframe(2))
    op_id = ring.intern(op)
    flags = wire.FLAG_MAIN if _get_ident() == here.main_thread else 0
    api_id = (ring.intern(api) if api else 0) or op_id
    return int(ring.begin(op_id, api_id, group, site, seq, 0, 0, wire.NO_PEER, 0, flags, ()))


def about_tensors(ring: Any, about: Any) -> Tuple[int, Any, int]:
    """Return dtype (interned), shape and number of what a call was given: a tensor, or a list of them."""
    tensors = 1
    if isinstance(about, (list, tuple)):
        tensors = len(about)
        about = about[0] if about else None
    dtype = getattr(about, "dtype", None)
    if dtype is None:
        return 0, (), 0 if about is None else tensors
    return ring.intern(str(dtype)), about.shape, tensors


class Waiting:
    """Tells the watcher since when the main thread has been inside a call that needs other ranks."""

    def __init__(self) -> None:
        self.depth = 0
        """How many phases with such calls in them the main thread is in."""

    @guarded("wait begins")
    def __enter__(self) -> None:
        if _get_ident() == here.main_thread:
            self.depth += 1
            if self.depth == 1 and not clock.waiting and here.ring is not None:
                here.ring.waits(_now_ns())

    @guarded("wait ends")
    def __exit__(self, *unused: object) -> None:
        if _get_ident() == here.main_thread:
            self.depth -= 1
            if self.depth == 0 and not clock.waiting and here.ring is not None:
                here.ring.waits(0)


waiting = Waiting()


def begin_wait() -> int:
    """Tell the watcher and the step's clock that the main thread waits; return since when.

    That is 0 in another thread, and where the main thread waits already.
    """
    try:
        if clock.waiting or _get_ident() != here.main_thread:
            return 0
        began = _now_ns()
        if waiting.depth == 0 and here.ring is not None:
            here.ring.waits(began)
        clock.waiting = True
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait begins", error)
        return 0
    return began


def end_wait(began_ns: int, counts: bool) -> None:
    """End a wait that ``begin_wait`` began. One for a single peer does not count: it is no meeting of all."""
    if not began_ns:
        return
    clock.waiting = False
    try:
        if counts:
            clock.waits[clock.phase] += _now_ns() - began_ns
        if waiting.depth == 0 and here.ring is not None:
            here.ring.waits(0)
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait ends", error)


@guarded("call ends")
def ended(index: int) -> None:
    """Record that a call has returned."""
    if index and here.ring is not None:
        here.ring.end(index)


@guarded("call failed")
def failed(index: int, op: str, error: BaseException) -> None:
    """Record that a call has raised, and let its error read as if nothing of ours stood in between."""
    hide_own_frames(error)
    if index and here.ring is not None:
        here.ring.end(index, wire.FLAG_FAILED)
        note_exception(error, uncaught=False, call=op)


class _Hook:
    """What is known of one function of torch.distributed before it is called."""

    def __init__(self, op: str, original: Callable[..., Any], tensor: Optional[str], p2p: bool) -> None:
        self.op = op
        self.p2p = p2p
        self.counted = not p2p
        self.flags = (wire.FLAG_P2P if p2p else 0) | (wire.FLAG_ASYNC if op in ("isend", "irecv") else 0)
        self.rerouted = p2p and op in detail.OPERATIONS
        self.moves = self.rerouted or op == MONITORED
        code = inspect.unwrap(original).__code__
        self.at = {name: i for i, name in enumerate(code.co_varnames[: code.co_argcount])}
        self.peers = tuple(name for name in _PEER if name in self.at)
        self.tensor = tensor
        self.is_batch = op == "batch_isend_irecv"
        self.group_at = self.at.get("group", _NOWHERE)
        self.async_at = self.at.get("async_op", _NOWHERE)
        self.op_at = _NOWHERE if p2p else self.at.get("op", _NOWHERE)
        self.tensor_at = self.at.get(tensor or "", _NOWHERE)

    def argument(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return an argument by its name, None where it was not given."""
        i = self.at.get(name, _NOWHERE)
        return args[i] if i < len(args) else kwargs.get(name)

    def group(self, args: Any, kwargs: Any) -> Any:
        """Return the group of a call, None where torch.distributed is not initialized."""
        if self.is_batch:
            operations = self.argument("p2p_op_list", args, kwargs)
            group = getattr(operations[0], "group", None) if operations else None
        else:
            group = self.argument("group", args, kwargs)
        return group if group is not None else groups.default()

    def peer(self, args: Any, kwargs: Any) -> int:
        """Return the other rank, or the root, by its global number; ``wire.NO_PEER`` where none is named."""
        for name in self.peers:
            value = self.argument(name, args, kwargs)
            if isinstance(value, int):
                if name.startswith("group_"):
                    value = groups.c10d.get_global_rank(self.group(args, kwargs), value)
                return int(value)
        return wire.NO_PEER

    def group_peer(self, args: Any, kwargs: Any) -> Optional[int]:
        """Return the other rank within the group, or None where none is named."""
        peer = self.peer(args, kwargs)
        return None if peer == wire.NO_PEER else int(groups.c10d.get_group_rank(self.group(args, kwargs), peer))

    def begin(self, frame: Any, args: Any, kwargs: Any) -> Tuple[int, Any, int, int]:
        """Return the record's index, the group, how many collectives it has begun, and the number of the line."""
        given = len(args)
        group = args[self.group_at] if self.group_at < given else kwargs.get("group")
        if group is None:
            group = self.group(args, kwargs)
        if group is None or isinstance(group, int):  # a number stands for a group that this rank is no member of
            return 0, None, 0, 0
        known = groups.known(group)
        begun = groups.sequence_number(group)
        counts = self.counted and begun >= 0
        begun -= known.moved
        ring = here.ring
        if ring is None:
            return 0, group, begun, 0
        site, api = call_site(ring, frame)
        seq = begun + 1 if counts else wire.NO_SEQ
        flags = self.flags
        if _get_ident() == here.main_thread:
            flags |= wire.FLAG_MAIN
        if args[self.async_at] if self.async_at < given else kwargs.get("async_op"):
            flags |= wire.FLAG_ASYNC
        redop = args[self.op_at] if self.op_at < given else None if self.p2p else kwargs.get("op")
        redop_id = ring.intern(_redop_name(redop)) if redop is not None else 0
        about = args[self.tensor_at] if self.tensor_at < given else kwargs.get(self.tensor)
        dtype, dims, tensors = (0, (), 0) if about is None else about_tensors(ring, about)
        peer = self.peer(args, kwargs) if self.peers else wire.NO_PEER
        op = ring.intern(self.op)
        api_id = (ring.intern(api) if api else 0) or op
        name = known.id if known.ring is ring else groups.group_id(ring, group)
        index = ring.begin(op, api_id, name, site, seq, redop_id, dtype, peer, tensors, flags, dims)
        return index, group, begun, site

    def end(self, index: int, group: Any, begun: int, result: Any) -> None:
        """Complete the record, or leave it to the work that was handed out.

        A point-to-point call begins no collective, though it moves the backend's number; nor do two, where torch makes
        ``recv`` of ``irecv``.
        """
        if self.moves and group is not None:
            groups.known(group).moved = groups.sequence_number(group) - begun
        if result is not None and hasattr(result, "is_completed"):
            _works[result] = index
            _pending.append((weakref.ref(result), index))
            settle()
        elif index and here.ring is not None:
            here.ring.end(index)


def _redop_name(redop: Any) -> str:
    """Return ``SUM`` for ReduceOp.SUM, whose own text takes longer than the rest of the record's arguments."""
    known, name = _redops.get(id(redop), (None, ""))
    if known is not redop:
        name = str(redop).rsplit(".", 1)[-1].rstrip(">").split(":")[0]
        if len(_redops) < MAX_REDOPS:
            _redops[id(redop)] = (redop, name)
    return name


def settle() -> None:
    """End the records of asynchronous calls that have completed, oldest first, up to the first that has not."""
    ring = here.ring
    while _pending and ring is not None:
        reference, index = _pending[0]
        work = reference()
        if work is not None and not work.is_completed():
            return
        _pending.popleft()
        ring.end(index)


def wrap(op: str, original: Callable[..., Any], tensor: Optional[str], p2p: bool) -> Callable[..., Any]:
    """Return ``original`` with a record around each call."""
    hook = _Hook(op, original, tensor, p2p)

    @standing_for(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        try:
            index, group, begun, site = hook.begin(sys._getframe(1), args, kwargs)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed(op, error)
            # The call is made outside of this clause: an error of its own must not name ours as its context.
            index, group, begun, site = 0, None, 0, 0
        began = begin_wait()
        try:
            if hook.rerouted and group is not None:
                result = _run(hook, group, original, args, kwargs)
            else:
                result = original(*args, **kwargs)
        except BaseException as error:
            failed(index, op, error)
            raise
        finally:
            end_wait(began, not p2p)
        try:
            hook.end(index, group, begun, result)
            if site and not p2p:
                ended_collective(site)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed(op, error)
        return result

    return recorded


@guarded("detail")
def _other_way(hook: _Hook, group: Any, args: Any, kwargs: Any) -> Optional[Callable[[], Any]]:
    """Return what to call instead of a point-to-point call that DETAIL would stumble over, None where it would not."""
    if not detail.is_needed():
        return None
    tag = hook.argument("tag", args, kwargs) or 0
    return detail.reroute(hook.op, group, hook.argument("tensor", args, kwargs), hook.group_peer(args, kwargs), tag)


def _run(hook: _Hook, group: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a point-to-point call where DETAIL does not stumble over it."""
    instead = _other_way(hook, group, args, kwargs)
    return original(*args, **kwargs) if instead is None else instead()


def wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Work.wait`` with a record of which call is waited for."""

    @standing_for(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = call = 0
        if _works:
            try:
                call = _works.get(self, 0)
                index = begin("work_wait", seq=call) if call else 0
            except Exception as error:  # noqa: BLE001 - the recorder's wall
                here.failed("wait", error)
        began = begin_wait()
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            failed(index, "work_wait", error)
            raise
        finally:
            end_wait(began, index != 0)
        if call:
            ended(index)
            _end_waited(self, call)
        return result

    return wait


@guarded("wait")
def _end_waited(work: Any, call: int) -> None:
    """End the record of the call whose work was waited for. A wait with a time limit may come back too early."""
    _works.pop(work, 0)
    if work.is_completed():
        ended(call)


def groups_now() -> Any:
    """Describe the groups of this process for the evidence."""
    settle()
    return groups.groups_now()


def _only_renamed(function: Callable[..., Any]) -> bool:
    """Return whether a collective only calls the one that has its new name, which is recorded already."""
    return not RENAMED.keys().isdisjoint(inspect.unwrap(function).__code__.co_names)


def patch(module: Any) -> None:
    """Put the records around the functions of torch.distributed.distributed_c10d."""
    groups.c10d = module
    for name, op in RENAMED.items():
        if hasattr(module, name):
            setattr(module, name, wrap(op, getattr(module, name), COLLECTIVES[op], p2p=False))
    for op, tensor in COLLECTIVES.items():
        if hasattr(module, op) and not _only_renamed(getattr(module, op)):
            setattr(module, op, wrap(op, getattr(module, op), tensor, p2p=False))
    for op, tensor in POINT_TO_POINT.items():
        if hasattr(module, op):
            setattr(module, op, wrap(op, getattr(module, op), tensor, p2p=True))
    module.Work.wait = wrap_wait(module.Work.wait)
