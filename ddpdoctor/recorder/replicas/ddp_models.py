"""The DDP models of this process that have copies on other ranks, and how often each was run and reduced.

A forward with gradients arms DDP's reducer. Only the next backward that reaches the model is reduced, until another
such forward. So reductions are counted as the reducer makes them: one for several forwards, one for a graph that is
kept for a second backward, and none for a forward under ``no_sync``, wherever its backward runs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from ..calls import groups
from ..state import check_every, guarded, here, shielded
from ..training import reducer
from . import unwrapped

MARKS = 4
"""Parameters whose gradients show whether a backward reached their model, if several models are possible. Our choice:
nearly any backward uses the first, the last, or one of two between them."""

on_gone: List[Callable[[Replica], None]] = []
"""Called with a model that ends, while its module still exists."""


class Replica:
    """What is kept about one DDP model."""

    def __init__(self, ddp: Any, ranks: Tuple[int, ...], number: int) -> None:
        self.ddp = weakref.ref(ddp, shielded("replica ends", functools.partial(_gone, _kept, id(ddp))))
        self._module = weakref.ref(ddp.module)
        self.group = str(ddp.process_group.group_name)
        self.ranks = ranks
        self.rank = int(groups.c10d.get_rank())
        self.number = number
        """The model's number within its group, counted from 1."""
        self.ignored: FrozenSet[str] = frozenset(getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ()))
        named = ddp.module.named_parameters()
        self.reduced = frozenset(id(p) for name, p in named if p.requires_grad and name not in self.ignored)
        """Ids of the parameters that DDP reduces. DDP keeps them alive, so no other tensor gets their ids."""
        self.on_gpu = getattr(ddp, "device_type", "cpu") != "cpu"
        self.forwards = 0
        """Forwards with gradients, counted over the model's lifetime."""
        self.unreduced_forwards = 0
        self.before_step = (0, 0)
        """All forwards and unreduced ones, up to the last step of any optimizer that holds parameters of the model."""
        self.reductions = 0
        self.unfinished: Any = None
        """What the reducer still waits for after the last backward; None if everything was reduced."""
        self.optimizers = 0
        """How many optimizers have stepped with its parameters."""
        self.syncs_buffers = bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))
        """Whether DDP broadcasts rank 0's buffers before forwards."""
        self.join = False
        self.hook = ""
        """The communication hook as last seen. The script may register one at any time."""
        self.fingerprints: Any = None
        """The model's ``ModelFingerprints``, kept here by ``triggers``."""
        self.last_stepped: Any = None
        """The ``StepFingerprints`` of the optimizer that stepped last."""
        self.ended = False

    def module(self) -> Any:
        """Return the wrapped module, which the script may replace, or None if it is gone.

        When a DDP model ends, its module still exists.
        """
        ddp = self.ddp()
        return self._module() if ddp is None else ddp.module


class _Kept:
    """The replicas of this process. They belong to one ring, so a forked child does not use its parent's."""

    def __init__(self) -> None:
        self.ring: Any = None
        self.by_id: Dict[int, Replica] = {}
        self.numbers: Dict[str, int] = {}
        self.armed: Dict[int, Replica] = {}
        self.marks: List[Tuple[int, Any]] = []
        self.unfinished: Dict[int, Replica] = {}
        self.version = 0
        """Changes with the set of models."""


_kept = _Kept()


def is_recorded() -> bool:
    """Return whether there are models to check, and this process made them."""
    return bool(_kept.by_id) and _kept.ring is here.ring


def version() -> int:
    """Return a number that changes whenever a model is made or ends."""
    return _kept.version


def all_replicas() -> List[Replica]:
    """Return the existing models in the order in which they were made."""
    return list(_kept.by_id.values()) if _kept.ring is here.ring else []


def find(ddp: Any) -> Optional[Replica]:
    """Return the replica of a DDP model, or None if it is not recorded."""
    return _kept.by_id.get(id(ddp)) if _kept.ring is here.ring else None


