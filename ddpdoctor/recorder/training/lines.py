"""Counts at which of the user's lines the main thread is sampled, outside calls that need other ranks."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from .. import frames
from ..state import here
from ..storage import ring_layout
from .step_clock import clock


class LineTable:
    """Counts the samples of each line in each phase of the step. When the table is full, the rarest line is dropped."""

    def __init__(self) -> None:
        self.entries: Dict[Any, List[int]] = {}
        """By line and phase: the entry in the ring's table, and the count."""
        self.ring: Any = None

    def count(self, ring: Any, line: Tuple[str, int, str]) -> None:
        """Count one sample of a line (file, number, function). A rank counts only after its first step has ended."""
        phase = clock.phase
        if here.role == ring_layout.ROLE_RANK and (clock.waiting or not clock.number):
            return
        if ring is not self.ring:  # a forked child has its parent's table
            self.ring, self.entries = ring, {}
        entry = self.entries.get((line, phase))
        if entry is None:
            entry = self.entries[line, phase] = self._new_entry(ring.line_capacity)
        site = ring.known_site(line)
        if site is None:
            site = ring.intern_site(line, frames.describe(*line))
        entry[1] += 1
        ring.line(entry[0], site, phase, entry[1])

    def _new_entry(self, capacity: int) -> List[int]:
        if len(self.entries) < capacity:
            return [len(self.entries), 0]
        rarest = min(self.entries, key=lambda key: self.entries[key][1])
        return [self.entries.pop(rarest)[0], 0]
