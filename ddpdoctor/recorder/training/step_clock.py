"""Tracks where the main thread is in its training step, and how long each phase has taken so far."""

from __future__ import annotations

import sys
import time
from typing import Any, List, Set

from ..state import here
from ..storage import ring_layout

MOST_US = 2**32 - 1
MOST_NS = 1000 * MOST_US


class StepClock:
    """The main thread's phase in its step, and the time spent in each phase so far, in nanoseconds."""

    def __init__(self) -> None:
        self.phase = ring_layout.BEFORE
        self.since_ns = 0
        self.waiting = False
        self.phases = 0
        """How many nested phases it is in that may need other ranks (``init_process_group``, ``backward``)."""
        self.spent: List[int] = [0, 0, 0, 0]
        self.waits: List[int] = [0, 0, 0, 0]
        self.level = -1
        self.closer: Any = None
        self.seen: Set[Any] = set()
        self.number = 0
        self.group = 0
        """The interned name of the group in which DDP reduced last."""
        self.unknown = False
        """Whether a wait of this step could not be measured."""

    def enter(self, phase: int) -> int:
        """Move on to a phase; return the time."""
        now = time.monotonic_ns()
        if self.since_ns:
            self.spent[self.phase] += now - self.since_ns
        self.since_ns = now
        self.phase = phase
        return now

    def ends_step(self, level: int, key: Any) -> bool:
        """Return whether an event ends a step. ``level`` says how well its kind marks steps; ``key`` identifies it."""
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

    def take(self, now_ns: int = 0) -> EndedStep:
        """End the step at ``now_ns``, or now, return it, and begin the next one."""
        now = now_ns or time.monotonic_ns()
        if self.since_ns:
            self.spent[self.phase] += now - self.since_ns
        self.since_ns = now
        self.number += 1
        flags = self.level | (ring_layout.STEP_WAIT_UNKNOWN if self.unknown or unseen_waits() else 0)
        ended = EndedStep(self.number, now, self.group, flags, self.spent, self.waits)
        self.spent, self.waits, self.unknown = [0, 0, 0, 0], [0, 0, 0, 0], False
        return ended


class EndedStep:
    """A step that has ended but may not be written yet."""

    __slots__ = ("ended_ns", "flags", "group", "number", "spent", "waits")

    def __init__(self, number: int, ended_ns: int, group: int, flags: int, spent: List[int], waits: List[int]) -> None:
        self.number = number
        self.ended_ns = ended_ns
        self.group = group
        self.flags = flags
        self.spent = spent
        self.waits = waits

    def write(self) -> None:
        """Write the step to the ring."""
        if here.ring is not None:
            here.ring.step(self.number, self.ended_ns, self.group, self.flags, _us(self.spent), _us(self.waits))


def unseen_waits() -> bool:
    """Return whether waits cannot be measured: on a GPU a collective returns before it has begun."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and getattr(cuda, "_initialized", True) and bool(cuda.is_initialized())


def _us(durations: List[int]) -> List[int]:
    before, forward, between, backward = durations
    if before < MOST_NS > forward and between < MOST_NS > backward:  # far cheaper than checking each one
        return [before // 1000, forward // 1000, between // 1000, backward // 1000]
    return [min(ns // 1000, MOST_US) for ns in durations]


clock = StepClock()


def ended_collective(site: int, now_ns: int) -> None:
    """Note that a collective of the main thread has ended. It ends a step if nothing better marks steps.

    ``site`` is the number of its line.
    """
    if clock.level <= ring_layout.STEP_COLLECTIVE and clock.ends_step(ring_layout.STEP_COLLECTIVE, site):
        clock.take(now_ns).write()
