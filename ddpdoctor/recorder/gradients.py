"""Checks the local gradients of each DDP model in each backward, before they are mixed with those of other ranks.

DDP copies the reduced values back into the gradients in a callback at the end of backward, which it queues when its
last bucket is full. A callback that was queued earlier in the same backward runs first, and finds all gradients as this
rank computed them. No hook here registers a communication hook, changes a gradient, or waits for a device.
"""

from __future__ import annotations

import _thread
import collections
import functools
import math
import os
import sys
import time
import weakref
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Tuple

import torch

from . import frames, gradient_checks, hooks, replicas, schedule
from .gradient_checks import (
    ArrivingGradients,
    Findings,
    Maxima,
    Sound,
    has_finite_sum,
    is_finite,
    is_observed,
    is_plain,
    not_finite,
    pieces_of,
    quietly,
    samples_of,
    tensors_in,
)
from .settings import read_settings
from .state import check_every, guarded, here, run_waiting, sealed, shielded, wall
from .step_clock import in_backward, is_capturing
from .wrappers import around, wraps

# Outputs of a model whose hooks show that a backward reaches it. Our choice: the loss comes from one of the first.
MAX_OUTPUTS = 8


class _Kept:
    def __init__(self) -> None:
        self.watches: Any = weakref.WeakKeyDictionary()  # by replica: its ``GradientWatch``
        self.is_speed = False  # with ``--speed``, only steps in which replicas are compared are checked
        self.backwards: List[Backward] = []  # the running calls of torch.autograd.backward, the innermost last
        self.handles: List[Any] = []  # handles of the hooks on outputs since the last backward
        self.scaled = False  # whether a gradient scaler has scaled a loss since the last backward
        # Whether a note says that gradients are checked on this rank. If no finding follows, they were finite.
        self.is_noted = False


_kept = _Kept()


class _Output(functools.partial):  # type: ignore[type-arg]
    __torch_unserializable__ = True  # without it torch warns when a script saves the output


def patch_ddp(ddp: Any) -> None:
    if not check_every():
        return
    _kept.is_speed = read_settings(os.environ).speed

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch = _begin(self, (args, kwargs))
            result = original(self, *args, **kwargs)
            if watch is not None:
                _stand_by(watch, result)
            return result

        return forward

    @guarded("gradients")
    def scales(scaler: Any, *unused: Any, **also_unused: Any) -> None:
        _kept.scaled = bool(getattr(scaler, "_enabled", False))

    hooks.put(ddp, "forward", looking)
    scaler = hooks.part(sys.modules.get("torch.amp.grad_scaler"), "GradScaler")
    hooks.put(scaler, "scale", around(before=scales))
    torch: Any = sys.modules["torch"]
    hooks.has(torch._C, "_current_graph_task_id")
    engine = torch.autograd.Variable._execution_engine
    hooks.note("autograd engine.queue_callback", hasattr(engine, "queue_callback"))
    hooks.has(torch.Tensor, "register_post_accumulate_grad_hook")


def tracking(original: Callable[..., Any]) -> Callable[..., Any]:
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
def _begin(ddp: Any, given: Any) -> Any:
    replica = replicas.find(ddp) if torch.is_grad_enabled() and not is_capturing() else None
    if replica is None or _is_left_out(replica):
        return None
    watch = _kept.watches.get(replica)
    if watch is None:
        watch = _kept.watches[replica] = GradientWatch(replica, ddp)
    if watch.off:
        return None
    if not _kept.is_noted:
        _kept.is_noted = here.note("gradients")
    watch.begin_forward(ddp, given)
    return watch


def _is_left_out(replica: Any) -> bool:
    """Return whether this step is one of those that ``wrap --speed`` leaves out, as checks take time in each step."""
    return _kept.is_speed and not schedule.is_between(replica.reductions, replica.reductions + 1)


@guarded("gradients")
def _stand_by(watch: GradientWatch, result: Any) -> None:
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
    if in_backward():
        for watch in list(_kept.watches.values()):
            watch.spoil()
    else:
        _kept.backwards.clear()  # what an exception from outside has left
        # torch compiles this backward, and would compile our hooks too.
        if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False):
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


