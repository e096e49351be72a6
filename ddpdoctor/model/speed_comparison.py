"""The speed of two runs side by side: what a step takes in each, what changed, and how certain that is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeed:
    """One of the two runs."""

    name: str
    """The path that the user gave."""
    wall_ms: float
    """The mean step."""
    count: int
    """Steps of the whole run."""
    status: str
    """How the job ended: "finished", "hung"."""
    ranks: int | None
    samples_per_s: float | None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """How much longer something takes per step in the second run. ``low_ms`` to ``high_ms`` is the 95 % interval."""

    first_ms: float
    second_ms: float
    low_ms: float
    high_ms: float
    is_change: bool
    """The interval excludes zero, and the change is no trifle."""

    @property
    def change_ms(self) -> float:
        """Return how much longer it takes; negative: it takes less time."""
        return self.second_ms - self.first_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """The change of one phase on the rank that the others wait for."""

    phase: str
    time: TimeChange


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalSetting:
    """A setting that the runs do not share."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """Two runs side by side."""

    first: RunSpeed
    second: RunSpeed
    step: TimeChange
    phases: tuple[PhaseChange, ...]
    unequal: tuple[UnequalSetting, ...]
