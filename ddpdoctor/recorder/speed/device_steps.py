"""Measures phases of the step on a GPU: CUDA events in one step of twenty.

The host of a GPU runs ahead, so its own times say when work was queued, and not when it was done. An event is a mark
in the GPU's queue, and the GPU notes the time when it comes to it. Nothing waits for it here: the marks of a step are
read once all of them have passed. How long a reduction took is read from DDP's own timers, in the iterations in which
torch reads them anyway: 1 to 10, and every 100th (``pytorch:torch/csrc/distributed/c10d/logger.cpp``).
"""

from __future__ import annotations

import base64
import json
import sys
import time
import weakref
import zlib
from typing import Any, Dict, List, Optional, Tuple

from ..capture import is_capturing
from ..state import guarded, here
from ..storage import ring_layout
from ..storage.device_columns import PHASES
from ..training.step_clock import EndedStep, clock

ONE_IN = 20
MAX_MARKS = 64
"""Steps with more changes of phase, as with many micro-batches, are not measured."""
MAX_PENDING = 4
"""Steps whose events have not passed yet. The host of a GPU is rarely further ahead."""
MAX_KEPT = 64
"""Steps and reductions that are kept, the latest."""
TIMED_FIRST, TIMED_EVERY = 10, 100
"""The iterations in which torch reads DDP's timers."""
LATE = 2
"""torch counts forwards and we count reductions, so ours may be this many behind. Our choice."""
FIRST_NOTE = 4
"""Steps before the first note. Further notes follow at doublings, so that a killed job has nearly as many."""
MAX_BYTES = 48 * 1024
"""Room for the notes in the journal of 512 KiB."""
LAST_BYTES = 8 * 1024
"""The part of ``MAX_BYTES`` that is reserved for the last note."""
Mark = Tuple[int, Any, int]
"""The phase that begins, its event, and the host's time."""


