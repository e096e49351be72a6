"""By what the replicas of this process are looked at: steps of optimizers, forwards, syncs of buffers, the end.

Nearly all steps are not due. For those a few numbers are compared, and no tensor is touched.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import Any, Dict, List, Optional

from ..state import check_every, guarded, here
from . import ddp_models, unwrapped
from .ddp_models import Replica
from .fingerprinting import ModelFingerprints, StepFingerprints, gpu_is_idle, may_look, next_due

MAX_STREAMS = 4
"""Optimizers of one model at a time whose steps are looked at; some scripts have one for each parameter. Ours."""
_OPTIMIZER_FILE = "optimizer.py"


class Stepper:
    """An optimizer that has stepped."""

    def __init__(self, optimizer: Any, every: int) -> None:
        self.optimizer = weakref.ref(optimizer, functools.partial(_forget, _steppers, id(optimizer)))
        self.steps = 0
        self.due = 1
        self.every = every
        self.seen = -1
        """The set of models that ``moments`` are of."""
        self.moments: List[StepFingerprints] = []


class _Thread(threading.local):
    running: Optional[Stepper] = None
    """Whose step this thread is making: the outermost, where optimizers call others."""


_steppers: Dict[int, Stepper] = {}
_thread = _Thread()


def _forget(steppers: Dict[int, Stepper], key: int, reference: Any) -> None:
    """Forget an optimizer that is no more; names of this file may be gone when Python ends."""
    found = steppers.get(key)
    if found is not None and found.optimizer is reference:
        del steppers[key]


@guarded("replica before step")
def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Note that an optimizer begins a step, and take gradients where that is due, and where they are there."""
    if not _is_watched() or (_thread.running is not None and _is_inside(_thread.running)):
        return
    stepper = _thread.running = _stepper_of(optimizer)
    is_due = stepper.steps + 1 == stepper.due
    if is_due or stepper.seen != ddp_models.version():
        _find_models(stepper, optimizer)
    looks = is_due and not _has_closure(args, kwargs) and may_look()
    for moments in stepper.moments:
        moments.begins()
        if looks:
            moments.look_before(optimizer)


def _is_watched() -> bool:
    """Return whether there may be replicas: DDP models, or other ranks that train as well."""
    return ddp_models.is_recorded() or (here.is_rank and unwrapped.may_be_several() and bool(check_every()))


@guarded("replica after step")
def after_step(optimizer: Any) -> None:
    """Note that an optimizer has made a step, and look at its models where that is due."""
    stepper = _thread.running
    if stepper is None or stepper.optimizer() is not optimizer:
        return
    _thread.running = None
    stepper.steps += 1
    try:
        if stepper.steps == stepper.due:
            stepper.due = next_due(stepper.steps, stepper.every)
            _look_after(stepper, optimizer)
    finally:
        for moments in stepper.moments:
            moments.ended(stepper.steps)


def _look_after(stepper: Stepper, optimizer: Any) -> None:
    if may_look():
        for moments in stepper.moments:
            moments.look_after(stepper.steps, optimizer, _optimizers(), sys._getframe(1))


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether the gradients of a step will be computed by a function that it was given."""
    return (len(args) > 1 and callable(args[1])) or kwargs.get("closure") is not None


def _stepper_of(optimizer: Any) -> Stepper:
    found = _steppers.get(id(optimizer))
    if found is None or found.optimizer() is not optimizer:
        found = _steppers[id(optimizer)] = Stepper(optimizer, check_every())
    return found


def _is_inside(stepper: Stepper) -> bool:
    """Return whether a step is still being made further out: one that raised has left no other trace."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_OPTIMIZER_FILE) and stepper.optimizer() is frame.f_locals.get("self"):
            return True
        frame = frame.f_back
    return False


