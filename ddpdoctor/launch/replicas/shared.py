"""The replica fingerprints that this node shares with other nodes, and on the first node the comparison of all."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import NodeStreams, RootsReport, RootsRequest
from ddpdoctor.model.facts import attempt_name

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.collect.fingerprint_compare import Comparer
    from ddpdoctor.collect.fingerprint_files import NodeIndex
    from ddpdoctor.collect.fingerprint_nodes import Joint
    from ddpdoctor.model.consistency import Stream


class SharedReplicas:
    """The shared fingerprints of the current attempt. They have a lock: the session writes, another thread reads."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        """Start without an attempt; ``allowed`` are name patterns of tensors that may differ."""
        self.lock = threading.RLock()
        self._allowed = allowed
        self._index: NodeIndex | None = None
        self._comparer: Comparer | None = None
        self._joint: Joint | None = None

    def begin(self, attempt: int) -> NodeIndex:
        """Start an attempt and return its new index. All nodes use the same number for the same attempt."""
        from ddpdoctor.collect.fingerprint_files import NodeIndex

        self._index, self._comparer, self._joint = NodeIndex(attempt), None, None
        return self._index

    def follow(self, comparer: Comparer) -> bool:
        """Use the comparer's latest state; return whether a difference between nodes was found for the first time."""
        self._comparer = comparer
        return self._joint is not None and self._joint.compare(time.monotonic())

    def report(self) -> RootsReport:
        """Return this node's report to the first node."""
        with self.lock:
            return RootsReport(roots=self._index.report() if self._index is not None else ())

    def heed(self, word: RootsRequest) -> None:
        """Forget the points that the first node has found to be equal everywhere."""
        with self.lock:
            streams = self._index.streams if self._index is not None else {}
            for name, upto in word.settled.items():
                if name in streams:
                    streams[name].forget(upto)

    def kept(self, names: tuple[str, ...] | None = None) -> NodeStreams:
        """Return the kept points of the named streams, or of all streams that other nodes write too."""
        from ddpdoctor.collect.fingerprint_files import pack_stream

        with self.lock:
            index, comparer = self._index, self._comparer
            if index is None or comparer is None:
                return NodeStreams()
            chosen = [one for one in index.shared() if names is None or one.name in names]
            return NodeStreams(streams=tuple(pack_stream(one, comparer.found_here(one.key)) for one in chosen))

    def hear(self, member: int, report: RootsReport) -> None:
        """Record another node's report, on the first node."""
        with self.lock:
            joint = self._of_all()
            if joint is not None:
                joint.hear(member, report.roots, time.monotonic())

    def word(self) -> RootsRequest:
        """Return the first node's request to all others."""
        with self.lock:
            return self._joint.word() if self._joint is not None else RootsRequest()

    def receive(self, member: int, sent: NodeStreams) -> None:
        """Record the contents that another node sent on request."""
        with self.lock:
            if self._joint is not None:
                self._joint.answered(member, sent)

    def results(self) -> tuple[Stream, ...]:
        """Return the results over all nodes so far, on the first node."""
        with self.lock:
            return tuple(one.found for one in self._joint.found().streams) if self._joint is not None else ()

    def save(self, folder: Path, attempt: int | None) -> None:
        """Write the kept points, and on the first node the result over all nodes; raises OSError."""
        from ddpdoctor.collect.fingerprint_nodes import JOINT, POINTS
        from ddpdoctor.collect.run.evidence import save

        if self._index is not None:
            save(folder / attempt_name(POINTS, attempt), self.kept())
        if self._joint is not None:
            save(folder / attempt_name(JOINT, attempt), self._joint.found())

    def _of_all(self) -> Joint | None:
        from ddpdoctor.collect.fingerprint_nodes import Joint

        if self._joint is None and self._index is not None:
            self._joint = Joint(self._index, self._allowed)
        return self._joint
