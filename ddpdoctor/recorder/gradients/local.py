"""Hooks on forward, backward, steps and scalers that check the local gradients of each DDP model in each backward.

They register no communication hook, change no gradient, and wait for no device.
"""

from __future__ import annotations

import _thread
import functools
import os
import sys
import time
import weakref
from typing import Any, Callable, List

from .. import hooks
from ..capture import is_capturing
from ..replicas import ddp_models, schedule
from ..settings import read_settings
from ..state import check_every, guarded, here, run_waiting, sealed, shielded, wall
from ..wrappers import around, wraps
from .finite_checks import tensors_in
from .watch import Backward, GradientWatch

MAX_OUTPUTS = 8
"""Outputs of a model whose hooks show that a backward reaches it. Our choice: the loss comes from one of the first."""


class _Kept:
    """The models that this process watches."""

    def __init__(self) -> None:
        self.watches: Any = weakref.WeakKeyDictionary()
        """By replica: its ``GradientWatch``."""
        self.is_speed = False
        """With ``--speed``, only steps in which replicas are compared are checked."""
        self.backwards: List[Backward] = []
        """The running calls of torch.autograd.backward, the innermost last."""
        self.handles: List[Any] = []
        """Handles of the hooks on outputs since the last backward."""
        self.scaled = False
        """Whether a gradient scaler has scaled a loss since the last backward."""
        self.is_noted = False
        """Whether a note says that gradients are checked on this rank. If no finding follows, they were finite."""


_kept = _Kept()


class _Output(functools.partial):  # type: ignore[type-arg]
    """The hook on an output of a model."""

    __torch_unserializable__ = True  # without it torch warns when a script saves the output


def patch_ddp(ddp: Any) -> None:
    """Make each forward of DDP prepare for the check of its gradients."""
    if not check_every():
        return
    _kept.is_speed = read_settings(os.environ).speed
    hooks.put(ddp, "forward", _looking)
    scaler = hooks.part(sys.modules.get("torch.amp.grad_scaler"), "GradScaler")
    hooks.put(scaler, "scale", lambda original: around(original, before=_scales))
    _note_what_looks_need(sys.modules["torch"])


def _note_what_looks_need(torch: Any) -> None:
    hooks.has(torch._C, "_current_graph_task_id")
    engine = torch.autograd.Variable._execution_engine
    hooks.note("autograd engine.queue_callback", hasattr(engine, "queue_callback"))
    hooks.has(torch.Tensor, "register_post_accumulate_grad_hook")


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _begin(self, (args, kwargs))
        result = original(self, *args, **kwargs)
        if watch is not None:
            _stand_by(watch, result)
        return result

    return forward


def patch_autograd(module: Any) -> None:
    """Keep track of which backward is running."""
    if not check_every():
        return
    hooks.put(module, "backward", _tracking)


def _tracking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not _kept.watches:
            return original(*args, **kwargs)
        is_outer = not here.in_backward and _thread.get_ident() == here.main_thread
        late = here.late.get(here.main_thread) if is_outer else None
        if late:
            _raise_first(late)
        try:
            here.in_backward = here.in_backward or is_outer
            _enter(args, kwargs, sys._getframe(1))
            result = original(*args, **kwargs)
        finally:
            sealed[wall.gi_running][_leave,]
            if is_outer:  # last, so that what came late is not raised in between
                here.in_backward = False
                if here.waiting:
                    run_waiting(sys._getframe(1))
        late = here.late.get(here.main_thread) if is_outer else None
        if late:
            _raise_first(late)
        return result

    return backward


def _raise_first(errors: List[BaseException]) -> None:
    """Raise the first of several, and keep the others. Nothing is called, so no signal handler runs in between."""
    if errors:  # the sampler has not sent it meanwhile
        error = errors[0]
        del errors[0]
        raise error


@guarded("gradients")
def _scales(scaler: Any) -> None:
    _kept.scaled = bool(getattr(scaler, "_enabled", False))


