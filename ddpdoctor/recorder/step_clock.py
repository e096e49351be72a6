"""Tracks where the main thread is in its training step, how long each phase took, and whether it may wait for ranks.

It also knows whether a CUDA graph is being captured. Querying an event or a work, or reading a value, breaks a capture
by the same thread, and in torch's usual mode by any thread of the process: the recorder asks here before it does.
"""

from __future__ import annotations

import _thread
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from . import hooks
from .state import guarded, here, sealed, wall
from .storage import ring_layout
from .wrappers import around

MOST_US = 2**32 - 1
_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns
_cpu_ns = time.thread_time_ns


class ClockStep:
    """A step: the time in its phases, the waits in them, and ``ring_layout.STEP_INSIDE``, in nanoseconds."""

    __slots__ = (
        "backwards", "buffers", "cpu", "data", "data_cpu", "ended_ns", "exposed", "flags", "gc", "group", "number",
        "numel", "optimizer", "own", "reductions", "rows", "spent", "waits",
    )  # fmt: skip

    def __init__(self) -> None:
        self.spent: List[int] = [0, 0, 0, 0]
        self.waits: List[int] = [0, 0, 0, 0]
        self.data = self.data_cpu = self.buffers = self.exposed = self.optimizer = self.own = self.gc = 0
        self.cpu: List[int] = [0, 0, 0, 0]
        self.reductions: Dict[int, int] = {}  # by DDP model: how often its gradients were reduced
        self.backwards = self.rows = self.numel = 0
        self.number = self.ended_ns = self.group = self.flags = 0  # set when it has ended

    def write(self) -> None:
        if here.ring is None:
            return
        times = (
            self.data, self.buffers, self.exposed, self.optimizer, self.own, self.gc, *self.cpu, self.data_cpu,
        )  # fmt: skip
        counts = (max(self.reductions.values(), default=0), self.backwards, self.rows, self.numel)
        inside = [*_us(times), *(min(count, MOST_US) for count in counts)]
        here.ring.step(self.number, self.ended_ns, self.group, self.flags, _us(self.spent), _us(self.waits), inside)


class StepClock:
    """The main thread's phase in its step, and the time spent in each phase so far, in nanoseconds."""

    def __init__(self) -> None:
        self.step = ClockStep()
        self.spent, self.waits = self.step.spent, self.step.waits
        self.cpu_since_ns = self.since_ns = self.number = 0
        self.loading = self.waiting = False
        self.workers: Optional[int] = None  # of the loader that training takes batches from
        self.phase = ring_layout.BEFORE
        # Called when a phase begins, in steps that are measured on a GPU too.
        self.on_phase: Optional[Callable[[int], None]] = None
        # How many nested phases it is in that may need other ranks (``init_process_group``, ``backward``).
        self.phases = 0
        self.level = -1
        self.closer: Any = None
        self.seen: Set[Any] = set()
        self.group = 0  # the interned name of the group in which DDP reduced last
        self.unknown = False  # whether a wait of this step could not be measured
        # Returns how long Python's garbage collector took in the main thread since the last call.
        self.collected: Callable[[], int] = int

    def enter(self, phase: int) -> int:
        now = _now_ns()
        self._charge(now)
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)
        return now

    def _charge(self, now_ns: int) -> None:
        """Add the time since the last change to the current phase. Only the main thread's processor time counts."""
        if _get_ident() == here.main_thread:
            cpu = _cpu_ns()
            if self.cpu_since_ns:
                self.step.cpu[self.phase] += cpu - self.cpu_since_ns
            self.cpu_since_ns = cpu
        if self.since_ns:
            self.spent[self.phase] += now_ns - self.since_ns
        self.since_ns = now_ns

    def leave_out(self, began_ns: int) -> None:
        """Count the time since ``began_ns`` as the recorder's own instead of the current phase's."""
        took = _now_ns() - began_ns
        self.step.own += took
        self.spent[self.phase] -= took

    @guarded("data loading")
    def begin_data(self) -> Optional[Tuple[int, int, int]]:
        """Begin to take a batch from a loader; return what ``end_data`` needs, or None inside another loader."""
        if self.loading or _get_ident() != here.main_thread:
            return None
        began = _now_ns(), _cpu_ns(), self.waits[self.phase]
        self.loading = True  # last, so that whoever an exception from outside leaves without times has none to end
        return began

    @guarded("data loading")
    def end_data(self, began: Optional[Tuple[int, int, int]]) -> None:
        if began is None:
            return
        self.loading = False
        began_ns, cpu_ns, waited = began
        if self.phase == ring_layout.BEFORE:
            self.step.data += _now_ns() - began_ns - (self.waits[self.phase] - waited)
            self.step.data_cpu += _cpu_ns() - cpu_ns

    def ends_step(self, level: int, key: Any) -> bool:
        """Return whether an event ends a step. ``level`` is how well its kind marks steps; ``key`` identifies it."""
        if level < self.level:
            return False
        if level > self.level:
            self.level, self.number = level, 0
        elif key != self.closer and key not in self.seen:
            self.seen.add(key)
            return False
        self.closer = key
        self.seen.clear()
        return True

    def take(self, now_ns: int = 0) -> ClockStep:
        self._charge(now_ns or _now_ns())
        self.number += 1
        ended, following = self.step, ClockStep()
        ended.gc += self.collected()
        # On a GPU a collective returns before it has begun.
        cuda = sys.modules.get("torch.cuda")
        on_gpu = cuda is not None and getattr(cuda, "_initialized", True) and bool(cuda.is_initialized())
        ended.flags = self.level | (ring_layout.STEP_WAIT_UNKNOWN if self.unknown or on_gpu else 0)
        ended.number, ended.ended_ns, ended.group = self.number, self.since_ns, self.group
        self.step, self.spent, self.waits, self.unknown = following, following.spent, following.waits, False
        return ended


