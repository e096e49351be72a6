"""Reads from DDP's own timers how long a rank waits in each reduction, and writes the steps they belong to.

DDP's times of a backward can be read at the model's next forward. Until then the reduction is pending, and so is its
step, even if the step has ended.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Dict, Optional

from ..calls import groups
from ..speed import device_steps, garbage, gradient_times, surroundings
from ..state import guarded, here, shielded
from ..storage import ring_layout
from ..storage.kept_steps import is_sampled
from .step_clock import EndedStep, clock

FIRST_STEPS = 64
SAMPLE_BITS = 2
"""The waits of the first steps are all read, then those of one step in four, because reading DDP's times takes 80 us.
Our choice: of the last 256 steps about 64 are known, the same ones on all ranks."""


class Reduction:
    """The reduction at the end of a backward. It is kept until DDP's timers for it can be read."""

    def __init__(self, ddp: Any, backward_ns: int, ended_ns: int) -> None:
        self.backward_ns = backward_ns
        self.ended_ns = ended_ns
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self.waits = clock.waits
        """The waits of the step that it belongs to."""
        self.inside = clock.inside
        self.logger = ddp.logger  # holds the parameters, so it is dropped when the model is gone
        self.ready_ns = gradient_times.reduced(ddp)
        key = id(ddp)
        self.model = weakref.ref(ddp, shielded("steps", lambda _: _settle_without_forward(key)))


_pending: Dict[int, Reduction] = {}
"""By id of the DDP model."""
_held: Optional[EndedStep] = None
"""A step that has ended but whose reduction is still pending."""


def began_anew(ddp: Any) -> None:
    """Note a forward of DDP: the times of its last reduction can be read now."""
    reduction = _pending.pop(id(ddp), None)
    if reduction is not None:
        _settle(reduction)


def reduced(ddp: Any, backward_ns: int, ended_ns: int) -> None:
    """Note a backward that ended in DDP's reduction. Only on CPU are its times read: GPU timers make the host wait."""
    began_anew(ddp)
    counts = clock.inside.reductions
    counts[id(ddp)] = counts.get(id(ddp), 0) + 1
    if ddp.device_type == "cuda":
        device_steps.model_reduced(ddp)
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
    device_steps.step_ended(_held)
    if clock.number == surroundings.NOTED_AT_STEP:
        surroundings.note()
    garbage.step_ended(clock.number)
    if not _is_awaited(_held):
        _write_held()


@guarded("steps")
def settle_all() -> None:
    """Read the times of all pending reductions, because no forward follows in which DDP would make them readable."""
    for key in list(_pending):
        _settle_without_forward(key)
    _write_held()
    gradient_times.settle_all()
    garbage.note_line()
    device_steps.settle_all()


@guarded("steps")
def _settle_without_forward(key: int) -> None:
    reduction = _pending.pop(key, None)
    if reduction is not None:
        reduction.logger.set_runtime_stats_and_log()
        _settle(reduction)


def _settle(reduction: Reduction) -> None:
    """Add the wait in a reduction to its step."""
    waited = _waited_ns(reduction)
    if waited is not None:
        reduction.waits[ring_layout.BACKWARD] += waited
        reduction.inside.exposed += waited
        ddp = reduction.model()
        if reduction.ready_ns is not None and ddp is not None:
            gradient_times.settled(ddp, reduction.ready_ns, reduction, waited)
    elif _held is not None and reduction.waits is _held.waits:
        _held.flags |= ring_layout.STEP_WAIT_UNKNOWN
    elif reduction.waits is clock.waits:
        clock.unknown = True
    if _held is not None and not _is_awaited(_held):
        _write_held()


def _waited_ns(reduction: Reduction) -> Optional[int]:
    """Return how long the rank waited for others, or None if DDP did not time that backward.

    Under DETAIL a bucket waits for other ranks when it is launched, that is, before the last gradient is computed.
    """
    detailed = groups.c10d.get_debug_level() == groups.c10d.DebugLevel.DETAIL
    times = reduction.logger._get_ddp_logging_data().ints_map
    arrived = times.get("backward_comm_time_start" if detailed else "backward_compute_time_end", 0)
    arrived_ns = arrived - reduction.wall_offset_ns
    if reduction.backward_ns <= arrived_ns <= reduction.ended_ns:
        return int(reduction.ended_ns - arrived_ns)
    return None


def _is_awaited(ended: EndedStep) -> bool:
    return any(reduction.waits is ended.waits for reduction in _pending.values())


def _write_held() -> None:
    global _held
    ended, _held = _held, None
    if ended is not None:
        if _is_awaited(ended):
            ended.flags |= ring_layout.STEP_WAIT_UNKNOWN
        ended.write()


here.on_end.append(settle_all)
