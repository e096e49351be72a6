"""How far this rank has come: written by its main thread around every call, read by its watcher when nothing moves."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Tracker:
    """The main thread alone writes, and never inside a timed region. Each field is written whole, so no lock."""

    phase: str = "start"
    what: str = ""
    group: tuple[int, ...] = ()
    op: str = ""
    calls: int = 0
    inside: bool = False
    moved_s: float = 0.0
    """time.monotonic() when a call last completed, or a phase began."""

    def at(self, phase: str, what: str = "") -> None:
        """Say what comes next."""
        self.phase, self.what, self.moved_s = phase, what, time.monotonic()

    def enter(self, op: str, group: tuple[int, ...]) -> None:
        """Say that a collective call, or a batch of one kind, is about to begin in the group of these ranks."""
        if group != self.group:
            self.group, self.calls = group, 0
        self.op = op
        self.calls += 1
        self.inside = True

    def leave(self) -> None:
        """Say that it has completed here."""
        self.inside = False
        self.moved_s = time.monotonic()