@guarded("gradients")
def before_step(optimizer: Any, *unused: Any) -> None:
    late = here.late.get(_thread.get_ident())
    if late and not here.in_backward:
        _raise_first(late)
    if not replicas.is_recorded() or is_capturing():
        return
    for watch in list(_kept.watches.values()):
        watch.before_step(optimizer)


@guarded("gradients")
def settle_all(gone: Any = None) -> None:
    """Decide what is pending, because no training follows: of a model that is gone, or of all models."""
    if gone is None:
        ended = list(_kept.watches.values()) if replicas.is_recorded() else []
    else:
        ended = [_kept.watches.pop(gone)] if gone in _kept.watches else []
    for watch in ended:
        watch.end()


here.on_end.append(settle_all)
replicas.on_gone.append(settle_all)
MAX_INPUTS = 32  # Inputs that are remembered until a backward. Our choice: those of a few forwards.
# Bytes that may be on their way from GPUs at a time. A backward that finds no room is not checked.
MAX_AHEAD_BYTES = 2**18
MAX_LAST_WAIT_S = 0.2
# How long and how often the end of training waits for a GPU. Our choice: the script has read a loss by then.
LAST_LOOK_S = 0.01
MAX_NAMES = 4
MAX_NAME = 200


class Backward(NamedTuple):
    """One call of torch.autograd.backward."""

    roots: Tuple[Any, ...]
    frame: Any
    scaled: bool


class _Input(NamedTuple):
    label: str
    tensor: Any  # a weak reference
    sample: Any

    def holds(self, value: float) -> str:
        """Return what is wrong with it, given its sample: "NaN in 3 of 64 values"; empty if it is finite."""
        if math.isfinite(value):
            return ""
        tensor = self.tensor()
        if tensor is None:
            return "inf" if abs(value) == math.inf else "NaN"
        for kind, wrong in (("NaN", int(tensor.isnan().sum())), ("inf", int(tensor.isinf().sum()))):
            if wrong:
                return "%s in %d of %d values" % (kind, wrong, tensor.numel())
        return ""


