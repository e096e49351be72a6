"""What a wrapped job does right now: ``ddpdoctor status``. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.nodes import NodeSeen

STATUS_FORMAT = "ddpdoctor-status"
STATUS_VERSION = 1


class Liveness(str, Enum):
    """Whether a job runs."""

    RUNNING = "running"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"
    """`wrap` was started on another host, whose processes cannot be seen from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """One rank. Counts are those since its start."""

    rank: int
    host: str
    pid: int | None
    lives: bool
    trains: bool
    """It ended a step recently."""
    state: str
    """One phrase: "trains", "in all_reduce", "frozen", "exit status 1"."""
    since_s: float | None
    """How long it has been in this state; None if it trains, or if that is not known."""
    where: Place | None
    """The user's line at which it was seen last, if it does not train."""
    step: int
    step_ms: float | None
    """Milliseconds a step over the last steps."""
    waits_share: float | None
    """The share of these steps in which it waited for other ranks."""
    epoch: int
    """Passes over its data that it has begun."""
    batch: int
    """The number of its last batch, over all passes."""
    memory_bytes: int | None
    """Resident memory of its process, without its children; None if that cannot be seen from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitNow:
    """Ranks that wait in calls of one kind."""

    ranks: tuple[int, ...]
    call: str
    """What they wait in: "all_reduce of float32[1]"."""
    since_s: float
    """How long the first of them has waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasNow:
    """The comparison of the replicas so far."""

    equal_up_to: int | None
    """The number of the last point at which all were equal; None if they never were."""
    at: str
    """What is counted: "optimizer step"."""
    compared: int
    """How often they were compared."""
    differing: tuple[str, ...] = ()
    """The kinds of tensors that differ since then: "parameter"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNow:
    """A wrapped job at one point in time."""

    run: str
    """Its run folder."""
    state: Liveness
    host: str
    """The host of the `wrap` that reports."""
    started_at: str | None
    """ISO 8601, UTC."""
    running_s: float | None
    exit_status: int | None
    """The exit status of `wrap`, once the job has ended."""
    attempt: int
    """Counted from 0: how often the launcher has restarted the ranks."""
    world_size: int | None
    ranks: tuple[RankNow, ...]
    waits: tuple[WaitNow, ...]
    """Waits that are longer than a second."""
    waited_for: tuple[int, ...]
    """The ranks that keep the others waiting and wait for nobody themselves; empty if that is not known."""
    replicas: ReplicasNow | None
    unseen: tuple[NodeSeen, ...]
    """Other members of the job whose ranks cannot be seen from here."""
    reported: str
    """The verdict of a hang that `wrap` has reported while the job goes on; else empty."""
