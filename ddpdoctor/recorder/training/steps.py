"""Measures training steps: how long each phase of a step took, and how much of it was spent waiting for other ranks.

A step ends at an optimizer's step, else at the end of a backward that reduced gradients (DDP), else at the end of any
backward, else at a collective that repeats. If several of them take turns, the first one ends the step. DDP's timers
(``reductions``) say when the last gradient was ready or the first bucket went out. They cost 4 microseconds a step and
need no hook in autograd.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, Callable

from .. import hooks
from ..calls.waiting import begin_wait, end_wait, heal
from ..replicas import ddp_models
from ..speed import device_steps
from ..state import guarded, here, sealed, wall
from ..storage import ring_layout
from ..storage.device_columns import OPTIMIZER
from ..wrappers import around, wraps
from . import reductions
from .step_clock import clock

MAX_NESTED = 3
"""Containers around forward's first tensor that are opened. Our choice: a batch is a dictionary or a list."""

_reducing: Any = None
"""A weak reference to the DDP model whose forward ran last with gradients to reduce; None after its backward."""


_optimizing: Any = (None, 0, 0)
"""The id of the outermost optimizer that is stepping, when it began, and how long the phase had waited by then."""


@guarded("steps")
def optimizer_begins(optimizer: Any) -> None:
    """Note that an optimizer begins to step. A step that raised has no end, so the same optimizer begins anew."""
    global _optimizing
    if _optimizing[0] in (None, id(optimizer)):
        _optimizing = (id(optimizer), time.monotonic_ns(), clock.waits[clock.phase])
        if clock.on_phase is not None:
            clock.on_phase(OPTIMIZER)


def stepped(optimizer: Any) -> None:
    """Note an optimizer's step."""
    global _optimizing
    known, began_ns, waited = _optimizing
    is_in_part = clock.waiting or clock.phases or clock.loading or clock.phase == ring_layout.BACKWARD
    if is_in_part and not ddp_models.in_backward():
        heal()  # an exception from outside has cut off the end of a wait or of a phase
    if known == id(optimizer):
        waited = clock.waits[clock.phase] - waited
        clock.inside.optimizer += time.monotonic_ns() - began_ns - waited
        _optimizing = (None, 0, 0)
        if clock.on_phase is not None:
            clock.on_phase(clock.phase)
    if clock.ends_step(ring_layout.STEP_OPTIMIZER, id(optimizer)):
        reductions.end_step()


def patch_ddp(ddp: Any) -> None:
    """Measure forwards of DDP, and the wait for rank 0's buffers inside them."""
    if hooks.has(ddp, "_set_ddp_runtime_logging_sample_rate"):
        hooks.put(ddp, "__init__", lambda original: around(original, after=_time_every_step))
    hooks.put(ddp, "forward", _forward)
    hooks.put(ddp, "_sync_buffers", _waiting)


def patch_autograd(module: Any) -> None:
    """Measure torch.autograd.backward, which Tensor.backward calls too."""
    hooks.put(module, "backward", _backward)


@guarded("steps")
def _time_every_step(ddp: Any) -> None:
    """Make DDP time each step on CPU, where it costs nothing. On a GPU its timers make the host wait.

    If C++ logs INFO, DDP writes its times to stderr every time it takes them, so its sampling rate is left alone.
    """
    if ddp.device_type == "cpu" and os.environ.get("TORCH_CPP_LOG_LEVEL", "") not in ("INFO", "0"):
        ddp._set_ddp_runtime_logging_sample_rate(1)


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = 0
        waited = clock.waits[clock.phase]
        try:
            began = begin_wait()
            return original(*args, **kwargs)
        finally:
            sealed[wall.gi_running][_waited, began, waited]

    return wraps(original)(run)


def _waited(began_ns: int, waited_ns: int) -> None:
    end_wait(began_ns, counts=True)
    clock.inside.buffers += clock.waits[clock.phase] - waited_ns


@guarded("steps")
def _enter(phase: int) -> int:
    return clock.enter(phase)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or clock.phase == ring_layout.BACKWARD or here.ring is None:
            return original(self, *args, **kwargs)
        try:
            _enter(ring_layout.FORWARD)
            _note_input(args, kwargs)
            return original(self, *args, **kwargs)
        finally:
            sealed[wall.gi_running][_forward_ended, self]

    return wraps(original)(forward)


@guarded("steps")
def _note_input(args: Any, kwargs: Any) -> None:
    """Add the size of forward's first tensor. Ranks whose batches differ in size take different times."""
    given: Any = args[0] if args else next(iter(kwargs.values()), None)
    for _ in range(MAX_NESTED):
        shape = getattr(given, "shape", None)
        if shape is not None:
            clock.inside.rows += shape[0] if len(shape) else 1
            clock.inside.numel += shape.numel()
            return
        values = given.values() if hasattr(given, "values") else given if isinstance(given, (list, tuple)) else ()
        given = next(iter(values), None)


@guarded("steps")
def _forward_ended(ddp: Any) -> None:
    global _reducing
    clock.enter(ring_layout.BETWEEN)
    if ddp.require_backward_grad_sync:
        _reducing = weakref.ref(ddp)
        reductions.began_anew(ddp)
        device_steps.forward_ended(ddp)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        nested = clock.phase == ring_layout.BACKWARD
        if nested or here.ring is None or threading.get_ident() != here.main_thread:
            return original(*args, **kwargs)
        try:
            began = _enter(ring_layout.BACKWARD)
            result = original(*args, **kwargs)
        except BaseException:
            sealed[wall.gi_running][_enter, ring_layout.BEFORE]
            raise
        _backward_ended(began)
        return result

    return wraps(original)(backward)


@guarded("steps")
def _backward_ended(began_ns: int) -> None:
    global _reducing
    clock.enter(ring_layout.BEFORE)
    clock.inside.backwards += 1
    model, _reducing = (_reducing, None)
    ddp = model() if model is not None else None
    if ddp is not None:
        reductions.reduced(ddp, began_ns, clock.since_ns)
    if clock.ends_step(ring_layout.STEP_BACKWARD if ddp is None else ring_layout.STEP_REDUCED, id(ddp)):
        reductions.end_step()


here.clock = clock
