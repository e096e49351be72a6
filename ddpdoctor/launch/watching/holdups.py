"""Keeps where each rank was before it came to a call that needs others: once it is there its stack no longer tells."""

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
    """How often the main thread was met at each of the user's lines."""
    begun: int = 0
    """Whether ``init_process_group`` had returned, which may take less time than lies between two looks."""
    until_ns: int = 0
    """When the next call began; 0 where none was seen."""


class HoldUps:
    """By process, its own work before the last call and since."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._before: dict[tuple[int, int], _Stretch] = {}
        self._since: dict[tuple[int, int], _Stretch] = {}

    def follow(self, ranks: Iterable[Followed]) -> None:
        """Note where living ranks are that wait for nobody."""
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
            place = ring_reading.read_place(rank.ring)  # type: ignore[arg-type]  # a map is read as bytes are
            if place is not None and (place in lines or len(lines) < MOST_LINES):
                lines[place] += 1

    def row(self, pid: int, ticks: int) -> dict[str, Any] | None:
        """Return where a rank was before the last call that it came to, as watch.json has it.

        A call that fails at once lies between two looks, in one stretch with the work before it.
        """
        stretches = [found for kept in (self._before, self._since) if (found := kept.get((pid, ticks))) is not None]
        seen = max(stretches, key=lambda stretch: stretch.lines.total(), default=None)
        if seen is None:
            return None
        return {"until_ns": seen.until_ns, "lines": [list(line) for line, _ in seen.lines.most_common(SHOWN_LINES)]}
