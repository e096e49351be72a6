"""Records collectives and point-to-point calls of torch.distributed, before they are made and when they end."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import sys
import threading
import time
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

from . import detail, frames, wire
from .errors import hide_own_frames, note_exception
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
_PEER = ("dst", "src", "group_dst", "group_src")
_UNCOUNTED = frozenset({"monitored_barrier", "batch_isend_irecv"})
_TORCH_DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep

c10d: Any = None
_shift: Dict[str, int] = collections.defaultdict(int)
"""Per group, how much point-to-point calls have moved the backend's sequence number."""
_pending: collections.deque[Tuple[Any, int]] = collections.deque(maxlen=256)
_works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_depth = threading.local()
_group_names: Dict[int, Tuple[Any, int]] = {}


def call_site() -> Tuple[int, int]:
    """Return the ids of the user's innermost line and of the function of torch that it called."""
    ring = here.ring
    frame = sys._getframe(2)
    api = ""
    depth = 0
    while frame is not None and depth < frames.MAX_DEPTH:
        code = frame.f_code
        if frames.is_user_file(code.co_filename):
            # No code object: one that a script has made at run time would live for as long as the ring.
            key = (code.co_filename, frame.f_lineno, code.co_name)
            site = ring.known_site(key)  # type: ignore[union-attr]
            if site is None:
                place = frames.describe(code.co_filename, frame.f_lineno or 0, code.co_name)
                site = ring.intern_site(key, place)  # type: ignore[union-attr]
            return site, ring.intern(api)  # type: ignore[union-attr]
        if _TORCH_DISTRIBUTED in code.co_filename and not code.co_filename.endswith("c10d_logger.py"):
            api = code.co_name
        frame = frame.f_back  # type: ignore[assignment]
        depth += 1
    return 0, 0


def begin(op: str, group: int = 0, seq: int = wire.NO_SEQ, redop: int = 0, about: Any = None, peer: int = wire.NO_PEER,
          flags: int = 0) -> int:  # fmt: skip
    """Record that a call begins; ``about`` is the tensor, or the list of tensors, that it is given."""
    ring = here.ring
    if ring is None:
        return 0
    site, api = call_site()
    op_id = ring.intern(op)
    dtype, dims, tensors = _about(ring, about)
    if threading.get_ident() == here.main_thread:
        flags |= wire.FLAG_MAIN
    return ring.begin(op_id, api or op_id, group, site, seq, redop, dtype, peer, tensors, flags, dims)


def _about(ring: Any, about: Any) -> Tuple[int, Any, int]:
    tensors = 1
    if isinstance(about, (list, tuple)):
        tensors = len(about)
        about = about[0] if about else None
    if about is None or not hasattr(about, "dtype"):
        return 0, (), 0 if about is None else tensors
    return ring.intern(str(about.dtype)), about.shape, tensors


class Waiting:
    """Tells the watcher since when the main thread has been inside a call that needs other ranks."""

    @guarded("wait begins")
    def __enter__(self) -> None:
        depth = _depth.n = getattr(_depth, "n", 0) + 1
        if depth == 1 and here.ring is not None and threading.get_ident() == here.main_thread:
            here.ring.set("wait_since_ns", time.monotonic_ns())

    @guarded("wait ends")
    def __exit__(self, *unused: object) -> None:
        _depth.n -= 1
        if _depth.n == 0 and here.ring is not None and threading.get_ident() == here.main_thread:
            here.ring.set("wait_since_ns", 0)


waiting = Waiting()


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
        names = inspect.unwrap(original).__code__.co_varnames[: inspect.unwrap(original).__code__.co_argcount]
        self.at = {name: i for i, name in enumerate(names)}
        self.tensor = tensor

    def argument(self, name: Optional[str], args: Any, kwargs: Any) -> Any:
        if name is None:
            return None
        if name in kwargs:
            return kwargs[name]
        i = self.at.get(name, 99)
        return args[i] if i < len(args) else None

    def group(self, args: Any, kwargs: Any) -> Any:
        if self.op == "batch_isend_irecv":
            operations = self.argument("p2p_op_list", args, kwargs)
            group = getattr(operations[0], "group", None) if operations else None
        else:
            group = self.argument("group", args, kwargs)
        return group if group is not None else c10d._get_default_group()

    def peer(self, args: Any, kwargs: Any) -> int:
        for name in _PEER:
            value = self.argument(name, args, kwargs)
            if isinstance(value, int):
                if name.startswith("group_"):
                    value = c10d.get_global_rank(self.group(args, kwargs), value)
                return int(value)
        return wire.NO_PEER

    def group_peer(self, args: Any, kwargs: Any) -> Optional[int]:
        """Return the other rank within the group, or None where none is named."""
        peer = self.peer(args, kwargs)
        return None if peer == wire.NO_PEER else int(c10d.get_group_rank(self.group(args, kwargs), peer))

    def begin(self, args: Any, kwargs: Any) -> Tuple[int, Any, int]:
        """Return the record's index, the group and its sequence number before the call."""
        ring = here.ring
        if c10d is None or not c10d.is_initialized():
            return 0, None, 0
        group = self.group(args, kwargs)
        if isinstance(group, int):  # stands for a group that this rank is no member of
            return 0, None, 0
        before = sequence_number(group)
        if ring is None:
            return 0, group, before
        name = group_id(ring, group)
        counted = not self.p2p and self.op not in _UNCOUNTED and before >= 0
        seq = before - _shift[group.group_name] + 1 if counted else wire.NO_SEQ
        redop = self.argument("op", args, kwargs)
        flags = wire.FLAG_P2P if self.p2p else 0
        if self.argument("async_op", args, kwargs) or self.op in ("isend", "irecv"):
            flags |= wire.FLAG_ASYNC
        redop_id = ring.intern(_redop_name(redop)) if redop is not None and not self.p2p else 0
        tensor = self.argument(self.tensor, args, kwargs)
        index = begin(self.op, name, seq, redop_id, tensor, self.peer(args, kwargs), flags)
        return index, group, before

    def end(self, index: int, group: Any, before: int, result: Any) -> None:
        """Complete the record, or leave it to the work that was handed out."""
        if group is not None and self.p2p and self.op != "batch_isend_irecv":
            _shift[group.group_name] += max(0, sequence_number(group) - before)
        if result is not None and hasattr(result, "is_completed"):
            _works[result] = index
            _pending.append((weakref.ref(result), index))
            settle()
        elif index and here.ring is not None:
            here.ring.end(index)


