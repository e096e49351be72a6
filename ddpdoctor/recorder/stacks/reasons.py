"""Finds the error behind one that a library of torch's raised on account of it.

A pipeline raises an error of its own from what a stage raised. A distributed checkpoint collects the errors of all
ranks, and raises the collection on each of them.
"""

from __future__ import annotations

from .. import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Container, Dict, List

    Frames = List[Dict[str, Any]]

MAX_LINKS = 8
"""Errors in a row of which each is the cause of the one before. Ours."""


class Reason:
    """An error, where it was raised, and whose it is."""

    __slots__ = ("error", "frames", "passed_on", "ranks")

    def __init__(self, error: BaseException, raised_at: Frames) -> None:
        self.error = error
        self.frames = raised_at
        self.passed_on = ""
        """The type of the error that came of it; empty where there is none."""
        self.ranks: List[int] = []
        """The ranks whose errors the error is a collection of; empty where it is none."""


def reason_of(error: BaseException, rank: int, frames_of: Callable[[Any], Frames], in_calls: Container[int]) -> Reason:
    """Return the error that another was raised for on this rank, else that other one.

    ``in_calls`` holds the ids of errors that recorded calls have raised.
    """
    outer = type(error).__name__
    found = Reason(error, frames_of(error.__traceback__))
    told = _reported_by_ranks(error)
    if told:
        found.ranks = sorted(told)
        if rank in told:
            own, summary = told[rank]
            found.error, found.passed_on = own, outer
            found.frames = frames.trim(
                found.frames + [frames.describe(f.filename, f.lineno or 0, f.name) for f in summary]
            )
    for _ in range(MAX_LINKS):
        cause = found.error.__cause__
        if cause is None or (found.frames and found.frames[-1]["u"]):
            break
        raised_at = frames_of(cause.__traceback__)
        if not any(frame["u"] for frame in raised_at) and id(cause) not in in_calls:
            break
        found.error, found.frames, found.passed_on = cause, frames.trim(found.frames + raised_at), outer
    return found


def _reported_by_ranks(error: BaseException) -> Dict[int, Any]:
    """Return the errors of ranks that ``torch.distributed.checkpoint`` has put into one, each with its traceback."""
    told = getattr(error, "failures", None)
    if type(error).__name__ != "CheckpointException" or not isinstance(told, dict):
        return {}
    pairs = {rank: pair for rank, pair in told.items() if isinstance(rank, int) and isinstance(pair, tuple)}
    return {rank: pair for rank, pair in pairs.items() if len(pair) == 2 and isinstance(pair[0], BaseException)}
