"""Times two things in turn, A B A B, and prints the ratio pair by pair: a machine's moods cancel out."""

from __future__ import annotations

import statistics
from collections.abc import Callable


def compare(name: str, ours: Callable[[], float], theirs: Callable[[], float], pairs: int = 15) -> float:
    """Run both ``pairs`` times after one warm-up; print and return the median of ours over theirs.

    The interval is that of the median's order statistics, at about 95 %.
    """
    ours()
    theirs()
    ratios = sorted(ours() / theirs() for _ in range(pairs))
    low, high = ratios[max(0, pairs // 2 - 4)], ratios[min(pairs - 1, pairs // 2 + 4)]
    median = statistics.median(ratios)
    print(f"{name}: {median:.2f} ({low:.2f} to {high:.2f}, {pairs} pairs)")
    return median
