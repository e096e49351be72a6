"""What this node's replicas are like, for the other nodes; and on the first node, what all of theirs are like."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.model.replica_records import NodeStreams, RootsReport, RootsRequest

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.collect.fingerprints.across_nodes import Joint
    from ddpdoctor.collect.fingerprints.index import NodeIndex
    from ddpdoctor.collect.fingerprints.within_host import Comparer


class SharedReplicas:
    """Of one attempt after another. The session writes, and a thread that talks to other nodes reads: it has a lock."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        """Begin without an attempt."""
        self.lock = threading.RLock()
        self._allowed = allowed
        self._index: NodeIndex | None = None
        self._comparer: Comparer | None = None
        self._joint: Joint | None = None

    def begin(self, attempt: int) -> NodeIndex:
        """Begin an attempt; return what is to keep its points. All nodes give the same attempt the same number."""
        from ddpdoctor.collect.fingerprints.index import NodeIndex

        self._index, self._comparer, self._joint = NodeIndex(attempt), None, None
        return self._index

    def follow(self, comparer: Comparer) -> bool:
        """Go on with what ranks have written; return whether nodes were seen to differ for the first time."""
        self._comparer = comparer
        return self._joint is not None and self._joint.look(time.monotonic())

    def report(self) -> RootsReport:
        """Return what the first node is to know."""
        with self.lock:
            return RootsReport(roots=self._index.report() if self._index is not None else ())

    def heed(self, word: RootsRequest) -> None:
        """Forget what the first node has found to be equal everywhere."""
        with self.lock:
            streams = self._index.streams if self._index is not None else {}
            for name, upto in word.settled.items():
                if name in streams:
                    streams[name].forget(upto)

    def kept(self, names: tuple[str, ...] | None = None) -> NodeStreams:
        """Return the points that are kept: of streams that were asked for, or of all that other nodes write too."""
        from ddpdoctor.collect.fingerprints.batches import pack_stream

        with self.lock:
            index, comparer = self._index, self._comparer
            if index is None or comparer is None:
                return NodeStreams()
            chosen = [one for one in index.shared() if names is None or one.name in names]
            return NodeStreams(streams=tuple(pack_stream(one, comparer.found_here(one.key)) for one in chosen))

    def hear(self, member: int, report: RootsReport) -> None:
        """Take what another node says, on the first node."""
        with self.lock:
            joint = self._of_all()
            if joint is not None:
                joint.hear(member, report.roots, time.monotonic())

    def word(self) -> RootsRequest:
        """Return what all other nodes are to know, on the first node."""
        with self.lock:
            return self._joint.word() if self._joint is not None else RootsRequest()

    def receive(self, member: int, sent: NodeStreams) -> None:
        """Take the contents that another node was asked for."""
        with self.lock:
            if self._joint is not None:
                self._joint.answered(member, sent)

    def save(self, folder: Path, attempt: int | None) -> None:
        """Write what is kept for other nodes, and on the first what was found over all; raises OSError."""
        from ddpdoctor.collect.fingerprints.saved_nodes import joint_name, points_name, save_points

        if self._index is not None:
            save_points(folder / points_name(attempt), self.kept())
        if self._joint is not None:
            save_points(folder / joint_name(attempt), self._joint.found())

    def _of_all(self) -> Joint | None:
        from ddpdoctor.collect.fingerprints.across_nodes import Joint

        if self._joint is None and self._index is not None:
            self._joint = Joint(self._index, self._allowed)
        return self._joint
