"""Keeps the lines, batches and errors from the rings of ended children, before those rings are removed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.steps import FETCH_CELLS, errors_of_child, fetch_cells, owner_of
from ddpdoctor.recorder.storage import ring_reading

if TYPE_CHECKING:
    from pathlib import Path

KEPT_ERRORS = 8
"""Errors kept for the children of one rank: the first ones, and the last one. Our choice."""
KEPT_LINES = 64
"""The number of most frequent lines kept for the children of one rank. Our choice: two are shown."""


class WorkersSeen:
    """The sampled lines and the batches of ended children by their parent, and their errors by their rank."""

    def __init__(self) -> None:
        """Start empty."""
        self._counts: dict[int, Counter[tuple[str, int, str]]] = {}
        self._fetches: dict[int, list[int]] = {}
        self._errors: dict[int, list[dict[str, Any]]] = {}

    def keep(self, ring: Path) -> None:
        """Add the lines and batches of a child that has ended."""
        content = _read(ring)
        for rank, error in errors_of_child(content) if content is not None else ():
            known = self._errors.setdefault(rank, [])
            known[KEPT_ERRORS - 1 :] = [error]
        parent = owner_of(content, lambda pid: _read_any(ring.parent, pid)) if content is not None else None
        if content is None or parent is None:
            return
        before = self._fetches.setdefault(parent, [0] * FETCH_CELLS)
        self._fetches[parent] = [old + new for old, new in zip(before, fetch_cells(content), strict=True)]
        counts = self._counts.setdefault(parent, Counter())
        for line in content.lines:
            counts[str(line.site.get("f")), int(line.site.get("l") or 0), str(line.site.get("n"))] += line.times
        if len(counts) > 2 * KEPT_LINES:
            self._counts[parent] = Counter(dict(counts.most_common(KEPT_LINES)))

    def errors(self, pid: int) -> list[dict[str, Any]]:
        """Return the errors that ended the children of a rank."""
        return self._errors.get(pid, [])

    def fetches(self, pid: int) -> list[int]:
        """Return the sums of ``fetch_cells`` over a process's ended children; empty if none has ended."""
        return self._fetches.get(pid, [])

    def rows(self, pid: int) -> list[list[Any]]:
        """Return file, line, function and count for the lines of a process's children, the most frequent first."""
        return [[*line, times] for line, times in self._counts.get(pid, Counter()).most_common(KEPT_LINES)]


def _read_any(rings: Path, pid: int) -> ring_reading.RingContent | None:
    """Return the ring of a live process, or None if it cannot be read."""
    return next((content for path in rings.glob(f"{pid}-*.ring") if (content := _read(path)) is not None), None)


def _read(ring: Path) -> ring_reading.RingContent | None:
    try:
        return ring_reading.read_ring_file(ring)
    except (OSError, ring_reading.DamagedRingError):
        return None
