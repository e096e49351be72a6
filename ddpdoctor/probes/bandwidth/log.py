"""The bench's results so far. The main thread adds to them, and the watcher thread may report them at any time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Bench

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import (
        Arrival,
        BenchSettings,
        LeftOut,
        Measurement,
        Member,
        NcclLog,
        NodeResult,
        Pair,
        Stop,
        Wrong,
    )


@dataclass(slots=True)
class ResultLog:
    """The results on one rank. All ranks keep them, because any rank may have to report. Unseen parts are empty.

    Each append or assignment is atomic, so a snapshot may lack the last change but is never corrupt.
    """

    settings: BenchSettings
    members: tuple[Member, ...]
    results: list[Measurement] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    arrivals: tuple[Arrival, ...] = ()
    pairs: list[Pair] = field(default_factory=list)
    nodes: list[NodeResult] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    nccl_logs: tuple[NcclLog, ...] = ()
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
