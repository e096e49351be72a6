"""Caches what equal calls have in common: the user's line, the names, the shape, packed as the ring stores them.

A script makes few different calls, and repeats them. What they have in common, their *kind*, is computed once. After a
wait for other ranks the processor's caches are cold, and Python takes ten times as long as in a loop (40 us instead of
4 for all of this). So the amount of code that each call runs is what counts.
"""

from __future__ import annotations

import functools
import os
import weakref
from types import FrameType
from typing import Any, Dict, Optional, Tuple

from .. import frames
from ..stacks.errors import note_exception
from ..state import came_from_outside, guarded, here, pass_on
from ..storage import ring_layout
from ..wrappers import hide_own_frames

MAX_KINDS = 1024
"""Kinds that are kept. Our choice: code whose calls have ever new shapes must not fill memory."""


class CallTemplate:
    """What calls have in common."""

    __slots__ = ("packed", "reference", "site")

    def __init__(self, packed: bytes, site: int, reference: Any) -> None:
        self.packed = packed
        self.site = site
        """The id of the user's line."""
        self.reference = reference
        """A weak reference to the user's code. When the code is freed, the kind is dropped too."""


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
        site = 0 if user is None else _site(ring, user)
        reference = None if code is None else weakref.ref(code, functools.partial(kinds.pop, key))  # C: see ``groups``
        kind = kinds[key] = CallTemplate(_packed(ring, site, *key[2:]), site, reference)
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


def _site(ring: Any, frame: FrameType) -> int:
    code = frame.f_code
    key = (code.co_filename, frame.f_lineno, code.co_name)
    known = ring.known_site(key)
    if known is None:
        known = ring.intern_site(key, frames.describe(code.co_filename, frame.f_lineno or 0, code.co_name))
    return int(known)


def _packed(
    ring: Any, site: int, api: str, op: str, group: int, dtype: Any, shape: Any, tensors: int, redop: str, peer: int,
    flags: int,
) -> bytes:  # fmt: skip
    op_id = ring.intern(op)
    api_id = ring.intern(api) or op_id
    dtype_id = ring.intern(str(dtype)) if dtype is not None else 0
    return ring_layout.pack_kind(op_id, api_id, group, site, ring.intern(redop), dtype_id, peer, tensors, flags, shape)


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
LAYERS = (
    ("fsdp/_fully_shard/", "fully_shard"),
    ("fsdp/", "FullyShardedDataParallel"),
    ("tensor/parallel/", "parallelize_module"),
    ("tensor/", "DTensor"),
    ("pipelining/", "schedule.step"),
    ("optim/zero_redundancy_optimizer.py", "ZeroRedundancyOptimizer"),
)
"""By path below torch.distributed: what users call a layer. Its functions are hooks and wrappers that no user calls."""
_NOT_TYPED = ("c10d_logger.py", "checkpoint/logger.py")
"""Files whose functions only wrap others."""
OWN_NAME = "*"
"""Stands for the function's own name, which is what the user typed."""


@functools.lru_cache(maxsize=4096)
def layer_of(file: str) -> str:
    """Return the layer that a source file belongs to, ``OWN_NAME``, or "" for a file outside torch.distributed."""
    _, found, inner = file.partition(_TORCH_DISTRIBUTED)
    inner = inner.replace(os.sep, "/")
    if not found or inner in _NOT_TYPED:
        return ""
    return next((name for start, name in LAYERS if inner.startswith(start)), OWN_NAME)