def _us(durations: Iterable[int]) -> List[int]:
    return [min(max(0, ns // 1000), MOST_US) for ns in durations]


clock = StepClock()


def begin_wait() -> int:
    """Begin to wait; return the time, or 0 if not in the main thread or already waiting. Does not raise our errors."""
    began = 0
    try:
        if clock.waiting or _get_ident() != here.main_thread:
            return 0
        began = _now_ns()
        clock.waiting = True
        if not clock.phases and here.ring is not None:
            here.ring.waits(began)
    except BaseException as error:
        if began:
            clock.waiting = False
        sealed[wall.gi_running][_clear,]
        if not sealed[wall.gi_running]["wait begins", error]:
            raise
        return 0
    return began


def end_wait(began_ns: int, counts: bool, ended_ns: int = 0) -> None:
    """End a wait. A wait for a single peer does not count: not all ranks take part."""
    if not began_ns:
        return
    clock.waiting = False
    try:
        if counts:
            clock.waits[clock.phase] += (ended_ns or _now_ns()) - began_ns
        if not clock.phases and here.ring is not None:
            here.ring.waits(0)
    except BaseException as error:
        sealed[wall.gi_running][_clear,]
        if not sealed[wall.gi_running]["wait ends", error]:
            raise


def enter_phase() -> bool:
    if _get_ident() != here.main_thread:
        return False
    if not clock.phases:
        _write_wait(_now_ns())
    clock.phases += 1
    return True


def leave_phase() -> None:
    clock.phases -= 1
    if not clock.phases:
        _write_wait(0)


def heal() -> None:
    """Forget waits and phases whose end an exception from outside has cut off. Call it where there are none."""
    clock.waiting, clock.phases, clock.loading = False, 0, False
    if clock.phase == ring_layout.BACKWARD:
        clock.enter(ring_layout.BEFORE)
    _write_wait(0)


def _write_wait(since_ns: int) -> None:
    """Write for the watcher since when the main thread may wait in a phase, unless it is in a call that waits."""
    try:
        if not clock.waiting and here.ring is not None:
            here.ring.waits(since_ns)
    except BaseException as error:
        sealed[wall.gi_running][_clear,]
        if not sealed[wall.gi_running]["wait", error]:
            raise


def _clear() -> None:
    if not clock.waiting and not clock.phases and here.ring is not None:
        here.ring.waits(0)


def in_backward() -> bool:
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)


# The methods that end a capture. In torch 2.15 the first is a part of the second.
_ENDS = ("capture_end_pre", "capture_end", "reset")
_captured: Set[int] = set()  # ids of the graphs that are being captured, by any thread


def is_capturing() -> bool:
    """Return whether any thread of this process is capturing a CUDA graph."""
    if _captured:
        return True
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not getattr(cuda, "_initialized", False) or not cuda.is_initialized():
        return False
    return bool(cuda.is_current_stream_capturing())


def patch_graphs(module: Any) -> None:
    """Patch torch.cuda.graphs.CUDAGraph to follow captures, because no thread can ask whether another one captures."""
    graph = hooks.part(module, "CUDAGraph")

    def ended(graph: Any) -> None:
        _captured.discard(id(graph))

    hooks.put(graph, "capture_begin", around(lambda graph, *_, **also: _captured.add(id(graph)), failed=ended))
    for name in _ENDS:
        hooks.put(graph, name, around(after=ended, failed=ended), is_api=name != "capture_end")
