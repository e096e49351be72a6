"""Records where each rank was before a call that needs other ranks, because its stack during the call hides that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.recorder.storage import ring_reading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.launch.watching.progress import Followed

MOST_LINES = 64
SHOWN_LINES = 2


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
