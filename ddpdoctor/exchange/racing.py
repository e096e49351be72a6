"""Tries several ways to one server at the same time, repeatedly, and takes the best that works."""

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
"""Our choice: the limit of one attempt. After it, a runner checks whether it was stopped."""
BETTER_WITHIN_S = 1.0
"""Our choice: once one way works, how long a preferred one may still take."""
LATE_S = 1.0
"""Our choice: an attempt ends by itself at the deadline, on a busy host a little later."""
PAUSE_S = 0.2


class Runner:
    """Tries one way in a thread, from ``start`` until it works, ``stop`` is called, or the deadline passes."""

    def __init__(self, open_it: Callable[[float], Client], deadline: float) -> None:
        """``open_it`` connects within a limit in seconds; ``deadline`` is by ``time.monotonic``."""
        self.found: Client | None = None
        self.error: StoreError | None = None
        """The error of the last finished attempt."""
        self._open_it, self._deadline = open_it, deadline
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self, results: queue.SimpleQueue[Runner]) -> None:
        """Start trying; the runner puts itself into ``results`` when it ends."""
        threading.Thread(target=self._run, args=(results,), name="ddpdoctor-find", daemon=True).start()

    def stop(self, *, keep: bool) -> None:
        """Stop trying, and close the connection unless ``keep``. One that opens after this is closed too."""
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
    """Return the most preferred runner that worked, or None if none has by the deadline.

    Once one works, the preferred ones get ``BETTER_WITHIN_S`` more. The others are stopped. An attempt that is running
    at the deadline gets ``LATE_S`` more, because its error says more than none.
    """
    results: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    for runner in runners:
        runner.start(results)
    try:
        _wait(runners, results, deadline + LATE_S)
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
