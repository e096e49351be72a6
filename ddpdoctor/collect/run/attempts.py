"""Matches the attempts of several nodes: each node counts its own, and a node that joins later starts at 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.agent_log import log_of, meetings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Entries = Sequence[dict[str, Any]]
    """What the agent of one node logged in all attempts."""

BEATS_NS = 3_000_000_000
"""Three heartbeats: a node that was silent for longer than this when the ranks started was not there. Our choice."""


class NotThere(Exception):  # noqa: N818 - says what it is
    """The other node was not part of an attempt."""


def attempt_elsewhere(own: Entries, other: Entries, attempt: int | None) -> int | None:
    """Return the other node's number for an attempt of this node; None stands for the last attempt.

    The agents of all nodes share a number for each attempt (the round of their rendezvous). If they logged none, the
    number is the same on both nodes. Raises ``NotThere``.
    """
    meeting = log_of(own, attempt).meeting
    last = log_of(other)
    if meeting is None or (last.meeting is None and last.attempt < 0):
        return attempt
    for number, met in sorted(meetings_of(other).items(), reverse=True):
        if met == meeting and number >= 0:
            return None if number == last.attempt else number
    raise NotThere


def was_gone(own: Entries, heard_ns: int | None, attempt: int | None) -> bool:
    """Return whether a node's last message came before an attempt began, so that the agents met without it."""
    log = log_of(own, attempt)
    if log.meeting is None or log.begun_ns is None or heard_ns is None:
        return False
    return heard_ns + BEATS_NS < log.begun_ns


def came_later(own: Entries, other: Entries, attempt: int | None) -> bool:
    """Return whether another node's log shows that it joined after an attempt began."""
    meeting, last = log_of(own, attempt).meeting, log_of(other)
    if meeting is None or last.meeting is None or last.meeting <= meeting:
        return False
    try:
        attempt_elsewhere(own, other, attempt)
    except NotThere:
        return True
    return False
