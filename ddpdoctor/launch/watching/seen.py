"""Keeps what was seen of processes and is gone later.

That is where a rank was before a call that needs other ranks, because its stack during the call hides that, and the
lines, batches and errors from the rings of ended children, before those rings are removed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.steps import FETCH_CELLS, errors_of_child, fetch_cells, owner_of
from ddpdoctor.recorder.storage import ring_reading

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.launch.watching.progress import Followed

MOST_LINES = 64
SHOWN_LINES = 2
KEPT_ERRORS = 8
"""Errors kept for the children of one rank: the first ones, and the last one. Our choice."""
KEPT_LINES = 64
"""The number of most frequent lines kept for the children of one rank. Our choice: two are shown."""


@dataclass(slots=True)
class _Stretch:
    """The time from one call that needs others to the next."""

    lines: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """How often the main thread was sampled at each of the user's lines."""
    begun: int = 0
    """Whether ``init_process_group`` had returned. The call may be shorter than the time between two samples."""
    until_ns: int = 0
    """When the next call began, or 0 if none did."""


class HoldUps:
    """Each process's own work before the last call and since."""

    def __init__(self) -> None:
        """Start empty."""
        self._before: dict[tuple[int, int], _Stretch] = {}
        self._since: dict[tuple[int, int], _Stretch] = {}

    def follow(self, ranks: Iterable[Followed]) -> None:
        """Record the current line of each live rank that is in no call that needs others."""
        for rank in ranks:
            key = (rank.pid, rank.ticks)
            if rank.ended_ns is not None:
                continue
            if rank.waits_since_ns:
                if key in self._since:
                    self._before[key] = self._since.pop(key)
                    self._before[key].until_ns = rank.waits_since_ns
                continue
            begun = rank.cells.get("initialized", 0)
            if key not in self._since or self._since[key].begun != begun:
                self._since[key] = _Stretch(begun=begun)
            lines = self._since[key].lines
            place = ring_reading.read_place(rank.ring)  # type: ignore[arg-type]  # an mmap reads like bytes
            if place is not None and (place in lines or len(lines) < MOST_LINES):
                lines[place] += 1

    def row(self, pid: int, ticks: int) -> dict[str, Any] | None:
        """Return where a rank was before its last call, in the format of watch.json.

        A call that fails at once falls between two samples, so it is in the same stretch as the work before it.
        """
        stretches = [found for kept in (self._before, self._since) if (found := kept.get((pid, ticks))) is not None]
        seen = max(stretches, key=lambda stretch: stretch.lines.total(), default=None)
        if seen is None:
            return None
        return {"until_ns": seen.until_ns, "lines": [list(line) for line, _ in seen.lines.most_common(SHOWN_LINES)]}


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