def register(ddp: Any) -> None:
    """Record a DDP model that has just been made, unless no other rank has a copy."""
    global _kept
    if here.ring is None or not here.is_rank or not check_every():
        return
    ranks = tuple(int(rank) for rank in groups.c10d.get_process_group_ranks(ddp.process_group))
    if len(ranks) < 2:
        return
    if _kept.ring is not here.ring:
        _kept = _Kept()
        _kept.ring = here.ring
    group = str(ddp.process_group.group_name)
    number = _kept.numbers[group] = _kept.numbers.get(group, 0) + 1
    _kept.by_id[id(ddp)] = Replica(ddp, ranks, number)
    _kept.version += 1


def _gone(kept: _Kept, key: int, reference: Any, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Check a model that ends one last time, and forget it. Do nothing at interpreter exit, when torch is half gone."""
    replica = kept.by_id.get(key)
    if is_ending() or replica is None or replica.ddp is not reference:
        return
    try:
        if kept.ring is here.ring:
            for action in on_gone:
                action(replica)
    finally:
        del kept.by_id[key]
        kept.armed.pop(key, None)
        kept.unfinished.pop(key, None)
        kept.version += 1


@guarded("replica forward")
def forward_ended(ddp: Any) -> None:
    """Count a forward of DDP that has ended."""
    import torch

    replica = find(ddp)
    if replica is None or not torch.is_grad_enabled():
        return
    replica.forwards += 1
    if ddp.require_backward_grad_sync:
        _kept.armed[id(ddp)] = replica
    else:
        replica.unreduced_forwards += 1


def backward_begins(*unused: Any, **also_unused: Any) -> None:
    """Prepare to find out which of several models a backward reaches."""
    others = unwrapped.all_models()
    if (len(_kept.armed) > 1 or others) and not in_backward():
        unwrapped.backward_begins()
        _kept.marks = [(key, _mark(replica)) for key, replica in _kept.armed.items()]


def backward_ended(*unused: Any, **also_unused: Any) -> None:
    """Count a reduction of each armed model that the backward has reached.

    A nested backward, as in checkpointing, reduces nothing by itself.
    """
    others = unwrapped.all_models()
    if not (_kept.armed or _kept.unfinished or others) or in_backward():
        return
    marks, _kept.marks = _kept.marks, []
    reached = [key for key, mark in marks if key in _kept.armed and _mark(_kept.armed[key]) != mark]
    of_others = [model for model in others if model.is_reached()]
    if not reached and not of_others:
        reached = list(_kept.armed)
    ended = [_kept.armed.pop(key) for key in reached]
    unwrapped.backward_ended(of_others, any_reduced=bool(ended))
    for replica in ended:
        replica.reductions += 1
    for replica in {*ended, *_kept.unfinished.values()}:
        _look_at_reducer(replica, sys._getframe(1))


@guarded("reducer")
def _look_at_reducer(replica: Replica, frame: Any) -> None:
    """Note whether the reducer still waits for gradients after a backward, if that has changed."""
    ddp = replica.ddp()
    if ddp is None or not (reducer.may_note() or replica.unfinished):
        return
    before, replica.unfinished = replica.unfinished, reducer.unfinished(ddp)
    if replica.unfinished:
        _kept.unfinished[id(ddp)] = replica
    else:
        _kept.unfinished.pop(id(ddp), None)
    if replica.unfinished != before:
        reducer.note(replica, replica.unfinished, frame)


def in_backward() -> bool:
    """Return whether this thread is inside a backward of autograd."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def _mark(replica: Replica) -> Any:
    """Return a value that changes when the model's gradients change."""
    ddp = replica.ddp()
    trained = [p for p in ddp._module_parameters if p.requires_grad] if ddp is not None else []
    chosen = trained[:: max(1, len(trained) // (MARKS - 1))] + trained[-1:]
    return [_grad_mark(p.grad) for p in chosen]


def _grad_mark(grad: Any) -> Any:
    if grad is None or grad.is_sparse:
        return id(grad)
    return grad.data_ptr(), grad._version
