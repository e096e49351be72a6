"""Times two things in turn, A B B A, and compares them pair by pair: a machine's moods and its drift cancel out.

On a machine that others use, run a bench under ``chrt -r 10`` (as root), so that they cannot come between.
"""

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

PAIRS = 15
CONFIDENCE = 0.95
T = TypeVar("T")


class Spread(NamedTuple):
    """A median and the interval that holds it at about 95 %."""

    median: float
    low: float
    high: float


class Took(NamedTuple):
    """What a command took, its memory at the peak, and what it said."""

    wall_s: float
    cpu_s: float
    mib: float
    said: str

    @property
    def first(self) -> str:
        """The beginning of what it said."""
        return self.said.partition("\n")[0][:60]


def run(*command: str) -> Took:
    """Run a command; what it writes on stderr is not shown."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, _, used = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - began
    return Took(took_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, said.strip())


def compare(name: str, ours: Callable[[], float], theirs: Callable[[], float], pairs: int = PAIRS) -> float:
    """Run both ``pairs`` times after one warm-up; print and return the median of ours over theirs."""
    found = spread([a / b for a, b in measure(ours, theirs, pairs)])
    print(f"{name}: {found.median:.3f} ({found.low:.3f} to {found.high:.3f}, {pairs} pairs)", flush=True)
    return found.median


def compare_added(
    name: str, ours: Callable[[], float], theirs: Callable[[], float], *, unit: str, scale: float, pairs: int = PAIRS
) -> float:
    """Run both in the same way; print and return the median of ours less theirs, times ``scale``, in ``unit``."""
    found = spread([(a - b) * scale for a, b in measure(ours, theirs, pairs)])
    print(f"{name}: {found.median:+.2f} {unit} ({found.low:+.2f} to {found.high:+.2f}, {pairs} pairs)", flush=True)
    return found.median


def measure(ours: Callable[[], T], theirs: Callable[[], T], pairs: int) -> Iterator[tuple[T, T]]:
    """Yield (ours, theirs) pair by pair, after one warm-up; every second pair runs the other way round."""
    ours()
    theirs()
    for i in range(pairs):
        if i % 2:
            second = theirs()
            yield ours(), second
        else:
            first = ours()
            yield first, theirs()


def spread(values: Sequence[float]) -> Spread:
    """Return the median and its interval from the order statistics, which assume nothing of the distribution.

    The interval reaches from the k-th smallest to the k-th largest value, with the largest k for which it still misses
    the median with at most 5 %: each value lies on either side of it with one half, so the count is binomial.
    """
    ordered = sorted(values)
    count = len(ordered)
    missed, k = 0.0, 0
    while 2 * (missed + math.comb(count, k) / 2**count) <= 1 - CONFIDENCE:
        missed += math.comb(count, k) / 2**count
        k += 1
    k = max(k, 1)
    return Spread(statistics.median(ordered), ordered[k - 1], ordered[-k])