def _find_models(stepper: Stepper, optimizer: Any) -> None:
    """Find the models of which an optimizer holds parameters; none for one that steps within backward.

    Those are one for each parameter, and step in an order that may differ between ranks.
    """
    stepper.seen = ddp_models.version()
    if ddp_models.in_backward() or any(hasattr(p, "_in_backward_optimizers") for p in _held(optimizer)):
        stepper.moments = []
        return
    held = {id(tensor) for tensor in _held(optimizer)}
    known = {moments.replica: moments for moments in stepper.moments}
    stepper.moments = []
    for replica in ddp_models.all_replicas():
        module = replica.module()
        if module is None or not any(id(tensor) in held for tensor in module.parameters()):
            continue
        if replica in known:
            known[replica].follow(optimizer)
            stepper.moments.append(known[replica])
        elif len(_step_fingerprints_of(replica)) < MAX_STREAMS:
            stepper.moments.append(StepFingerprints(replica, optimizer))
    if not stepper.steps and not known:
        _find_unwrapped(stepper, optimizer)
    stepper.moments += [moments for moments in known.values() if isinstance(moments.replica, unwrapped.Unwrapped)]


def _find_unwrapped(stepper: Stepper, optimizer: Any) -> None:
    """Look at what an optimizer holds beside DDP's parameters, from before its first step on."""
    known = {id(tensor) for replica in ddp_models.all_replicas() for tensor in replica.module().parameters()}
    model = unwrapped.find(_held(optimizer), known)
    if model is not None and may_look():
        moments = StepFingerprints(model, optimizer)
        moments.look_first()
        stepper.moments.append(moments)


def _held(optimizer: Any) -> List[Any]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _step_fingerprints_of(replica: Replica) -> List[StepFingerprints]:
    return [m for stepper in list(_steppers.values()) for m in stepper.moments if m.replica is replica]


def _optimizers() -> List[Any]:
    found = [stepper.optimizer() for stepper in list(_steppers.values())]
    return [optimizer for optimizer in found if optimizer is not None]


def _model_fingerprints(replica: Replica) -> ModelFingerprints:
    if replica.moments is None:
        replica.moments = ModelFingerprints(replica)
    found: ModelFingerprints = replica.moments
    return found


@guarded("replica forward")
def forward_begins(ddp: Any, *unused: Any, **also_unused: Any) -> None:
    """Look at a model of which no optimizer of torch's holds parameters, where that is due."""
    import torch

    replica = ddp_models.find(ddp)
    if replica is None or not torch.is_grad_enabled():
        return
    own = _model_fingerprints(replica)
    if replica.reductions < own.forward_due:
        return
    own.forward_due = next_due(replica.reductions, check_every())
    if not _step_fingerprints_of(replica) and may_look():
        own.look_at_forward(_optimizers(), sys._getframe(1))


@guarded("replica buffers")
def buffers_synced(ddp: Any) -> None:
    """Look at the buffers that DDP has just sent, where that is due.

    The script's own hook for buffers may send them later, in the background.
    """
    replica = ddp_models.find(ddp)
    if replica is None or hasattr(ddp, "buffer_hook"):
        return
    own = _model_fingerprints(replica)
    if replica.reductions >= own.sync_due and may_look():
        own.sync_due = next_due(replica.reductions, check_every())
        own.look_after_sync()


@guarded("replica ends")
def model_ended(replica: Replica) -> None:
    """Look a last time at a model that was trained, unless an error has ended training, or it was edited since."""
    last: Optional[StepFingerprints] = replica.last_stepped
    trained = replica.reductions or last is not None
    if replica.ended or not trained or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None:
        return
    replica.ended = True
    if (last is not None and last.is_edited()) or (replica.on_gpu and not gpu_is_idle()):
        return
    if may_look():
        _model_fingerprints(replica).look_at_end(last.steps if last is not None else 0)


@guarded("replicas end")
def group_ends(group: Any = None) -> None:
    """Look a last time at the models of a process group that is about to be destroyed, all of them without one."""
    from ..calls import groups

    wanted = None if group is None or group is groups.default() else str(group.group_name)
    for replica in ddp_models.all_replicas():
        if wanted in (None, replica.group):
            model_ended(replica)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_steppers.clear)
ddp_models.on_gone.append(model_ended)
here.on_end.append(group_ends)
