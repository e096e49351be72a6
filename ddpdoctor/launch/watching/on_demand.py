"""What the watcher of a running job does for `ddpdoctor status`: it takes evidence on request, and notes the nodes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ddpdoctor.launch.nodes.joining import save_members
from ddpdoctor.launch.watching.evidence import PATIENT_LIMIT_S
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.watching.examining import Examining
    from ddpdoctor.launch.watching.watch import JobWatch

NOTE_EVERY_S = 2.0
"""Our choice: what is known of other nodes comes with their beats, one a second."""
NOTE_SHARE = 0.01
"""The fraction of a core that the notes may use. With thousands of members they become rarer."""
ASK_EVERY_S = 0.05


class OnDemand:
    """Answers requests while the job runs. No method waits for other nodes."""

    def __init__(self, watch: JobWatch, examining: Examining) -> None:
        """Take this node's watch, and the connection to the other nodes."""
        self._watch, self._examining = watch, examining
        self._next_note_ns = 0
        self._asked_all = 0
        """The request for which all nodes were asked, or 0."""

    def serve(self) -> None:
        """Do what is due."""
        self._note_members()
        asked = self._watch.evidence.dump_asked()
        if asked and self._is_taken(asked):
            self._watch.evidence.note_dumped(asked)

    def _is_taken(self, asked: int) -> bool:
        """Take this node's evidence, and on the first node that of the others; return whether all of it is saved."""
        nodes = self._examining.nodes
        if self._asked_all != asked:
            if nodes is not None and nodes.is_first:
                nodes.ask()
            self._watch.take_evidence(limit_s=PATIENT_LIMIT_S)
            self._asked_all = asked
        if nodes is not None and nodes.is_first and not nodes.has_answers():
            return False
        self._examining.save_nodes()
        return True

    def _note_members(self) -> None:
        """Write what the first node knows of all nodes. The others know only what it tells them."""
        nodes, now_ns = self._examining.nodes, time.monotonic_ns()
        if nodes is None or not nodes.is_first or now_ns < self._next_note_ns:
            return
        save_members(self._watch.folder, nodes.members.seen())
        ended_ns = time.monotonic_ns()
        self._next_note_ns = ended_ns + int(max(NOTE_EVERY_S * 1e9, (ended_ns - now_ns) / NOTE_SHARE))


def ask_for_evidence(folder: Path, limit_s: float, is_running: Callable[[], bool]) -> bool:
    """Ask the watcher of a running job for evidence, and wait for it; return whether it came.

    ``folder`` is where the job's record is. Raises OSError if it cannot be written to.
    """
    control = open_plain(folder / "control", os.O_RDWR)
    try:
        asked = time.monotonic_ns()
        os.pwrite(control, ring_layout.CELL.pack(asked), ring_layout.CONTROL_DUMP_ASKED)
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and is_running():
            dumped = os.pread(control, ring_layout.CELL.size, ring_layout.CONTROL_DUMPED)
            if ring_layout.CELL.unpack(dumped)[0] == asked:
                return True
            time.sleep(ASK_EVERY_S)
    finally:
        os.close(control)
    return False
