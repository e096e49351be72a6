"""Keeps what the rings of ended children say of their lines, before those rings are removed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.steps import parent_of
from ddpdoctor.recorder import reading

if TYPE_CHECKING:
    from pathlib import Path

KEPT_LINES = 64
"""Lines kept of the children of one rank, the most frequent. Ours: two are shown."""


class WorkerLines:
    """How often the children of each process were met at which line, over all children that have ended."""

    def __init__(self) -> None:
        """Begin with none."""
        self._counts: dict[int, Counter[tuple[str, int, str]]] = {}

    def keep(self, ring: Path) -> None:
        """Add the lines of a child that has ended."""
        try:
            content = reading.read_ring_file(ring)
        except (OSError, reading.DamagedRingError):
            return
        parent = parent_of(content)
        if parent is None or not content.lines:
            return
        counts = self._counts.setdefault(parent, Counter())
        for line in content.lines:
            counts[str(line.site.get("f")), int(line.site.get("l") or 0), str(line.site.get("n"))] += line.times
        if len(counts) > 2 * KEPT_LINES:
            self._counts[parent] = Counter(dict(counts.most_common(KEPT_LINES)))

    def rows(self, pid: int) -> list[list[Any]]:
        """Return file, line, function and count of the lines of a process's children, the most frequent first."""
        return [[*line, times] for line, times in self._counts.get(pid, Counter()).most_common(KEPT_LINES)]
