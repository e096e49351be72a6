"""Times how long a loader's worker makes a batch, and how long it is idle in between: in the worker itself.

A rank that waits for its workers looks slow to the others, who have a batch just ready, and may be as slow themselves.
Only the workers tell.
"""

from __future__ import annotations

import time

from .. import hooks
from ..state import here
from ..wrappers import hide_own_frames, wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MODULE = "torch.utils.data._utils.fetch"
FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")

_now_ns = time.monotonic_ns


class Times:
    """What one worker has done so far."""

    def __init__(self) -> None:
        self.ring: Any = None
        self.count = 0
        self.busy_ns = 0
        self.idle_ns = 0
        self.ended_ns = 0

    def add(self, ring: Any, began_ns: int, ended_ns: int) -> None:
        """Add a batch that was made.

        Of a pause no more counts than the batch itself took: a worker that is kept waits through an evaluation too.
        """
        took = ended_ns - began_ns
        if ring is not self.ring:  # a forked child has its parent's times
            self.ring, self.count, self.busy_ns, self.idle_ns, self.ended_ns = ring, 0, 0, 0, 0
        if self.ended_ns:
            self.idle_ns += min(began_ns - self.ended_ns, took)
        self.ended_ns = ended_ns
        self.count += 1
        self.busy_ns += took
        ring.fetched(self.count, self.busy_ns, self.idle_ns)


times = Times()


def note_what_is_needed(module: Any) -> None:
    """Note, in a rank, whether this torch has what its workers will time."""
    for name in FETCHERS:
        hooks.has(module, name)


def patch(module: Any) -> None:
    """Time the functions of torch that make a batch, once."""
    for name in FETCHERS:
        fetcher = getattr(module, name, None)
        if fetcher is not None and getattr(fetcher.fetch, "__wrapped__", None) is None:
            fetcher.fetch = _timed(fetcher.fetch)


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(*args: Any, **kwargs: Any) -> Any:
        began = _now_ns()
        try:
            batch = original(*args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise
        try:
            if here.ring is not None:
                times.add(here.ring, began, _now_ns())
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed("fetches", error)
        return batch

    return wraps(original)(fetch)
