"""How the step changes with the number of ranks: what was measured, and what is predicted. Times are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LaunchKind(str, Enum):
    """What a launch shows."""

    ALONE = "alone"
    """One rank with all cores."""
    SHARE = "share"
    """One rank with as many cores and threads as it has among all ranks."""
    JOB = "job"
    """All ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaunch:
    """One launch."""

    kind: LaunchKind
    ranks: int
    """Of a share: among how many ranks it is one."""
    step_ms: float
    unreduced_ms: float
    """The step without any reduction."""
    rows: float | None = None
    """The batch of a rank in a step; None if it was not recorded."""
    spread_ms: float = 0.0
    """Standard deviation, over ranks and steps, of the time that a rank needs for itself."""
    noise: float = 0.0
    """How far the ratio of the script's settings to themselves reaches from 1."""


class ScalingKind(str, Enum):
    """What grew with the number of ranks. The batch per rank decides."""

    WEAK = "weak"
    """The batch of a rank stayed the same."""
    STRONG = "strong"
    """The total batch stayed the same."""
    NEITHER = "neither"
    UNKNOWN = "unknown"
    """The batch was not recorded. Taken for weak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """The efficiency at one size, and its factors: ``efficiency = threads * contention * communication``."""

    ranks: int
    kind: ScalingKind
    step_ms: float
    rows: float | None
    efficiency: float
    """Samples per second of a rank, as a share of those of one rank that has all cores."""
    threads: float
    """What a rank's own share of the cores and threads costs."""
    contention: float
    """What the other ranks' use of memory, caches and cores costs."""
    communication: float
    """What reductions and waiting for other ranks cost. DDP changes this factor only."""
    noise: float
    """Smaller differences mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSize:
    """A number of ranks that was not run."""

    ranks: int
    low_ms: float
    high_ms: float
    """The step by the better and the worse of ring and tree."""
    waiting_ms: float
    """In it: waiting that comes with the spread of the ranks' own times."""
    low: float
    high: float
    """The efficiency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingResult:
    """What the launches showed."""

    launches: tuple[ScalingLaunch, ...]
    rows: tuple[ScalingRow, ...]
    predicted: tuple[PredictedSize, ...] = ()
    reason: str = ""
    """Why nothing is predicted."""
    spread: float = 0.0
    """Of the ranks' own times, as a share of the step."""
    measured_ranks: int = 0
    """The most ranks at which it was measured."""
    notes: tuple[str, ...] = ()