class MeasuredStep:
    """A step whose changes of phase are marked on the GPU."""

    def __init__(self) -> None:
        self.marks: List[Mark] = []
        self.behind = 0
        """Marks at which the GPU had not come to the mark before."""
        self.row: List[int] = []
        """What the host knows of the step: ``device_columns.HOST``."""

    def is_done(self) -> bool:
        """Return whether the GPU has passed all marks."""
        return all(event.query() for _, event, _ in reversed(self.marks))

    def times_us(self) -> List[int]:
        """Return the time of each phase on the GPU, then on the host. It asks for no event that has not passed."""
        device, host = [0.0] * len(PHASES), [0] * len(PHASES)
        for (phase, event, at_ns), (_, following, until_ns) in zip(self.marks, self.marks[1:]):
            device[phase] += event.elapsed_time(following)
            host[phase] += until_ns - at_ns
        return [*(int(ms * 1e3) for ms in device), *(ns // 1000 for ns in host)]


class GpuClock:
    """The steps of this rank that are measured on its GPU."""

    def __init__(self) -> None:
        self.model: Any = None
        """A weak reference to the DDP model on a GPU that reduced first."""
        self.device: Any = None
        """Its device. The script's current device may be another one."""
        self.current: Optional[MeasuredStep] = None
        self.pending: List[MeasuredStep] = []
        self.spare: List[Any] = []
        """Events to use again."""
        self.rows: List[List[int]] = []
        self.reduced: Dict[int, int] = {}
        """By iteration of DDP: microseconds of its reductions that ran after backward's computation."""
        self.iterations = self.measured = self.noted = self.bytes = 0

    def mark(self, phase: int) -> None:
        """Mark the beginning of a phase, if this step is measured. An event must not become part of a CUDA graph."""
        step = self.current
        if step is None:
            return
        if len(step.marks) >= MAX_MARKS or is_capturing():
            self._drop(step)
            self._stop()
            return
        if step.marks and not step.marks[-1][1].query():
            step.behind += 1
        cuda = sys.modules["torch"].cuda
        event = self.spare.pop() if self.spare else cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self.device))
        step.marks.append((phase, event, time.monotonic_ns()))

    def _stop(self) -> None:
        self.current, clock.on_phase = None, None

    def step_ended(self, ended: EndedStep) -> None:
        """End the measured step, read those that are done, and begin the next one if it is one of twenty."""
        step = self.current
        if step is not None:
            self.mark(ring_layout.BEFORE)
        if step is not None and self.current is step:
            inside = ended.inside
            times_us = (ns // 1000 for ns in (inside.data, inside.data_cpu, inside.gc))
            reductions = max(inside.reductions.values(), default=0)
            step.row = [ended.number, *times_us, inside.rows, inside.numel, reductions, inside.backwards, step.behind]
            self.pending.append(step)
        self._stop()
        self.read()
        if self.model is not None and ended.number % ONE_IN == 0:
            if len(self.pending) >= MAX_PENDING:
                self._drop(self.pending.pop(0))
            self.current, clock.on_phase = MeasuredStep(), phase_begins
            self.mark(ring_layout.BEFORE)

    def read(self) -> None:
        """Read the steps whose marks the GPU has passed."""
        while self.pending and not is_capturing() and self.pending[0].is_done():
            step = self.pending.pop(0)
            self.rows.append([*step.row, *step.times_us()])
            del self.rows[:-MAX_KEPT]
            self._drop(step)
            self.measured += 1
            if self.measured == FIRST_NOTE or self.measured >= 2 * self.noted > 0:
                self.note(MAX_BYTES - LAST_BYTES)

    def _drop(self, step: MeasuredStep) -> None:
        self.spare += [event for _, event, _ in step.marks]

    def forward_ended(self, ddp: Any) -> None:
        """Read DDP's timers, where torch itself has read them at the beginning of this forward."""
        due = self.iterations <= TIMED_FIRST or self.iterations % TIMED_EVERY <= LATE
        if not due or self.model is None or self.model() is not ddp:
            return
        known = ddp.logger._get_ddp_logging_data().ints_map
        iteration, whole = known.get("iteration", 0), known.get("backward_comm_time", 0)
        hidden = known.get("backward_compute_comm_overlap_time", 0)
        if iteration > 0 and whole > 0 and iteration not in self.reduced:
            self.reduced[iteration] = max(0, whole - hidden) // 1000
            if len(self.reduced) > MAX_KEPT:
                del self.reduced[min(self.reduced)]

    def model_reduced(self, ddp: Any) -> None:
        """Note a backward of a model on a GPU that ended in a reduction."""
        if self.model is None:
            self.model, self.device = weakref.ref(ddp), ddp.device
        if self.model() is ddp:
            self.iterations += 1

    def note(self, space: int) -> None:
        """Write what was measured, if there is space for it. The last note counts."""
        columns = {"rows": self.rows, "reduced": sorted(self.reduced.items())}
        text = json.dumps(columns, separators=(",", ":")).encode()
        packed = base64.b64encode(zlib.compress(text, 6)).decode("ascii")
        if here.ring is None or self.bytes + len(packed) > space:
            return
        entry = {"k": "device_steps", "measured": self.measured, "columns": packed, "at": time.monotonic_ns()}
        if here.ring.note(entry):
            self.noted = self.measured
            self.bytes += len(packed)


measured = GpuClock()


@guarded("device steps")
def phase_begins(phase: int) -> None:
    """Note that the main thread begins a phase of its step."""
    measured.mark(phase)


@guarded("device steps")
def step_ended(ended: EndedStep) -> None:
    """Note that a step has ended."""
    measured.step_ended(ended)


@guarded("device steps")
def forward_ended(ddp: Any) -> None:
    """Note that a forward of DDP with gradients to reduce has ended."""
    measured.forward_ended(ddp)


@guarded("device steps")
def model_reduced(ddp: Any) -> None:
    """Note a reduction on a GPU."""
    measured.model_reduced(ddp)


@guarded("device steps")
def settle_all() -> None:
    """Note what has passed by now. It does not wait for the rest."""
    measured.read()
    if measured.measured > measured.noted:
        measured.note(MAX_BYTES)
