"""The events at which replicas are fingerprinted: optimizer steps, forwards, buffer broadcasts, the end of training.

Nearly all steps are not due. They only compare a few numbers and touch no tensor.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any, List, Optional

from . import frames, groups, replicas, schedule
from .fingerprinting import ModelFingerprints, StepFingerprints, gpu_is_idle, held_by, may_fingerprint
from .replicas import Replica
from .schedule import StepCounter
from .state import check_every, guarded, here
from .step_clock import in_backward

# Optimizers per model whose steps are fingerprinted. Our choice; some scripts have one optimizer per parameter.
MAX_STREAMS = 4
_OPTIMIZER_FILE = "optimizer.py"


class Stepper(StepCounter):
    """An optimizer that has stepped."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = weakref.ref(optimizer)
        self.seen = -1  # the version of the set of models for which ``models`` was found
        self.models: List[StepFingerprints] = []


class _Thread(threading.local):
    # The optimizer whose step this thread is making. If optimizers call others, it is the outermost.
    running: Optional[Stepper] = None


_steppers: Any = weakref.WeakKeyDictionary()  # by optimizer
_thread = _Thread()


@guarded("replica before step")
def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Note that an optimizer begins a step, and fingerprint its gradients if the step is due and has no closure."""
    # There may be DDP models, or models without DDP on several ranks.
    group = groups.default() if here.is_rank and here.ring is not None else None
    several = replicas.is_recorded() or (group is not None and group.size() > 1 and bool(check_every()))
    if not several or (_thread.running is not None and _is_inside(_thread.running)):
        return
    stepper = _steppers.get(optimizer)
    if stepper is None:
        stepper = _steppers[optimizer] = Stepper(optimizer)
    _thread.running = stepper
    is_due, began_s = stepper.begins(), time.perf_counter()
    if is_due or stepper.seen != replicas.version():
        _find_models(stepper, optimizer)
    # A closure will compute the gradients.
    has_closure = (len(args) > 1 and callable(args[1])) or kwargs.get("closure") is not None
    is_taken = is_due and not has_closure and may_fingerprint()
    for model in stepper.models:
        model.begins()
        if is_taken:
            model.take_before(optimizer)
    if is_due:
        schedule.spend(began_s)


@guarded("replica after step")
def after_step(optimizer: Any) -> None:
    """Note that an optimizer has made a step, and fingerprint its models if the step is due."""
    stepper = _thread.running
    if stepper is None or stepper.optimizer() is not optimizer:
        return
    _thread.running = None
    try:
        if stepper.ended() and may_fingerprint():
            began_s = time.perf_counter()
            for model in stepper.models:
                model.take_after(stepper.steps, optimizer, list(_steppers), sys._getframe(1))
            schedule.spend(began_s)
    finally:
        for model in stepper.models:
            model.ended(stepper.steps)


def _is_inside(stepper: Stepper) -> bool:
    """Return whether the optimizer's step is still on the stack. A step that raised never reported its end."""
    return any(
        frame.f_code.co_filename.endswith(_OPTIMIZER_FILE) and stepper.optimizer() is frame.f_locals.get("self")
        for frame in frames.outward(sys._getframe(1))
    )


def _find_models(stepper: Stepper, optimizer: Any) -> None:
    """Find the models whose parameters an optimizer holds. There are none for an optimizer that steps within backward.

    Such scripts have one optimizer per parameter, and their order of steps may differ between ranks.
    """
    stepper.seen = replicas.version()
    if in_backward() or any(hasattr(p, "_in_backward_optimizers") for p in held_by(optimizer)):
        stepper.models = []
        return
    held = {id(tensor) for tensor in held_by(optimizer)}
    known = {model.replica: model for model in stepper.models}
    stepper.models = []
    for replica in replicas.all_replicas():
        module = replica.module()
        if module is None or not any(id(tensor) in held for tensor in module.parameters()):
            continue
        if replica in known:
            known[replica].follow(optimizer)
            stepper.models.append(known[replica])
        elif len(_step_fingerprints_of(replica)) < MAX_STREAMS:
            stepper.models.append(StepFingerprints(replica, optimizer))
    if not stepper.steps and not known:  # what it holds besides DDP's parameters, starting before its first step
        of_ddp = {id(tensor) for replica in replicas.all_replicas() for tensor in replica.module().parameters()}
        found = replicas.find_unwrapped(held_by(optimizer), of_ddp)
        if found is not None and may_fingerprint():
            model = StepFingerprints(found, optimizer)
            model.take_first()
            stepper.models.append(model)
    stepper.models += [model for model in known.values() if isinstance(model.replica, replicas.Unwrapped)]


def _step_fingerprints_of(replica: Replica) -> List[StepFingerprints]:
    return [m for stepper in list(_steppers.values()) for m in stepper.models if m.replica is replica]


def _model_fingerprints(replica: Replica) -> ModelFingerprints:
    if replica.fingerprints is None:
        replica.fingerprints = ModelFingerprints(replica)
    found: ModelFingerprints = replica.fingerprints
    return found


@guarded("replica forward")
def forward_begins(ddp: Any) -> None:
    """Fingerprint a model whose parameters no torch optimizer holds, if that is due."""
    import torch

    replica = replicas.find(ddp)
    if replica is None or not torch.is_grad_enabled():
        return
    own = _model_fingerprints(replica)
    if not schedule.is_between(own.forward_taken, replica.reductions):
        return
    own.forward_taken = replica.reductions
    if not _step_fingerprints_of(replica) and may_fingerprint():
        own.take_at_forward(list(_steppers), sys._getframe(1))


@guarded("replica buffers")
def buffers_synced(ddp: Any) -> None:
    """Fingerprint the buffers that DDP has just broadcast, if that is due.

    With a buffer hook of the script nothing is done, because it may send them later, in the background.
    """
    replica = replicas.find(ddp)
    if replica is None or hasattr(ddp, "buffer_hook"):
        return
    own = _model_fingerprints(replica)
    if schedule.is_between(own.sync_taken, replica.reductions) and may_fingerprint():
        own.sync_taken, began_s = replica.reductions, time.perf_counter()
        own.take_after_sync()
        schedule.spend(began_s)


@guarded("replica ends")
def model_ended(replica: Replica) -> None:
    """Fingerprint a trained model one last time, unless an error ended training or the model was edited since."""
    last: Optional[StepFingerprints] = replica.last_stepped
    trained = replica.reductions or last is not None
    if replica.ended or not trained or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None:
        return
    replica.ended = True
    if (last is not None and last.is_edited()) or (replica.on_gpu and not gpu_is_idle()):
        return
    if may_fingerprint():
        _model_fingerprints(replica).take_at_end(last.steps if last is not None else 0)


@guarded("replicas end")
def group_ends(group: Any = None) -> None:
    """Fingerprint the models of a process group that is about to be destroyed; all models if ``group`` is None."""
    wanted = None if group is None or group is groups.default() else str(group.group_name)
    for replica in replicas.all_replicas():
        if wanted in (None, replica.group):
            model_ended(replica)


os.register_at_fork(after_in_child=_steppers.clear)
replicas.on_gone.append(model_ended)
here.on_end.append(group_ends)
