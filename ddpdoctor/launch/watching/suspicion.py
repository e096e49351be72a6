"""When to take evidence: what the ranks of one node show from outside, and what those of all nodes show together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.launch.watching.progress import Followed

EARLY_EXIT_WAIT_S = 1.5
"""How long others must have waited for a rank that has ended with status 0 before that is looked at."""


class Suspicion(Enum):
    """How much speaks for a hang, before any evidence was taken."""

    NONE = 0
    WEAK = 1
    """Ranks wait for long, and others move: most likely those are slow."""
    STRONG = 2
    """A rank stands still for which others wait, or all do, or one has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headway:
    """How far the ranks of one node have come, as far as suspicion goes by it."""

    alive: int = 0
    starting: bool = False
    """The launcher has no rank, and was busy a moment ago: it loads torch, say."""
    never: bool = False
    """The launcher has no rank, and has done nothing for the hang timeout: it waits for other nodes, to start or, once
    its ranks have failed, to start again."""
    begun: bool = False
    """A living rank has initialized its process group."""
    waits_s: float | None = None
    """For how long a living rank is in a call that needs others, the longest; None where none is."""
    stuck_s: float = 0.0
    """For how long one of those has made no progress in it, the longest."""
    nccl_still_s: float | None = None
    """For how long a living rank over NCCL has made no progress, wherever it stands, the longest; None without one."""
    still: int = 0
    """Living ranks without progress for the hang timeout."""
    idle: bool = False
    """One of those is in no call that needs others."""
    ended_s: float | None = None
    """How long ago the last of the ranks that have ended did so; None where none has, or the launcher stops the rest:
    those of other nodes get to know by themselves that it has failed."""
    lives_on: bool = False
    """A rank's script has ended for the hang timeout, and its process has not."""


def read_headway(
    ranks: Sequence[Followed], now_ns: int, limit_s: float, idle_s: float | None, *, is_stopping: bool
) -> Headway:
    """Return how far the ranks of this node have come.

    ``idle_s`` is for how long the launcher has done nothing, where it lives and has no rank; ``is_stopping``,
    that it has begun to stop its ranks.
    """
    alive = [rank for rank in ranks if rank.ended_ns is None]
    waiting = [rank for rank in alive if rank.waits_since_ns]
    still = [rank for rank in alive if now_ns - rank.last_progress_ns > limit_s * 1e9]
    ended = [rank.ended_ns for rank in ranks if rank.ended_ns is not None]
    ends = (rank.cells.get("main_ended_ns", 0) for rank in alive)
    return Headway(
        alive=len(alive),
        starting=idle_s is not None and idle_s <= limit_s,
        never=idle_s is not None and idle_s > limit_s,
        begun=any(rank.cells.get("initialized") for rank in alive),
        waits_s=max(((now_ns - rank.waits_since_ns) / 1e9 for rank in waiting), default=None),
        stuck_s=max(((now_ns - max(r.waits_since_ns, r.last_progress_ns)) / 1e9 for r in waiting), default=0.0),
        nccl_still_s=max(((now_ns - r.last_progress_ns) / 1e9 for r in alive if r.uses_nccl), default=None),
        still=len(still),
        idle=any(not rank.waits_since_ns for rank in still),
        ended_s=(now_ns - max(ended)) / 1e9 if ended and not is_stopping else None,
        lives_on=any(end and now_ns - end > limit_s * 1e9 for end in ends),
    )


def suspicion_of(headways: Iterable[Headway], limit_s: float) -> Suspicion:
    """Return whether the job may hang, so that evidence should be taken. A cheap look; rules decide.

    As long as nobody has waited for the limit, nobody holds anybody up.
    """
    found = list(headways)
    alive = sum(headway.alive for headway in found)
    if not alive:
        stands = any(headway.never for headway in found) and not any(headway.starting for headway in found)
        return Suspicion.STRONG if stands else Suspicion.NONE
    if any(headway.lives_on for headway in found) or _waits_for_the_gone(found):
        return Suspicion.STRONG
    waited_s = max((headway.waits_s for headway in found if headway.waits_s is not None), default=None)
    if waited_s is None and not any(headway.begun for headway in found):
        # They prepare, or all wait for something outside of the job, such as a lock that was left behind.
        return Suspicion.WEAK if sum(headway.still for headway in found) == alive else Suspicion.NONE
    still = sum(headway.still for headway in found) if waited_s is None or waited_s > limit_s else 0
    if still == alive or (still and waited_s is not None and any(headway.idle for headway in found)):
        return Suspicion.STRONG
    is_weak = (still and waited_s is not None) or _may_wait_for_the_gone(found)
    return Suspicion.WEAK if is_weak else Suspicion.NONE


def _may_wait_for_the_gone(headways: list[Headway]) -> bool:
    """Return whether a rank has ended and one over NCCL stands still: it may wait for its device, or export a model."""
    ended = [headway.ended_s for headway in headways if headway.ended_s is not None]
    still = [headway.nccl_still_s for headway in headways if headway.nccl_still_s is not None]
    return bool(ended and still) and min(*ended, max(still)) > EARLY_EXIT_WAIT_S


def _waits_for_the_gone(headways: list[Headway]) -> bool:
    ended = [headway.ended_s for headway in headways if headway.ended_s is not None]
    return bool(ended) and min(*ended, max(headway.stuck_s for headway in headways)) > EARLY_EXIT_WAIT_S
