"""Several ways to one place, tried at the same time, again and again: the best that gets through is taken."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.exchange.client import Client

TRY_S = 3.0
"""Ours: one attempt of one way, after which it is asked whether another has got through."""
BETTER_WITHIN_S = 1.0
"""Ours: how long a way that has got through waits for one that stands before it."""
PAUSE_S = 0.2


class Runner:
    """The attempts of one way, in a thread, from ``start`` until it gets through, ``stop``, or the deadline."""

    def __init__(self, open_it: Callable[[float], Client], deadline: float) -> None:
        """Take how to connect within a limit, and until when, by ``time.monotonic``."""
        self.found: Client | None = None
        self.error: StoreError | None = None
        """What the last attempt that has ended saw."""
        self._open_it, self._deadline = open_it, deadline
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self, results: queue.SimpleQueue[Runner]) -> None:
        """Try; the runner is put among the results when it has ended."""
        threading.Thread(target=self._run, args=(results,), name="ddpdoctor-find", daemon=True).start()

    def stop(self, *, keep: bool) -> None:
        """End; what was found is hung up on, or comes to be so, unless it is kept."""
        with self._lock:
            self._stopped.set()
            if self.found is not None and not keep:
                self.found.close()

    def _run(self, results: queue.SimpleQueue[Runner]) -> None:
        while not self._stopped.is_set() and (left_s := self._deadline - time.monotonic()) > 0:
            try:
                self._keep(self._open_it(min(TRY_S, left_s)))
                break
            except StoreError as error:
                self.error = error
                self._stopped.wait(PAUSE_S)
        results.put(self)

    def _keep(self, meeting: Client) -> None:
        with self._lock:
            if self._stopped.is_set():
                meeting.close()
            else:
                self.found = meeting


def race(runners: Sequence[Runner], deadline: float) -> Runner | None:
    """Return the first runner in order that got through, a little after any has; None where none has by the deadline.

    The others are stopped. An attempt under way at the deadline may be heard out, for it says more than none.
    """
    results: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    for runner in runners:
        runner.start(results)
    try:
        _wait(runners, results, deadline + TRY_S)
        best = next((runner for runner in runners if runner.found is not None), None)
    except BaseException:
        best = None
        raise
    finally:
        for runner in runners:
            runner.stop(keep=runner is best)
    return best


def _wait(runners: Sequence[Runner], results: queue.SimpleQueue[Runner], until: float) -> None:
    left = set(runners)
    while left:
        try:
            runner = results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return
        left.discard(runner)
        if runner.found is not None:
            until = min(until, time.monotonic() + BETTER_WITHIN_S)
            left -= set(runners[runners.index(runner) :])
