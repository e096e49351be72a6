"""Times that torch measures: phases of the step on a GPU, and when gradients are ready in backward.

CUDA events mark one step of twenty; nothing waits for them. DDP's own timers are read in the iterations in which torch
reads them anyway: 1 to 10, and every 100th (``pytorch:torch/csrc/distributed/c10d/logger.cpp``). When each gradient was
ready costs 1 to 10 microseconds, so it is read in one timed reduction of eight, on CPU: only there it is computation.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from typing import Any, Deque, Dict, Iterable, List, Optional, Tuple

from .state import guarded, here, shielded
from .step_clock import ClockStep, clock, is_capturing
from .storage import ring_layout
from .storage.fingerprint_file import packed
from .storage.ring_layout import DEVICE_PHASES

STEPS_ONE_IN = 20
MAX_MARKS = 64  # steps with more changes of phase, as with many micro-batches, are not measured
MAX_PENDING = 4  # Steps whose events have not passed yet. The host of a GPU is rarely further ahead.
MAX_KEPT_STEPS = 64  # steps and reductions that are kept, the latest
TIMED_FIRST, TIMED_EVERY = 10, 100  # the iterations in which torch reads DDP's timers
LATE = 2  # torch counts forwards and we count reductions, so ours may be this many behind. Our choice.
# Steps before the first note. Further notes follow at doublings, so that a killed job has nearly as many.
FIRST_STEPS_NOTE = 4
MAX_STEPS_BYTES = 48 * 1024  # room for the notes in the journal of 512 KiB
LAST_STEPS_BYTES = 8 * 1024  # the part of ``MAX_BYTES`` that is reserved for the last note
Mark = Tuple[int, Any, int]  # the phase that begins, its event, and the host's time


class MeasuredStep:
    """A step whose changes of phase are marked on the GPU."""

    def __init__(self) -> None:
        self.marks: List[Mark] = []
        self.behind = 0  # marks at which the GPU had not come to the mark before
        self.row: List[int] = []  # what the host knows of the step: ``ring_layout.HOST_COLUMNS``


class GpuClock:
    """The steps of this rank that are measured on its GPU."""

    def __init__(self) -> None:
        self.model: Any = None  # a weak reference to the DDP model on a GPU that reduced first
        self.device: Any = None  # Its device. The script's current device may be another one.
        self.current: Optional[MeasuredStep] = None
        self.pending: List[MeasuredStep] = []
        self.spare: List[Any] = []  # events to use again
        self.rows: Deque[List[int]] = deque(maxlen=MAX_KEPT_STEPS)
        # By iteration of DDP: microseconds of its reductions that ran after backward's computation.
        self.reduced: Dict[int, int] = {}
        self.iterations = self.measured = self.noted = self.bytes = 0

    def mark(self, phase: int) -> None:
        """Mark the beginning of a phase, if this step is measured. An event must not become part of a CUDA graph."""
        step = self.current
        if step is None:
            return
        if len(step.marks) >= MAX_MARKS or is_capturing():
            self._drop(step)
            self.current = clock.on_phase = None
            return
        if step.marks and not step.marks[-1][1].query():
            step.behind += 1
        cuda = sys.modules["torch"].cuda
        event = self.spare.pop() if self.spare else cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self.device))
        step.marks.append((phase, event, time.monotonic_ns()))

    @guarded("device steps")
    def step_ended(self, ended: ClockStep) -> None:
        step = self.current
        if step is not None:
            self.mark(ring_layout.BEFORE)
        if step is not None and self.current is step:
            times_us = (ns // 1000 for ns in (ended.data, ended.data_cpu, ended.gc))
            reductions = max(ended.reductions.values(), default=0)
            step.row = [ended.number, *times_us, ended.rows, ended.numel, reductions, ended.backwards, step.behind]
            self.pending.append(step)
        self.current = clock.on_phase = None
        self.read()
        if self.model is not None and ended.number % STEPS_ONE_IN == 0:
            if len(self.pending) >= MAX_PENDING:
                self._drop(self.pending.pop(0))
            self.current, clock.on_phase = MeasuredStep(), guarded("device steps")(self.mark)
            self.mark(ring_layout.BEFORE)

    def read(self) -> None:
        while self.pending and not is_capturing():
            if not all(event.query() for _, event, _ in reversed(self.pending[0].marks)):
                break
            step = self.pending.pop(0)
            device, host = [0.0] * len(DEVICE_PHASES), [0] * len(DEVICE_PHASES)
            for (phase, event, at_ns), (_, following, until_ns) in zip(step.marks, step.marks[1:]):
                device[phase] += event.elapsed_time(following)
                host[phase] += until_ns - at_ns
            self.rows.append([*step.row, *(int(ms * 1e3) for ms in device), *(ns // 1000 for ns in host)])
            self._drop(step)
            self.measured += 1
            if self.measured == FIRST_STEPS_NOTE or self.measured >= 2 * self.noted > 0:
                self.note(MAX_STEPS_BYTES - LAST_STEPS_BYTES)

    def _drop(self, step: MeasuredStep) -> None:
        self.spare += [event for _, event, _ in step.marks]

    @guarded("device steps")
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
            if len(self.reduced) > MAX_KEPT_STEPS:
                del self.reduced[min(self.reduced)]

    @guarded("device steps")
    def model_reduced(self, ddp: Any) -> None:
        if self.model is None:
            self.model, self.device = weakref.ref(ddp), ddp.device
        if self.model() is ddp:
            self.iterations += 1

    def note(self, space: int) -> None:
        """Write what was measured, if space is left. The last note counts."""
        columns = packed({"rows": list(self.rows), "reduced": sorted(self.reduced.items())})
        if self.bytes + len(columns) <= space and here.note("device_steps", measured=self.measured, columns=columns):
            self.noted = self.measured
            self.bytes += len(columns)

    @guarded("device steps")
    def settle(self) -> None:
        self.read()
        if self.measured > self.noted:
            self.note(MAX_STEPS_BYTES)


measured = GpuClock()
# The first reduction that is read, of each model. DDP builds its buckets anew before the second forward.
FIRST_REDUCTION = 4
GRADIENTS_ONE_IN = 8
# Readings before the first note. Further notes follow at doublings, so that a killed job has nearly as many.
FIRST_GRADIENTS_NOTE = 3
MAX_READINGS = 16  # Readings of each model that are kept, the latest. Our choice: enough for a median of each tensor.
MAX_TENSORS = 4096  # larger models have neighboring tensors folded into one, which is ready when the last of them is
MAX_MODELS = 16
MAX_GRADIENTS_BYTES = 32 * 1024  # room for the notes of all models in the journal of 512 KiB
LAST_GRADIENTS_BYTES = 16 * 1024  # the part of ``MAX_BYTES`` that is reserved for the notes at the end
_INTS = {"cap": "bucket_cap_bytes", "finds_unused": "find_unused_parameters", "view": "gradient_as_bucket_view",
         "buffers": "broadcast_buffers"}  # fmt: skip


class ModelGradients:
    """What was read of one DDP model."""

    def __init__(self, ddp: Any, number: int) -> None:
        self.number = number
        self.ring = here.ring
        self.group = str(ddp.process_group.group_name)
        self.owner = weakref.ref(ddp, shielded("gradient times", lambda _: settle_gradients(self)))
        named, ignored = ddp.module.named_parameters(), ddp.parameters_to_ignore
        sizes = [p.numel() * p.element_size() for name, p in named if p.requires_grad and name not in ignored]
        self.tensors = len(sizes)
        self.fold = -(-len(sizes) // MAX_TENSORS) or 1
        self.sizes = _folded(sizes, self.fold, sum)
        self.timed = self.read = self.noted = 0
        # The last readings: microseconds from the start of backward, by tensor; -1 if it had no gradient.
        self.readings: Deque[List[int]] = deque(maxlen=MAX_READINGS)
        self.computed_us: Deque[int] = deque(maxlen=MAX_READINGS)
        self.exposed_us: Deque[int] = deque(maxlen=MAX_READINGS)
        self.unused_bytes = 0  # the most bytes of parameters that went unused in one of the reductions that were read
        # The same parameters went unused in all steps. DDP itself compares each step with the one before.
        self.same_unused = True
        self.buckets: List[int] = []  # their sizes, in the order in which they are reduced
        self.about: Dict[str, Any] = {}


_models: Dict[int, ModelGradients] = {}  # by id of the DDP model
_count = 0
_bytes = 0
reads_all = False  # read every timed reduction: a trial has few with the settings of the script
is_paused = False  # a trial has given DDP other settings, so its times are not those of the script


@guarded("gradient times")
def gradients_reduced(ddp: Any) -> Optional[List[int]]:
    """Return when each gradient of this backward was ready, in ns from the end of forward; None if it is not read."""
    global _count
    if is_paused:
        return None
    model = _models.get(id(ddp))
    if model is None or model.ring is not here.ring:
        if _count >= MAX_MODELS:
            return None
        _count += 1
        model = _models[id(ddp)] = ModelGradients(ddp, _count)
    model.timed += 1
    model.same_unused = model.same_unused and ddp.reducer._ddp_graph_static()
    if model.timed < FIRST_REDUCTION or (model.timed % GRADIENTS_ONE_IN != FIRST_REDUCTION and not reads_all):
        return None
    ready: List[int] = ddp.reducer.get_backward_stats()
    return ready if len(ready) == model.tensors else None


@guarded("gradient times")
def gradients_settled(ddp: Any, ready_ns: List[int], reduction: Any, waited_ns: int) -> None:
    """Keep what ``gradients_reduced`` returned, once DDP's own times of that backward are known."""
    model = _models.get(id(ddp))
    if model is None:
        return
    data = reduction.logger._get_ddp_logging_data()
    started_ns = data.ints_map["backward_compute_time_start"] - reduction.wall_offset_ns
    early_ns = reduction.backward_ns - started_ns
    ready = [(ns - early_ns) // 1000 if ns > early_ns else -1 for ns in ready_ns]
    model.readings.append(_folded(ready, model.fold, max))
    model.computed_us.append((reduction.ended_ns - waited_ns - reduction.backward_ns) // 1000)
    model.exposed_us.append(waited_ns // 1000)
    model.read += 1
    model.unused_bytes = max(model.unused_bytes, data.ints_map.get("unused_parameter_size", 0))
    model.about = {key: int(data.ints_map[name]) for key, name in _INTS.items() if name in data.ints_map}
    model.about["static"] = int(data.ints_map.get("static_graph", 0))
    sizes = data.strs_map.get("rebuilt_bucket_sizes") or data.strs_map.get("bucket_sizes", "")
    model.buckets = [int(size) for size in sizes.split(",") if size.strip().isdigit()]
    if model.read == FIRST_GRADIENTS_NOTE or model.read >= 2 * model.noted > 0:
        _note_model(model, MAX_GRADIENTS_BYTES - LAST_GRADIENTS_BYTES)


@guarded("gradient times")
def settle_gradients(gone: Optional[ModelGradients] = None) -> None:
    """Note what was read of a model that is gone, or of each model, because the job ends or its groups do."""
    for key, model in list(_models.items()):
        if gone is model:
            del _models[key]
        if gone in (None, model):
            _note_model(model, MAX_GRADIENTS_BYTES)


def _folded(values: List[int], fold: int, into: Any) -> List[int]:
    return values if fold == 1 else [into(values[i : i + fold]) for i in range(0, len(values), fold)]


def _note_model(model: ModelGradients, space: int) -> None:
    """Write a note if more was read since the last one and space is left. The last note of a model counts."""
    global _bytes
    if model.ring is not here.ring or model.read <= model.noted:
        return
    ready = [_middle(times) for times in zip(*model.readings)]
    columns = packed({"sizes": model.sizes, "ready": ready, "buckets": model.buckets})
    if _bytes + len(columns) <= space and here.note(
        "gradient_times", **model.about, n=model.number, group=model.group, tensors=model.tensors,
        readings=model.read, reductions=model.timed, compute_us=_middle(model.computed_us),
        exposed_us=_middle(model.exposed_us), same_unused=int(model.same_unused), columns=columns,
        unused_bytes=model.unused_bytes,
    ):  # fmt: skip
        model.noted = model.read
        _bytes += len(columns)


def _middle(values: Iterable[int]) -> int:
    found = sorted(values)
    return found[len(found) // 2]