def _redop_name(redop: Any) -> str:
    return str(redop).rsplit(".", 1)[-1].rstrip(">").split(":")[0]


def sequence_number(group: Any) -> int:
    """Return how many operations the group's backend has begun, those of C++ included; -1 where it does not say."""
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001 - not every backend counts
        return -1


def group_id(ring: Any, group: Any) -> int:
    """Return the interned name of a group."""
    known = _group_names.get(id(group))
    if known is None or known[0]() is not group:
        gone = functools.partial(_forget_group, id(group), str(group.group_name))
        known = (weakref.ref(group, gone), ring.intern(str(group.group_name)))
        _group_names[id(group)] = known
    return known[1]


def _forget_group(key: int, name: str, reference: Any) -> None:
    """Drop what is kept of a group that is no more; a script may make thousands, and use a name again."""
    if _group_names.get(key, (None,))[0] is reference:
        del _group_names[key]
        _shift.pop(name, None)


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
            index, group, before = hook.begin(args, kwargs)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed(op, error)
            return original(*args, **kwargs)
        began = clock.begin_wait()
        try:
            with waiting:
                result = _run(hook, group, original, args, kwargs)
        except BaseException as error:
            failed(index, op, error)
            raise
        finally:
            clock.end_wait(began, counts=not p2p)
        try:
            hook.end(index, group, before, result)
            if not p2p:
                ended_collective(here.ring, index)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed(op, error)
        return result

    return recorded


def _run(hook: _Hook, group: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the call; a point-to-point call goes where DETAIL does not stumble over it."""
    instead = None
    if hook.p2p and group is not None and hook.op in detail.OPERATIONS:
        tag = hook.argument("tag", args, kwargs) or 0
        instead = detail.reroute(
            hook.op, group, hook.argument("tensor", args, kwargs), hook.group_peer(args, kwargs), tag
        )
    return original(*args, **kwargs) if instead is None else instead()


def wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Work.wait`` with a record of which call is waited for."""

    @standing_for(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = 0
        try:
            if self in _works:
                index = begin("work_wait", seq=_works[self])
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed("wait", error)
        began = clock.begin_wait()
        try:
            with waiting:
                result = original(self, *args, **kwargs)
        except BaseException as error:
            failed(index, "work_wait", error)
            raise
        finally:
            clock.end_wait(began, counts=index != 0)
        ended(index)
        try:
            call = _works.pop(self, 0)
            if call and self.is_completed():
                ended(call)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed("wait", error)
        return result

    return wait


def groups_now() -> Any:
    """Describe the groups of this process for the evidence."""
    if c10d is None or not c10d.is_initialized():
        return []
    settle()
    world = c10d._world
    found = []
    for group, ranks in list(world.pg_group_ranks.items()):
        if isinstance(group, int):  # stands for a group that this rank is no member of
            continue
        name = str(group.group_name)
        found.append(
            {
                "name": name,
                "ranks": sorted(int(r) for r in ranks),
                "backend": str(world.pg_map[group][0]) if group in world.pg_map else "",
                "enqueued": sequence_number(group) - _shift[name],
            }
        )
    return found


def begun_in(group: Any) -> Tuple[int, int]:
    """Return a group's interned name, and how many collectives it has begun; the number is -1 where it is not known.

    Without a group the number is that of the default group, and the name is empty.
    """
    ring = here.ring
    if ring is None or c10d is None or not c10d.is_initialized():
        return 0, wire.NO_SEQ
    known = group if group is not None else c10d._get_default_group()
    begun = sequence_number(known) - _shift[known.group_name]
    return (group_id(ring, group) if group is not None else 0), begun


def patch(module: Any) -> None:
    """Put the records around the functions of torch.distributed.distributed_c10d."""
    global c10d
    c10d = module
    for op, tensor in COLLECTIVES.items():
        if hasattr(module, op):
            setattr(module, op, wrap(op, getattr(module, op), tensor, p2p=False))
    for op, tensor in POINT_TO_POINT.items():
        if hasattr(module, op):
            setattr(module, op, wrap(op, getattr(module, op), tensor, p2p=True))
    module.Work.wait = wrap_wait(module.Work.wait)
