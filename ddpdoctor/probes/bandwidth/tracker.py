"""Tracks this rank's progress: its main thread writes around every call, its watcher reads when nothing moves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

START_ALLOWANCE_S = 60.0
"""Our choice: time before the process group exists, for importing torch and reading the machine. Both have their own
time limits. On a cold network file system the import alone takes half a minute."""


@dataclass(slots=True)
class Tracker:
    """Only the main thread writes, never inside a timed region. Writing a field is atomic, so there is no lock."""

    phase: str = "start"
    what: str = ""
    group: tuple[int, ...] = ()
    op: str = ""
    calls: int = 0
    """Calls begun in ``group`` since the bench began. Ranks with the same number are in the same call."""
    inside: bool = False
    moved_s: float = field(default_factory=time.monotonic)
    """time.monotonic() when a call last completed or ``at`` was last called."""
    allowance_s: float = START_ALLOWANCE_S
    """Added to the hang timeout: how long the next call is expected to take."""
    _calls: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, phase: str, what: str = "", *, allowance_s: float = 0.0) -> None:
        """Record the next phase, and how long one call, batch or computation of it may take."""
        self.phase, self.what, self.allowance_s = phase, what, allowance_s
        self.moved_s = time.monotonic()

    def enter(self, op: str, group: tuple[int, ...]) -> None:
        """Record that a collective call, or a batch of one kind, is about to begin in the group of these ranks."""
        self.inside = False
        self.op, self.group = op, group
        self.calls = self._calls[group] = self._calls.get(group, 0) + 1
        self.inside = True

    def leave(self) -> None:
        """Record that the call completed here. Skip this for a call that raised: the watcher needs to know that."""
        self.inside = False
        self.moved_s = time.monotonic()
