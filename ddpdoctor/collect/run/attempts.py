"""Tells which attempts of several nodes are the same: each counts its own, and one that joins later begins at 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.agent_log import log_of, meetings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Entries = Sequence[dict[str, Any]]
    """What the agent of one node logged, of all attempts."""

BEATS_NS = 3_000_000_000
"""Ours: who took part in an attempt was heard later than three beats before its ranks were started."""


class NotThere(Exception):  # noqa: N818 - says what it is
    """The other node was not part of an attempt."""


def attempt_elsewhere(own: Entries, other: Entries, attempt: int | None) -> int | None:
    """Return which attempt of another node is the same as one of this node; None stands for the last.

    Agents of all nodes give an attempt the same number (the round of their rendezvous). Where they say none, nodes
    count alike. Raises ``NotThere``.
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
    """Return whether a node was last heard before an attempt began, so that its agents have met without it."""
    log = log_of(own, attempt)
    begun_ns = min((int(entry["at"]) for entry in log.started.values()), default=None)
    if log.meeting is None or begun_ns is None or heard_ns is None:
        return False
    return heard_ns + BEATS_NS < begun_ns


def came_later(own: Entries, other: Entries, attempt: int | None) -> bool:
    """Return whether another node has joined after an attempt had begun, as far as its log tells."""
    meeting, last = log_of(own, attempt).meeting, log_of(other)
    if meeting is None or last.meeting is None or last.meeting <= meeting:
        return False
    try:
        attempt_elsewhere(own, other, attempt)
    except NotThere:
        return True
    return False
