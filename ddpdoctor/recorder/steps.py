"""Measures training steps: how long each phase of a step took, and how much of it was spent waiting for other ranks.

A step ends at an optimizer's step, else at the end of a backward that reduced gradients (DDP), else at the end of any
backward, else at a collective that repeats. If several of them take turns, the first one ends the step. The wait in a
reduction is read from DDP's own timers (4 microseconds a step, no hook in autograd), at the model's next forward.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from itertools import islice
from traceback import walk_tb
from typing import Any, Callable, Dict, List, Optional, Set

from . import device_times, frames, groups, hooks, surroundings
from .gradient_checks import tensors_in
from .state import guarded, here, pass_on, sealed, shielded, wall
from .step_clock import ClockStep, begin_wait, clock, end_wait, heal, in_backward
from .storage import ring_layout
from .storage.ring_layout import OPTIMIZER, is_sampled
from .wrappers import around, wraps

# Containers around forward's first tensor that are opened. Our choice: a batch is a dictionary or a list.
MAX_NESTED = 3
# A weak reference to the DDP model whose forward ran last with gradients to reduce; None after its backward.
_reducing: Any = None
# The id of the outermost optimizer that is stepping, when it began, and how long the phase had waited by then.
_optimizing: Any = (None, 0, 0)


@guarded("steps")
def optimizer_begins(optimizer: Any) -> None:
    """Note that an optimizer begins to step. A step that raised has no end, so the same optimizer begins again."""
    global _optimizing
    if _optimizing[0] in (None, id(optimizer)):
        _optimizing = (id(optimizer), time.monotonic_ns(), clock.waits[clock.phase])
        if clock.on_phase is not None:
            clock.on_phase(OPTIMIZER)


def stepped(optimizer: Any) -> None:
    global _optimizing
    known, began_ns, waited = _optimizing
    is_in_part = clock.waiting or clock.phases or clock.loading or clock.phase == ring_layout.BACKWARD
    if is_in_part and not in_backward():
        heal()  # an exception from outside has cut off the end of a wait or of a phase
    if known == id(optimizer):
        waited = clock.waits[clock.phase] - waited
        clock.step.optimizer += time.monotonic_ns() - began_ns - waited
        _optimizing = (None, 0, 0)
        if clock.on_phase is not None:
            clock.on_phase(clock.phase)
    if clock.ends_step(ring_layout.STEP_OPTIMIZER, id(optimizer)):
        end_step()


def patch_ddp(ddp: Any) -> None:
    @guarded("steps")
    def time_every_step(ddp: Any) -> None:
        """Make DDP time each step on CPU, where it is free; but with INFO its C++ would write each time to stderr."""
        if ddp.device_type == "cpu" and os.environ.get("TORCH_CPP_LOG_LEVEL", "") not in ("INFO", "0"):
            ddp._set_ddp_runtime_logging_sample_rate(1)

    def waited(began: Any) -> None:
        since, waits = began
        end_wait(since, counts=True)
        clock.step.buffers += clock.waits[clock.phase] - waits

    @guarded("steps")
    def note_input(given: Any) -> None:
        """Add the size of forward's first tensor. Ranks whose batches differ in size take different times."""
        for _ in range(MAX_NESTED):
            shape = getattr(given, "shape", None)
            if shape is not None:
                clock.step.rows += shape[0] if len(shape) else 1
                clock.step.numel += shape.numel()
                return
            values = given.values() if hasattr(given, "values") else given if isinstance(given, (list, tuple)) else ()
            given = next(iter(values), None)

    def forward_begins(ddp: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not sys.modules["torch"].is_grad_enabled() or clock.phase == ring_layout.BACKWARD or here.ring is None:
            return None
        _enter(ring_layout.FORWARD)
        note_input(args[0] if args else next(iter(kwargs.values()), None))
        return ddp

    if hooks.has(ddp, "_set_ddp_runtime_logging_sample_rate"):
        hooks.put(ddp, "__init__", around(after=time_every_step))
    hooks.put(ddp, "forward", around(before=forward_begins, last=_forward_ended))
    hooks.put(ddp, "_sync_buffers", around(before=lambda *_: (begin_wait(), clock.waits[clock.phase]), last=waited))


@guarded("steps")
def _enter(phase: int) -> int:
    return clock.enter(phase)


@guarded("steps")
def _forward_ended(ddp: Any) -> None:
    global _reducing
    clock.enter(ring_layout.BETWEEN)
    if ddp.require_backward_grad_sync:
        _reducing = weakref.ref(ddp)
        _settle(_pending.pop(id(ddp), None))
        device_times.measured.forward_ended(ddp)


def measured_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @guarded("steps")
    def ended(began_ns: int) -> None:
        global _reducing
        clock.enter(ring_layout.BEFORE)
        clock.step.backwards += 1
        model, _reducing = (_reducing, None)
        ddp = model() if model is not None else None
        if ddp is not None:
            model_reduced(ddp, began_ns, clock.since_ns)
        if clock.ends_step(ring_layout.STEP_BACKWARD if ddp is None else ring_layout.STEP_REDUCED, id(ddp)):
            end_step()

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
        ended(began)
        return result

    return wraps(original)(backward)


here.clock = clock
FIRST_STEPS = 64
# The waits of the first steps are all read, then those of one step in four, because reading DDP's times takes 80 us.
# Our choice: of the last 256 steps about 64 are known, the same ones on all ranks.
SAMPLE_BITS = 2


class Reduction:
    """The reduction at the end of a backward. It is kept until DDP's timers for it can be read."""

    def __init__(self, ddp: Any, backward_ns: int, ended_ns: int) -> None:
        self.backward_ns, self.ended_ns = backward_ns, ended_ns
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self.step = clock.step
        self.logger = ddp.logger  # holds the parameters, so it is dropped when the model is gone
        self.ready_ns = device_times.gradients_reduced(ddp)
        key = id(ddp)
        self.model = weakref.ref(ddp, shielded("steps", lambda _: _settle_without_forward(key)))


_pending: Dict[int, Reduction] = {}  # by id of the DDP model
_held: Optional[ClockStep] = None  # it has ended, but its reduction is still pending


def model_reduced(ddp: Any, backward_ns: int, ended_ns: int) -> None:
    """Note a backward that ended in DDP's reduction. Only on CPU are its times read: GPU timers make the host wait."""
    _settle(_pending.pop(id(ddp), None))
    counts = clock.step.reductions
    counts[id(ddp)] = counts.get(id(ddp), 0) + 1
    if ddp.device_type == "cuda":
        device_times.measured.model_reduced(ddp)
    clock.group = groups.name_id(here.ring, groups.known(ddp.process_group))
    is_passed_over = clock.number >= FIRST_STEPS and not is_sampled(clock.number + 1, SAMPLE_BITS)
    if is_passed_over or ddp.logger is None or ddp.device_type != "cpu":
        clock.unknown = True
    else:
        _pending[id(ddp)] = Reduction(ddp, backward_ns, ended_ns)


def end_step() -> None:
    """End the step, and write it as soon as all of its waits are known."""
    global _held
    _write_held()
    _held = clock.take()
    device_times.measured.step_ended(_held)
    if clock.number == surroundings.NOTED_AT_STEP:
        surroundings.note_surroundings()
    surroundings.step_ended(clock.number)
    if not _is_awaited(_held):
        _write_held()


@guarded("steps")
def settle_all() -> None:
    """Read the times of all pending reductions, because no forward follows in which DDP would make them readable."""
    for key in list(_pending):
        _settle_without_forward(key)
    _write_held()
    device_times.settle_gradients()
    surroundings.note_line()
    device_times.measured.settle()


@guarded("steps")
def _settle_without_forward(key: int) -> None:
    reduction = _pending.pop(key, None)
    if reduction is not None:
        reduction.logger.set_runtime_stats_and_log()
        _settle(reduction)


def _settle(reduction: Optional[Reduction]) -> None:
    if reduction is None:
        return
    # Under DETAIL a bucket waits for other ranks when it is launched, that is, before the last gradient is computed.
    detailed = groups.c10d.get_debug_level() == groups.c10d.DebugLevel.DETAIL
    times = reduction.logger._get_ddp_logging_data().ints_map
    arrived = times.get("backward_comm_time_start" if detailed else "backward_compute_time_end", 0)
    arrived_ns = arrived - reduction.wall_offset_ns
    if reduction.backward_ns <= arrived_ns <= reduction.ended_ns:  # else DDP did not time that backward
        waited = int(reduction.ended_ns - arrived_ns)
        reduction.step.waits[ring_layout.BACKWARD] += waited
        reduction.step.exposed += waited
        ddp = reduction.model()
        if reduction.ready_ns is not None and ddp is not None:
            device_times.gradients_settled(ddp, reduction.ready_ns, reduction, waited)
    elif reduction.step is _held:
        reduction.step.flags |= ring_layout.STEP_WAIT_UNKNOWN
    elif reduction.step is clock.step:
        clock.unknown = True
    if _held is not None and not _is_awaited(_held):
        _write_held()


def _is_awaited(ended: ClockStep) -> bool:
    return any(reduction.step is ended for reduction in _pending.values())


def _write_held() -> None:
    global _held
    ended, _held = _held, None
    if ended is not None:
        if _is_awaited(ended):
            ended.flags |= ring_layout.STEP_WAIT_UNKNOWN
        ended.write()


here.on_end.append(settle_all)
MAX_NAMES = 8
MAX_NAME = 120
# Nodes of autograd's graph that are searched for a variable. Our choice: noting an error must not take seconds.
MAX_NODES = 4096
MAX_VARIABLES = 64
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_TWICE = "Expected to mark a variable ready only once"
_STATIC = "not compatible with static_graph set to True"
_NUMBERS = "Parameter indices which did not receive grad for rank "
_AT_NUMBER = "Parameter at index "
# By model: the names of its parameters, in the order of the reducer's numbers.
_names: weakref.WeakKeyDictionary[Any, List[str]] = weakref.WeakKeyDictionary()
_to_reduce: Any = None  # a weak reference to the model whose forward ran last with a reduction to follow


def keep_names(ddp: Any) -> None:
    """Keep the names of the parameters that the model reduces. Some may be frozen or replaced later."""
    named = ddp.module.named_parameters()
    _names[ddp] = [name for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore]


def will_reduce(ddp: Any) -> None:
    global _to_reduce
    if _to_reduce is None or _to_reduce() is not ddp:
        _to_reduce = weakref.ref(ddp)


def model_to_reduce() -> Any:
    return _to_reduce() if _to_reduce is not None else None


def complaint(error: BaseException, text: str) -> Optional[Dict[str, Any]]:
    """Return what an error of the reducer is about, or None for any other error."""
    if not text.startswith((_UNFINISHED, _TWICE)):
        return None
    what = "twice" if text.startswith(_TWICE) else "static" if _STATIC in text else "unfinished"
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    models = [owner for owner in owners if "reducer" in getattr(owner, "__dict__", ())]
    ddp: Any = models[-1] if models else model_to_reduce()  # the innermost model in whose code it was raised
    names = _numbered(ddp, text)
    entry = _about_parameters(names, ddp, what)
    if names and what != "twice":
        wanted = set(names)
        ids = {id(parameter) for name, parameter in ddp.module.named_parameters() if name in wanted}
        entry["outputs"] = _variables_of(error.__traceback__, ids)
    return entry


def unfinished(ddp: Any) -> Optional[Dict[str, Any]]:
    """Return which gradients the reducer still waits for after a backward, or None if it waits for none."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        pass_on(error)
        text = str(error)
        return _about_parameters(_numbered(ddp, text), ddp, "unfinished") if text.startswith(_UNFINISHED) else None
    return None


def _about_parameters(names: List[str], ddp: Any, what: str) -> Dict[str, Any]:
    of = len(_names.get(ddp, ())) if ddp is not None else 0
    return {"what": what, "names": [name[:MAX_NAME] for name in names[:MAX_NAMES]], "count": len(names), "of": of}


def _numbered(ddp: Any, text: str) -> List[str]:
    known = _names.get(ddp, []) if ddp is not None else []
    several, single = text.partition(_NUMBERS)[2].partition(":")[2], text.partition(_AT_NUMBER)[2]
    listed = several.partition("\n")[0] if _NUMBERS in text else single.partition(" ")[0]
    numbers = sorted(int(word) for word in listed.split() if word.isdigit())
    return [known[number] for number in numbers if number < len(known)]


def _variables_of(traceback: Any, wanted: Set[int]) -> List[str]:
    """Return the script's first variable that was computed from ``wanted`` parameters. The loss did not use it."""
    own = (frame for frame, _ in walk_tb(traceback) if frames.is_user_file(frame.f_code.co_filename))
    variables = (variable for frame in own for variable in list(frame.f_locals.items()))
    labeled = (found for name, value in variables for found in tensors_in(value, name))
    for label, tensor in islice(labeled, MAX_VARIABLES if wanted else 0):
        if tensor.grad_fn is not None and _comes_from(tensor.grad_fn, wanted):
            return [label[:MAX_NAME]]
    return []


def _comes_from(node: Any, wanted: Set[int]) -> bool:
    seen, waiting = {node}, [node]
    while waiting and len(seen) < MAX_NODES:
        for earlier, _ in waiting.pop().next_functions:
            if earlier is None or earlier in seen:
                continue
            if id(getattr(earlier, "variable", None)) in wanted:
                return True
            seen.add(earlier)
            waiting.append(earlier)
    return False
