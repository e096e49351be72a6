"""Ranks that NCCL's watchdog ended: it aborts a process whose call waited until torch's own limit, and then all others.

The abort comes from a thread that runs no Python. The watchdog's message goes to the script's stderr, which ddpdoctor
does not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import Call, Life, Rank

if TYPE_CHECKING:
    from collections.abc import Iterable

NEARLY = 0.9
"""Our choice: a call is recorded a little after torch's own clock has started."""
HEARTBEAT_S = 480.0
"""``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``: after that, a monitor aborts a process whose watchdog itself is stuck."""


def waited_its_limit(rank: Rank, call: Call) -> bool:
    """Return whether a rank ended after it had waited in a call for about torch's limit."""
    limit_s, waited_s = _limit_s(rank, call), _waited_s(rank, call)
    return limit_s is not None and waited_s is not None and waited_s >= NEARLY * limit_s


def aborted_by_watchdog(rank: Rank) -> bool:
    """Return whether a rank died as NCCL's watchdog ends one: in a thread that runs no Python, after a long wait."""
    if not _is_outside(rank):
        return False
    last = max((*rank.open_calls, *pack_calls(rank.recent_calls)[-1:]), key=lambda call: call.index, default=None)
    if last is None:
        return False
    return waited_its_limit(rank, last) or (_waited_s(rank, last) or 0.0) >= HEARTBEAT_S


def without_pulled_down(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Return ranks so that those that only died because of a peer's watchdog do not count as failures.

    They keep the state that they had before, at the line that their final dump shows.
    """
    ranks = tuple(ranks)
    if not any(_is_outside(rank) and any(waited_its_limit(rank, call) for call in _on_device(rank)) for rank in ranks):
        return ranks
    return tuple(
        replace(rank, after_stop=True, last_place=rank.fatal_place or rank.last_place)
        if _is_outside(rank) and not _on_device(rank)
        else rank
        for rank in ranks
    )


def came_late(ranks: Iterable[Rank]) -> dict[int, tuple[Call, Rank, Call]]:
    """Return the ranks that made a collective after another one had waited there until torch's limit.

    The watchdog ends the other one a minute later. Until then the late rank completes that collective with it, and may
    go on to wait in a later one, where it seems to be the waiter. Each comes with its call, that other rank and its
    call.
    """
    ranks = tuple(ranks)
    found: dict[int, tuple[Call, Rank, Call]] = {}
    for waiter in ranks:
        pending = _on_device(waiter) if _is_outside(waiter) else ()
        for call in pending:
            limit_s = _limit_s(waiter, call)
            if call.seq is None or limit_s is None or not waited_its_limit(waiter, call):
                continue
            since_ns = call.started_ns + limit_s * 1e9
            for rank in ranks:
                calls = (*rank.open_calls, *reversed(pack_calls(rank.recent_calls)))
                own = next((one for one in calls if (one.group, one.seq) == (call.group, call.seq)), None)
                if rank is not waiter and own is not None and own.started_ns > since_ns:
                    found.setdefault(rank.rank, (own, waiter, call))
    return found


def _is_outside(rank: Rank) -> bool:
    aborted = rank.life is Life.SIGNALED and rank.signal == "SIGABRT" and not rank.after_stop
    return aborted and rank.fatal_outside


def _on_device(rank: Rank) -> tuple[Call, ...]:
    return tuple(call for call in rank.open_calls if call.device_state is not None)


def _limit_s(rank: Rank, call: Call) -> float | None:
    of_group = next((group.timeout_s for group in rank.groups if group.name == call.group), None)
    return of_group if of_group is not None else rank.init_timeout_s


def _waited_s(rank: Rank, call: Call) -> float | None:
    known = rank.ended_ns is not None and call.started_ns > 0
    return (rank.ended_ns - call.started_ns) / 1e9 if known and rank.ended_ns is not None else None
