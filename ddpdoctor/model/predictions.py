"""What a change is predicted to do to the step, from what a run recorded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Bound(str, Enum):
    """What the predicted ratio is."""

    RANGE = "range"
    """The step is expected between ``low`` and ``high``."""
    AT_LEAST = "at least"
    """The change saves at least so much."""
    UP_TO = "up to"
    """The change saves so much at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The step after a change, as a ratio to the present one: 0.8 is a step that is 20 % shorter."""

    setting: str
    """Which change: "bucket_cap=1048576", "workers=4", "without=straggler"."""
    change: str
    """The same in the user's words."""
    ratio: float | None = None
    """None if it was refused."""
    low: float | None = None
    high: float | None = None
    bound: Bound = Bound.RANGE
    assumes: str = ""
    """What must hold, as a phrase."""
    reason: str = ""
    """Why it was refused."""

    @property
    def gain(self) -> float:
        """The share of the step that is saved, 0 if unknown."""
        return 0.0 if self.ratio is None else 1 - self.ratio