@guarded("gradients")
def _begin(ddp: Any, given: Any) -> Any:
    """Return the ``GradientWatch`` of a model whose forward begins, or None if it is not watched."""
    import torch

    replica = ddp_models.find(ddp) if torch.is_grad_enabled() and not is_capturing() else None
    if replica is None or _is_left_out(replica):
        return None
    watch = _kept.watches.get(replica)
    if watch is None:
        watch = _kept.watches[replica] = GradientWatch(replica, ddp)
        watch.at_output = _at_output(watch)
    if watch.off:
        return None
    if not _kept.is_noted and here.ring is not None:
        _kept.is_noted = here.ring.note({"k": "gradients", "at": time.monotonic_ns()})
    watch.begin_forward(ddp, given)
    return watch


def _is_left_out(replica: Any) -> bool:
    """Return whether this step is one of those that ``wrap --speed`` leaves out, as checks take time in each step."""
    return _kept.is_speed and not schedule.is_between(replica.reductions, replica.reductions + 1)


def _at_output(watch: GradientWatch) -> Callable[[Any], None]:
    """Return what to call in a backward, before the first gradient of a model."""
    reference = weakref.ref(watch)

    def begins(_gradient: Any) -> None:
        reached = reference()
        if reached is not None and _kept.backwards:  # torch.autograd.grad leaves the parameters' gradients alone
            reached.begin_backward(_kept.backwards[-1])

    # On a GPU several threads may call it, and none of them is the main thread, which signal handlers interrupt.
    return guarded("gradients")(begins) if watch.on_gpu else shielded("gradients", begins)


@guarded("gradients")
def _stand_by(watch: GradientWatch, result: Any) -> None:
    import torch

    if not torch.is_grad_enabled():
        return
    outputs = [tensor for _, tensor in tensors_in(result, "") if tensor.requires_grad][:MAX_OUTPUTS]
    if len(_kept.handles) >= 4 * MAX_OUTPUTS:
        del _kept.handles[:MAX_OUTPUTS]
    _kept.handles += [tensor.register_hook(_Output(watch.at_output)) for tensor in outputs]


@guarded("gradients")
def _enter(args: Any, kwargs: Any, frame: Any) -> None:
    roots = args[0] if args else kwargs.get("tensors", ())
    roots = tuple(roots) if isinstance(roots, (list, tuple)) else (roots,)
    if ddp_models.in_backward():
        for watch in list(_kept.watches.values()):
            watch.spoil()
    else:
        _kept.backwards.clear()  # what an exception from outside has left
        if _is_compiled():
            for handle in _kept.handles:
                handle.remove()
    scaled, _kept.scaled, _kept.handles = _kept.scaled, False, []
    _kept.backwards.append(Backward(roots, frame, scaled))


@guarded("gradients")
def _leave() -> None:
    if _kept.backwards:
        _kept.backwards.pop()
    if not _kept.backwards:
        for watch in list(_kept.watches.values()):
            watch.end_backward()


def _is_compiled() -> bool:
    """Return whether torch compiles this backward. It would then compile our hooks too."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


@guarded("gradients")
def before_step(optimizer: Any, *unused: Any) -> None:
    """Check whether the step that an optimizer is about to make uses a pending finding."""
    late = here.late.get(_thread.get_ident())
    if late and not here.in_backward:
        _raise_first(late)
    if not ddp_models.is_recorded() or is_capturing():
        return
    for watch in list(_kept.watches.values()):
        watch.step_begins()
        watch.catch_up()
        if watch.findings.pending:
            watch.before_step(optimizer)


@guarded("gradients")
def settle_all() -> None:
    """Decide what is pending, because no training follows."""
    for watch in list(_kept.watches.values()) if ddp_models.is_recorded() else ():
        watch.end()


@guarded("gradients")
def _model_ends(replica: Any) -> None:
    watch = _kept.watches.pop(replica, None)
    if watch is not None:
        watch.end()


here.on_end.append(settle_all)
ddp_models.on_gone.append(_model_ends)
