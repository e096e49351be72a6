"""What the bench has seen so far. The main thread adds to it; a watcher may take it away at any moment, half full."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import (
        Arrival,
        LeftOut,
        Measurement,
        Member,
        NcclLog,
        NodeResult,
        Pair,
        Settings,
        Stop,
        Wrong,
    )


class Log:
    """All ranks keep one, since any of them may have to report; what a rank did not see is empty in its own.

    Each append to a list, and each assignment, is whole: a snapshot may lack the last one and is never damaged.
    """

    def __init__(self, settings: Settings, members: Sequence[Member]) -> None:
        self.settings = settings
        self.members = tuple(members)
        self.results: list[Measurement] = []
        self.wrong: list[Wrong] = []
        self.arrivals: tuple[Arrival, ...] = ()
        self.pairs: list[Pair] = []
        self.nodes: list[NodeResult] = []
        self.left_out: list[LeftOut] = []
        self.nccl_logs: tuple[NcclLog, ...] = ()
        self.notes: list[str] = []
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Add what a reader must know of how it was measured, once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def bench(self, stop: Stop | None = None) -> Bench:
        """Return what there is now; ``stop`` says how it ended where it did not finish."""
        return Bench(
            settings=self.settings,
            members=self.members,
            results=tuple(self.results),
            wrong=tuple(self.wrong),
            arrivals=self.arrivals,
            pairs=tuple(self.pairs),
            nodes=tuple(self.nodes),
            left_out=tuple(self.left_out),
            nccl_logs=self.nccl_logs,
            notes=tuple(self.notes),
            stop=stop,
        )
