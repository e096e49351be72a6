"""The indices that a pass has drawn, in numbers: counted in bulk, for a step must not wait for it."""

from __future__ import annotations

import functools
import operator
import zlib
from typing import Any, List, NamedTuple, Tuple

MAX_ORDER = 4096
"""So many first indices are kept for the digest of their order. ``rules/data/arithmetic.py`` has the same number."""
BULK = 4096
"""So many indices wait at most to be counted. Ours: 32 KiB."""

_WORDS = frozenset({str, bytes, int, tuple})


class Counted(NamedTuple):
    """What is known of some indices."""

    drawn: int = 0
    total: int = 0
    xor: int = 0
    highest: int = -1
    worded: bool = False
    """Some are no numbers: their hashes are counted."""
    order: Tuple[int, ...] = ()
    """The first ``MAX_ORDER``."""


class Drawn:
    """Indices as they are drawn. Any thread may ask at any time for what they come to."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: Tuple[Counted, List[Any]] = (Counted(), [])
        """What is counted, and what is not yet: exchanged together, so that nobody sees an index twice."""

    def add(self, indices: Any) -> None:
        """Take down indices as the sampler gave them, which may use its list again."""
        waiting = self._state[1]
        waiting.extend(indices)
        if len(waiting) >= BULK:
            self._state = (self.counted(), [])

    def counted(self) -> Counted:
        """Return what is known of all indices so far."""
        so_far, waiting = self._state
        if not waiting:
            return so_far
        numbers, total, worded = numbers_of(waiting[:])
        order = so_far.order
        if len(order) < MAX_ORDER:
            order += tuple(numbers[: MAX_ORDER - len(order)])
        return Counted(
            drawn=so_far.drawn + len(numbers),
            total=so_far.total + total,
            xor=functools.reduce(operator.xor, numbers, so_far.xor),
            highest=max(so_far.highest, max(numbers)),  # noqa: PLW3301 - thousands of arguments are too many
            worded=so_far.worded or worded,
            order=order,
        )


def numbers_of(indices: List[Any]) -> Tuple[List[int], int, bool]:
    """Return indices as numbers, what they add up to, and whether some are none."""
    try:
        total = sum(indices)
        if type(total) is int:
            return indices, total, False
    except TypeError:  # of several kinds
        pass
    found = [_number(index) for index in indices]
    numbers = [code if number is None else number for number, code in found]
    return numbers, sum(numbers), any(number is None for number, _ in found)


def _number(index: Any) -> Tuple[Any, int]:
    """Return an index as a number, and None where it is none; then a hash of it."""
    try:
        return int(operator.index(index)), 0
    except TypeError:
        return None, zlib.crc32(repr(index).encode("utf-8", "replace")) if type(index) in _WORDS else 0
