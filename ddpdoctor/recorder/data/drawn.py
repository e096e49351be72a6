"""The indices that a pass has drawn, summed up as numbers. They are counted in bulk, so that no step waits for it."""

from __future__ import annotations

import functools
import operator
import zlib
from typing import Any, List, NamedTuple, Tuple

from ..state import pass_on

MAX_ORDER = 4096
"""First indices that are kept for the digest of their order. ``rules/data/shared.py`` has the same number."""
BULK = 4096
"""The most indices that wait to be counted. Our choice: 32 KiB."""

_WORDS = frozenset({str, bytes, int, tuple})


class IndexCounts(NamedTuple):
    """What is known about some indices."""

    drawn: int = 0
    total: int = 0
    xor: int = 0
    highest: int = -1
    worded: bool = False
    """Whether some are no numbers. Their hashes are counted instead."""
    order: Tuple[int, ...] = ()
    """The first ``MAX_ORDER`` indices."""


class DrawnIndices:
    """Indices as they are drawn. Any thread may call ``counted`` at any time."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: Tuple[IndexCounts, List[Any]] = (IndexCounts(), [])
        """The counted and the waiting indices. They are replaced together, so that no reader counts an index twice."""

    def add(self, indices: Any) -> None:
        """Record a copy of the indices, because the sampler may reuse its list."""
        waiting = self._state[1]
        waiting.extend(indices)
        if len(waiting) >= BULK:
            self._state = (self.counted(), [])

    def counted(self) -> IndexCounts:
        """Return what is known about all indices so far."""
        so_far, waiting = self._state
        if not waiting:
            return so_far
        numbers, total, worded = numbers_of(waiting[:])
        order = so_far.order
        if len(order) < MAX_ORDER:
            order += tuple(numbers[: MAX_ORDER - len(order)])
        return IndexCounts(
            drawn=so_far.drawn + len(numbers),
            total=so_far.total + total,
            xor=functools.reduce(operator.xor, numbers, so_far.xor),
            highest=max(so_far.highest, max(numbers)),  # noqa: PLW3301 - thousands of arguments are too many
            worded=so_far.worded or worded,
            order=order,
        )


def numbers_of(indices: List[Any]) -> Tuple[List[int], int, bool]:
    """Return indices as numbers, their sum, and whether some of them are no numbers."""
    try:
        total = sum(indices)
        if type(total) is int:
            return indices, total, False
    except TypeError as error:  # some are no numbers
        pass_on(error)
    found = [_number(index) for index in indices]
    numbers = [code if number is None else number for number, code in found]
    return numbers, sum(numbers), any(number is None for number, _ in found)


def _number(index: Any) -> Tuple[Any, int]:
    """Return an index as a number and 0; or, if it is no number, None and a hash of it."""
    try:
        return int(operator.index(index)), 0
    except TypeError as error:
        pass_on(error)
        return None, zlib.crc32(repr(index).encode("utf-8", "replace")) if type(index) in _WORDS else 0
