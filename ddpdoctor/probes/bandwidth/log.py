"""The bench's results so far. The main thread adds to them, and the watcher thread may report them at any time."""

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
    """The results on one rank. All ranks keep them, because any rank may have to report. Unseen parts are empty.

    Each append or assignment is atomic, so a snapshot may lack the last change but is never corrupt.
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
        """Add a note for the reader about how it was measured. Equal notes are added once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def bench(self, stop: Stop | None = None) -> Bench:
        """Return the results so far. ``stop`` says how the bench ended if it did not finish."""
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