class GradientWatch:
    """The gradients of one DDP model."""

    def __init__(self, replica: Any, ddp: Any) -> None:
        self.replica = weakref.ref(replica)
        self._ddp = weakref.ref(ddp)
        ignored = ddp.parameters_to_ignore
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.off = not all(map(is_plain, self._parameters))
        if getattr(ddp, "_use_python_reducer", False) or getattr(ddp, "mixed_precision", None) is not None:
            self.off = True  # DDP's C++ reducer does not reduce them, or not in their own dtype
        # Those that DDP reduces in place: views of its buckets, and sparse ones.
        lookups = (m for m in ddp.module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
        sparse = {id(module.weight) for module in lookups if module.sparse}
        in_place = [not self.off and (ddp.gradient_as_bucket_view or id(p) in sparse) for p in self._parameters]
        early = {i: parameter for i, parameter in enumerate(self._parameters) if in_place[i]}
        self._arrivals = ArrivingGradients(early) if early else None
        self._late = [i for i in range(len(named)) if i not in early]
        self._pieces = pieces_of(self._parameters[i] for i in self._late) if not self.off else []
        self.on_gpu = any(parameter.is_cuda for parameter in self._parameters)
        this = weakref.ref(self)

        def check(backward: Backward) -> None:
            watch = this()
            if watch is not None:
                watch._check(backward)

        def begins(_gradient: Any) -> None:
            watch = this()
            if watch is not None and _kept.backwards:  # torch.autograd.grad leaves the parameters' gradients alone
                watch.begin_backward(_kept.backwards[-1])

        self._checks = shielded("gradients", check)
        # Called in a backward, before the first gradient; on a GPU not in the main thread, which signals interrupt.
        self.at_output: Any = guarded("gradients")(begins) if self.on_gpu else shielded("gradients", begins)
        self._inputs: List[_Input] = []
        self._losses: List[Any] = []  # samples of the losses of backwards that were skipped
        self._reduces = True
        # Whether gradients accumulate over several backwards, so that checking the last one covers all of them.
        self._waits_for_last = self._spoilt = False
        self._task = -1
        # Checks whose result is on its way from a GPU: the gradients' positions, the inputs, a finding's beginning.
        self._ahead: Deque[Tuple[Maxima, List[int], List[_Input], Dict[str, Any]]] = collections.deque()
        self.findings = Findings(Sound([] if self.off else named).first_ruined)

    @quietly
    def begin_forward(self, ddp: Any, given: Any) -> None:
        """Remember samples of the model's inputs, which show whether the inputs are finite."""
        self.catch_up()
        if self.findings.are_enough or is_observed():
            return
        self._reduces = bool(ddp.require_backward_grad_sync)
        args, kwargs = given
        found = [pair for i, value in enumerate(args) for pair in tensors_in(value, "argument %d of forward" % i)]
        found += [pair for name, value in kwargs.items() for pair in tensors_in(value, "argument %s of forward" % name)]
        samples = samples_of([tensor.detach() for _, tensor in found[:MAX_INPUTS]])
        inputs = [_Input(label, weakref.ref(tensor), sample) for (label, tensor), sample in zip(found, samples)]
        self._inputs = (self._inputs + inputs)[-MAX_INPUTS:]

    def begin_backward(self, backward: Backward) -> None:
        """Queue a check for when all gradients are there. Call it from within a backward, before the first gradient."""
        task = torch._C._current_graph_task_id()
        ddp = self._ddp()
        if self.off or task == self._task or ddp is None or self.findings.are_enough or is_observed():
            return
        self._task, self._spoilt = task, False
        if self.on_gpu and self._waits_for_last and not self._reduces:
            # They still accumulate, and are checked in the backward that reduces them.
            self._losses = (self._losses + _loss_samples(backward))[-MAX_INPUTS:]
            return
        if self._arrivals is not None:
            self._arrivals.begin(ddp)
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._checks, backward))

    def spoil(self) -> None:
        """Check gradients as they arrive: a backward inside this one may end DDP's reduction before our callback."""
        if self._task != -1 and self._late:
            self._spoilt = True
            self._arrivals = ArrivingGradients(dict(enumerate(self._parameters)))
            self._late, self._pieces = [], []

    def _check(self, backward: Backward) -> None:
        self._task = -1
        try:
            if not self._spoilt:
                self._look_at_all(backward)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed("gradients", error)
            self.off = True
        self._waits_for_last = self._waits_for_last or self._reduces
        self._inputs, self._losses = [], []

    @quietly
    def _look_at_all(self, backward: Backward) -> None:
        bad, maxima = self._arrivals.end() if self._arrivals is not None else ({}, [])
        if self.on_gpu:
            late = self._late_gradients()
            samples = samples_of([grad for _, grad in late])
            grads = maxima + [(i, sample) for (i, _), sample in zip(late, samples)]
            losses = self._losses + _loss_samples(backward)
            count = len(grads) + len(self._inputs) + len(losses)
            if grads and (len(self._ahead) + 1) * 8 * count <= MAX_AHEAD_BYTES:
                # The greatest magnitudes are read once they are on the host.
                sent = Maxima([sample for _, sample in grads] + [known.sample for known in self._inputs] + losses)
                self._ahead.append((sent, [i for i, _ in grads], self._inputs, self._entry(backward)))
        elif bad or not has_finite_sum([parameter.grad for parameter in piece] for piece in self._pieces):
            bad.update((i, bool(grad.isnan().any())) for i, grad in self._late_gradients() if not is_finite(grad))
            values = [abs(known.sample.item()) for known in self._inputs]
            roots = samples_of([root.detach() for root in backward.roots if is_plain(root)])
            losses = [float(abs(sample.item())) for sample in roots]
            loss = next((value for value in losses if not math.isfinite(value)), 0.0)
            self._judge(bad, list(zip(self._inputs, values)), loss, self._entry(backward))
        else:
            self.findings.saw_finite(self._reduces)

    def _late_gradients(self) -> List[Tuple[int, Any]]:
        found = [(i, self._parameters[i].grad) for i in self._late]
        return [(i, grad) for i, grad in found if grad is not None]

    def _entry(self, backward: Backward) -> Dict[str, Any]:
        known = self.replica()
        step, model, group = (0, 0, "") if known is None else (known.reductions + 1, known.number, known.group)
        return {
            "step": step, "model": model, "group": group, "of": len(self._names), "scaled": int(backward.scaled),
            "used": 0, "reduces": self._reduces, "frame": frames.describe_user(backward.frame),
        }  # fmt: skip

    def _judge(self, bad: Dict[int, bool], inputs: List[Tuple[_Input, float]], loss: float, entry: Any) -> None:
        """Record which gradients are not finite (``bad``: whether NaN) and where it began. ``loss`` is 0 if finite."""
        reduces = entry.pop("reduces")
        if not bad:
            self.findings.saw_finite(reduces)
            return
        found = ((known.label, known.holds(value)) for known, value in inputs)
        label, held = next((pair for pair in found if pair[1]), ("", ""))
        ruined = None if self.on_gpu else self.findings.first_ruined()
        lost = not math.isfinite(loss)
        if ruined is not None:
            origin, note = gradient_checks.PARAMETER, "%s was not finite before this backward" % ruined
        elif label and (lost or held.startswith("NaN")):
            origin, note = gradient_checks.INPUT, "%s holds %s" % (label, held)
        elif lost:
            origin, note = gradient_checks.LOSS, "the loss was %r" % loss
        else:
            origin, note = gradient_checks.GRADIENT, ""
        order = sorted(bad, reverse=True)
        entry.update(
            tensors=[self._names[i][:MAX_NAME] for i in order[:MAX_NAMES]], count=len(bad), nan=int(any(bad.values())),
            origin=origin, note=note, loss_nan=int(math.isnan(loss)),
        )  # fmt: skip
        self.findings.saw(entry, reduces)

    def catch_up(self) -> None:
        while self._ahead and not is_capturing() and self._ahead[0][0].have_come():
            maxima, indexes, inputs, entry = self._ahead.popleft()
            values = maxima.values()
            count = len(indexes)
            bad = {i: math.isnan(value) for i, value in zip(indexes, values) if not math.isfinite(value)}
            losses = values[count + len(inputs) :]
            loss = next((value for value in losses if not math.isfinite(value)), 0.0)
            self._judge(bad, list(zip(inputs, values[count:])), loss, entry)

    def end_backward(self) -> None:
        self._task = -1
        if self._arrivals is not None:
            self._arrivals.awake = False

    def end(self) -> None:
        limit = time.monotonic() + MAX_LAST_WAIT_S
        self.catch_up()
        while self._ahead and time.monotonic() < limit:
            time.sleep(LAST_LOOK_S)
            self.catch_up()
        self.findings.end()

    def before_step(self, optimizer: Any) -> None:
        """Check each backward again if a step uses gradients that were skipped, and note if it uses ruined ones."""
        if self._losses:
            self._waits_for_last = False
        self.catch_up()
        if self.findings.pending:
            self._see_use(optimizer)

    @quietly
    def _see_use(self, optimizer: Any) -> None:
        skipped = getattr(optimizer, "found_inf", None)  # set by a gradient scaler for optimizers that skip themselves
        if skipped is not None and float(skipped):
            return
        own = {id(parameter) for parameter in self._parameters}
        held = (p.grad for group in optimizer.param_groups for p in group["params"] if id(p) in own)
        if next(not_finite(held), None) is not None:
            self.findings.was_used()


@quietly
def _loss_samples(backward: Backward) -> List[Any]:
    return samples_of([root.detach() for root in backward.roots if is_plain(root) and root.numel() == 1][:1])
