"""Decides whether a job may hang, from the outside view of one node's ranks and of all nodes together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.launch.watching.progress import Followed

EARLY_EXIT_WAIT_S = 1.5
"""How long others must have waited for a rank that ended with status 0 before evidence is taken."""


class Suspicion(Enum):
    """How likely a hang is, before any evidence is taken."""

    NONE = 0
    WEAK = 1
    """Ranks have waited for long while others move, which are most likely just slow."""
    STRONG = 2
    """Others wait for a rank that makes no progress or has ended, or no rank makes progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """The progress of one node's ranks, as far as suspicion depends on it."""

    alive: int = 0
    starting: bool = False
    """The launcher has no rank and was recently busy, for example loading torch."""
    never: bool = False
    """The launcher has no rank and has been idle for the hang timeout: it waits for other nodes, before the first start
    or, after its ranks have failed, before a restart."""
    begun: bool = False
    """A live rank has initialized its process group."""
    waits_s: float | None = None
    """The longest time that a live rank has been in a call that needs others, or None if none is in one."""
    stuck_s: float = 0.0
    """The longest time that one of those ranks has made no progress in its call."""
    nccl_still_s: float | None = None
    """The longest time that a live NCCL rank has made no progress, wherever it is, or None if there is no such rank."""
    still: int = 0
    """The number of live ranks without progress for the hang timeout. Time without a core does not count."""
    stood: int = 0
    """The same with that time: a rank that now gets no core, and stood still before, has not moved by that."""
    idle: bool = False
    """One of those is in no call that needs others."""
    ended_s: float | None = None
    """Seconds since the last rank ended. None if none has ended, or if the launcher stops the rest: then the ranks of
    other nodes notice the failure by themselves."""
    lives_on: bool = False
    """A rank's script ended longer ago than the hang timeout, but its process still runs."""


def read_progress(
    ranks: Sequence[Followed], now_ns: int, limit_s: float, idle_s: float | None, *, is_stopping: bool
) -> NodeProgress:
    """Return the progress of this node's ranks.

    ``idle_s`` is how long a live launcher without ranks has been idle, else None. ``is_stopping`` says whether the
    launcher has begun to stop its ranks.
    """
    alive = [rank for rank in ranks if rank.ended_ns is None]
    waiting = [rank for rank in alive if rank.waits_since_ns]
    still = [rank for rank in alive if now_ns - rank.last_progress_ns > limit_s * 1e9]
    ended = [rank.ended_ns for rank in ranks if rank.ended_ns is not None]
    ends = (rank.cells.get("main_ended_ns", 0) for rank in alive)
    return NodeProgress(
        alive=len(alive),
        starting=idle_s is not None and idle_s <= limit_s,
        never=idle_s is not None and idle_s > limit_s,
        begun=any(rank.cells.get("initialized") for rank in alive),
        waits_s=max(((now_ns - rank.waits_since_ns) / 1e9 for rank in waiting), default=None),
        stuck_s=max(((now_ns - max(r.waits_since_ns, r.last_progress_ns)) / 1e9 for r in waiting), default=0.0),
        nccl_still_s=max(((now_ns - r.last_progress_ns) / 1e9 for r in alive if r.uses_nccl), default=None),
        still=len(still),
        stood=sum(now_ns - rank.advanced_ns > limit_s * 1e9 for rank in alive),
        idle=any(not rank.waits_since_ns for rank in still),
        ended_s=(now_ns - max(ended)) / 1e9 if ended and not is_stopping else None,
        lives_on=any(end and now_ns - end > limit_s * 1e9 for end in ends),
    )


def suspicion_of(progress: Iterable[NodeProgress], limit_s: float) -> Suspicion:
    """Return whether the job may hang, so that evidence should be taken. This is a cheap check; the rules decide.

    A rank without progress is not suspicious until another one has waited longer than the limit.
    """
    found = list(progress)
    alive = sum(node.alive for node in found)
    if not alive:
        stands = any(node.never for node in found) and not any(node.starting for node in found)
        return Suspicion.STRONG if stands else Suspicion.NONE
    if any(node.lives_on for node in found) or _waits_for_the_gone(found):
        return Suspicion.STRONG
    waited_s = max((node.waits_s for node in found if node.waits_s is not None), default=None)
    if waited_s is None and not any(node.begun for node in found):
        # The ranks prepare, or all wait for something outside of the job, such as a stale lock.
        return Suspicion.WEAK if sum(node.still for node in found) == alive else Suspicion.NONE
    still = sum(node.still for node in found) if waited_s is None or waited_s > limit_s else 0
    if still == alive or (still and waited_s is not None and any(node.idle for node in found)):
        return Suspicion.STRONG
    is_weak = (still and waited_s is not None) or _may_wait_for_the_gone(found)
    return Suspicion.WEAK if is_weak else Suspicion.NONE


def _may_wait_for_the_gone(progress: list[NodeProgress]) -> bool:
    """Return whether a rank ended and an NCCL rank makes no progress: it may wait for its device, or export a model."""
    ended = [node.ended_s for node in progress if node.ended_s is not None]
    still = [node.nccl_still_s for node in progress if node.nccl_still_s is not None]
    return bool(ended and still) and min(*ended, max(still)) > EARLY_EXIT_WAIT_S


def _waits_for_the_gone(progress: list[NodeProgress]) -> bool:
    ended = [node.ended_s for node in progress if node.ended_s is not None]
    return bool(ended) and min(*ended, max(node.stuck_s for node in progress)) > EARLY_EXIT_WAIT_S
