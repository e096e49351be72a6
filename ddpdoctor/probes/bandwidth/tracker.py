"""How far this rank has come: written by its main thread around every call, read by its watcher when nothing moves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

START_ALLOWANCE_S = 60.0
"""Ours: until the process group is made, torch is imported and the machine is read, which have time limits of their
own; a cold network file system makes the import alone take half a minute."""


@dataclass(slots=True)
class Tracker:
    """The main thread alone writes, and never inside a timed region. Each field is written whole, so no lock."""

    phase: str = "start"
    what: str = ""
    group: tuple[int, ...] = ()
    op: str = ""
    calls: int = 0
    """Calls begun in ``group`` since the bench began: the same number on all its ranks is the same call."""
    inside: bool = False
    moved_s: float = field(default_factory=time.monotonic)
    """time.monotonic() when a call last completed, or when ``at`` was last told what comes next."""
    allowance_s: float = START_ALLOWANCE_S
    """What the hang timeout is extended by: how long the next call to complete is expected to take."""
    _calls: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, phase: str, what: str = "", *, allowance_s: float = 0.0) -> None:
        """Say what comes next, and how long a call, batch or computation of it may well take."""
        self.phase, self.what, self.allowance_s = phase, what, allowance_s
        self.moved_s = time.monotonic()

    def enter(self, op: str, group: tuple[int, ...]) -> None:
        """Say that a collective call, or a batch of one kind, is about to begin in the group of these ranks."""
        self.inside = False
        self.op, self.group = op, group
        self.calls = self._calls[group] = self._calls.get(group, 0) + 1
        self.inside = True

    def leave(self) -> None:
        """Say that it has completed here. Not for one that raised: the watcher asks whether it came out of a call."""
        self.inside = False
        self.moved_s = time.monotonic()
