"""The DDP models of this process whose copies other ranks hold, and how often each was run and reduced.

A forward with gradients arms DDP's reducer; the next backward that reaches the model is reduced, and no other until the
next such forward. So reductions are counted here as the reducer makes them: once for several forwards, once for a
graph that is kept for a second backward, and not for a forward under ``no_sync``, wherever its backward stands.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from ..calls import groups
from ..state import check_every, guarded, here
from ..training import reducer
from . import unwrapped

MARKS = 4
"""Parameters of a model that tell whether a backward reached it, where several models could have been. Ours: of the
first, the last, and two between them one is used by nearly any backward."""

on_gone: List[Callable[[Replica], None]] = []
"""What is to be done with a model that ends: its module is still there."""


class Replica:
    """What is kept of one DDP model."""

    def __init__(self, ddp: Any, ranks: Tuple[int, ...], number: int) -> None:
        self.ddp = weakref.ref(ddp, functools.partial(_gone, _kept, id(ddp)))
        self._module = weakref.ref(ddp.module)
        self.group = str(ddp.process_group.group_name)
        self.ranks = ranks
        self.rank = int(groups.c10d.get_rank())
        self.number = number
        """The how-many-th model of this group, from 1."""
        self.ignored: FrozenSet[str] = frozenset(getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ()))
        self.reduced = _reduced_by(ddp, self.ignored)
        """Ids of the parameters that DDP reduces; it holds them, so no other tensor gets their ids meanwhile."""
        self.on_gpu = getattr(ddp, "device_type", "cpu") != "cpu"
        self.forwards = 0
        """With gradients, as long as the model is there."""
        self.unreduced_forwards = 0
        self.before_step = (0, 0)
        """Forwards, and those that were not reduced, up to the last step of any optimizer that holds parameters."""
        self.reductions = 0
        self.unfinished: Any = None
        """What the last backward has left the reducer waiting for; None where it has reduced all."""
        self.optimizers = 0
        """How many optimizers have stepped with parameters of it."""
        self.syncs_buffers = bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))
        """DDP sends rank 0's buffers before forwards."""
        self.join = False
        self.hook = ""
        """As last seen; the script may register one at any time."""
        self.moments: Any = None
        """Kept by whoever looks at this model by its own clocks."""
        self.last_stepped: Any = None
        """What is kept, by the same, of the optimizer that was the last to make a step."""
        self.ended = False

    def module(self) -> Any:
        """Return the wrapped module, which the script may exchange; None where it is gone.

        When a DDP model ends its module is still there.
        """
        ddp = self.ddp()
        return self._module() if ddp is None else ddp.module


class _Kept:
    """The replicas of this process; a forked child has none of its parent's."""

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
    """Return whether there are models to be looked at, and this is the process that has made them."""
    return bool(_kept.by_id) and _kept.ring is here.ring


def version() -> int:
    """Return a number that changes whenever a model is made or ends."""
    return _kept.version


def all_replicas() -> List[Replica]:
    """Return the models that are there, in the order in which they were made."""
    return list(_kept.by_id.values()) if _kept.ring is here.ring else []


def find(ddp: Any) -> Optional[Replica]:
    """Return what is kept of a DDP model, if anything is."""
    return _kept.by_id.get(id(ddp)) if _kept.ring is here.ring else None


def register(ddp: Any) -> None:
    """Keep a DDP model that has just been made, unless it has the only copy."""
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


def _reduced_by(ddp: Any, ignored: FrozenSet[str]) -> FrozenSet[int]:
    named = ddp.module.named_parameters()
    return frozenset(id(tensor) for name, tensor in named if tensor.requires_grad and name not in ignored)


def _gone(kept: _Kept, key: int, reference: Any, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Look a last time at a model that ends, and forget it; not when Python ends, and torch is half gone by then."""
    replica = kept.by_id.get(key)
    if is_ending() or replica is None or replica.ddp is not reference:
        return
    try:
        if kept.ring is here.ring:
            for action in on_gone:
                action(replica)
    except Exception:  # noqa: BLE001, S110 - the recorder's wall: each action has one of its own
        pass
    del kept.by_id[key]
    kept.armed.pop(key, None)
    kept.unfinished.pop(key, None)
    kept.version += 1


@guarded("replica forward")
def forward_ended(ddp: Any) -> None:
    """Count a forward of DDP that has come to its end."""
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
    """Prepare to tell which of several models a backward will reach."""
    others = unwrapped.all_models()
    if (len(_kept.armed) > 1 or others) and not in_backward():
        unwrapped.backward_begins()
        _kept.marks = [(key, _mark(replica)) for key, replica in _kept.armed.items()]


def backward_ended(*unused: Any, **also_unused: Any) -> None:
    """Count a reduction of each model that was armed and that the backward has reached.

    A backward inside another, as checkpointing makes, reduces nothing by itself.
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
    """Note whether a backward has left the reducer waiting for gradients, where that has changed."""
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
    """Return what changes when gradients are added to."""
    ddp = replica.ddp()
    trained = [p for p in ddp._module_parameters if p.requires_grad] if ddp is not None else []
    chosen = trained[:: max(1, len(trained) // (MARKS - 1))] + trained[-1:]
    return [_grad_mark(p.grad) for p in chosen]


def _grad_mark(grad: Any) -> Any:
    if grad is None or grad.is_sparse:
        return id(grad)
    return grad.data_ptr(), grad._version
