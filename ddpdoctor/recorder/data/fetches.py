"""Measures, inside a loader's worker, how long it takes to make a batch and how long it is idle in between.

A rank that waits for its workers looks slow to other ranks that happen to have a batch ready, although their workers
may be just as slow. Only the workers' own times show that.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from .. import hooks
from ..state import guarded, here, sealed, wall
from ..wrappers import hide_own_frames, wraps

MODULE = "torch.utils.data._utils.fetch"
FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")

_now_ns = time.monotonic_ns
_cpu_ns = time.thread_time_ns


class WorkerTimes:
    """What one worker has done so far."""

    def __init__(self) -> None:
        self.ring: Any = None
        self.count = 0
        self.busy_ns = 0
        self.cpu_ns = 0
        self.idle_ns = 0
        self.ended_ns = 0

    def add(self, ring: Any, began_ns: int, ended_ns: int, cpu_ns: int = 0) -> None:
        """Add a batch that was made, and the processor time that it took.

        A pause counts at most as long as the batch itself, because a persistent worker also waits during an evaluation.
        """
        took = ended_ns - began_ns
        if ring is not self.ring:  # a forked child has its parent's times
            self.ring, self.count, self.busy_ns, self.idle_ns, self.ended_ns, self.cpu_ns = ring, 0, 0, 0, 0, 0
        if self.ended_ns:
            self.idle_ns += min(began_ns - self.ended_ns, took)
        self.ended_ns = ended_ns
        self.count += 1
        self.busy_ns += took
        self.cpu_ns += cpu_ns
        ring.fetched(self.count, self.busy_ns, self.idle_ns, self.cpu_ns)


times = WorkerTimes()


def note_what_is_needed(module: Any) -> None:
    """Note, in a rank, whether this torch has the functions that its workers will time."""
    for name in FETCHERS:
        hooks.has(module, name)


def patch(module: Any) -> None:
    """Patch torch's functions that make a batch, once, to time them."""
    for name in FETCHERS:
        fetcher = getattr(module, name, None)
        if fetcher is not None and getattr(fetcher.fetch, "__wrapped__", None) is None:
            fetcher.fetch = _timed(fetcher.fetch)


@guarded("fetches")
def _made(began_ns: int, ended_ns: int, cpu_ns: int) -> None:
    if here.ring is not None:
        times.add(here.ring, began_ns, ended_ns, cpu_ns)


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(*args: Any, **kwargs: Any) -> Any:
        began, cpu = _now_ns(), _cpu_ns()
        try:
            batch = original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            raise
        _made(began, _now_ns(), _cpu_ns() - cpu)
        return batch

    return wraps(original)(fetch)
