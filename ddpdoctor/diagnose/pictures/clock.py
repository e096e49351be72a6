"""Converts times of a job to milliseconds from the start of its timeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineClock:
    """The beginning and the end of a timeline."""

    began_ns: int
    until_ns: int

    @property
    def until_ms(self) -> float:
        """The length of the timeline."""
        return self.ms(self.until_ns)

    def ms(self, time_ns: int) -> float:
        """Return a time by the timeline, not outside of it."""
        return round((min(max(time_ns, self.began_ns), self.until_ns) - self.began_ns) / 1e6, 3)
