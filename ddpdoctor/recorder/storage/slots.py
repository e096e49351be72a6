"""Reads the records of calls in a ring into columns, because a rank has thousands of calls and few need decoding."""

from __future__ import annotations

import struct
import sys
from array import array
from functools import lru_cache
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from . import ring_layout

_WORDS = ring_layout.SLOT_SIZE // 8
_REST = struct.Struct(
    "%dx%ds%dx"
    % (
        ring_layout.KIND_OFFSET,
        ring_layout.KIND.size,
        ring_layout.SLOT_SIZE - ring_layout.KIND_OFFSET - ring_layout.KIND.size,
    )
)
"""The kind in a record."""
MORE_CLAIMED = 64
"""Records after the last claimed one that are read too, because concurrent threads may publish claims out of order."""


class CallSlot(NamedTuple):
    """One recorded call, with its interned strings resolved."""

    number: int
    started_ns: int
    ended_ns: int
    seq: int
    op: str
    api: str
    group: str
    site: Optional[Dict[str, Any]]
    redop: str
    dtype: str
    peer: int
    tensors: int
    flags: int
    shape: Optional[Tuple[int, ...]]


class Slots:
    """The recorded calls of a ring, ordered by number. Each column has one entry per call; ``which`` indexes ``kinds``.

    A kind is what calls share: a ``CallSlot`` whose number, times and seq are 0. ``numbers`` is a range unless records
    are missing, because a job can have thousands of ranks with thousands of calls.
    """

    def __init__(self, kinds: List[CallSlot], which: array[int], columns: Sequence[array[int]]) -> None:
        """``columns`` are numbers, starts, ends and seqs."""
        numbers, self.started_ns, self.ended_ns, self.seqs = columns
        self.kinds = kinds
        self.which = which
        self.numbers: Sequence[int] = _as_range(numbers)

    def __len__(self) -> int:
        """Return how many calls there are."""
        return len(self.which)

    def __getitem__(self, at: int) -> CallSlot:
        """Return one call."""
        return self.kinds[self.which[at]]._replace(
            number=self.numbers[at], started_ns=self.started_ns[at], ended_ns=self.ended_ns[at], seq=self.seqs[at]
        )

    def __iter__(self) -> Iterator[CallSlot]:
        """Yield the calls in order."""
        return map(self.__getitem__, range(len(self)))


def bytes_used(claimed: int, count: int) -> int:
    """Return how many bytes of the ``count`` slots can be in use after ``claimed`` calls, with a small margin."""
    return min(claimed + MORE_CLAIMED, count) * ring_layout.SLOT_SIZE


def read_slots(
    data: bytes, claimed: int, count: int, strings: Dict[int, str], sites: Dict[int, Dict[str, Any]]
) -> Slots:
    """Decode the records of a ring with ``count`` slots. ``data`` has at least the used part.

    Records that are empty, or are in a slot where their number does not belong, are skipped.
    """
    written = data[: bytes_used(claimed, count)].rstrip(b"\0")
    whole = written + bytes(-len(written) % ring_layout.SLOT_SIZE)
    words = array("Q", whole)
    if sys.byteorder == "big":
        words.byteswap()
    places: Dict[Tuple[bytes], int] = {}
    which = array("H", [places.setdefault(rest, len(places)) for rest in _REST.iter_unpack(whole)])
    columns = _in_order([*(words[i::_WORDS] for i in range(4)), which], claimed, count)
    columns[3] = array("q", columns[3].tobytes())
    return Slots([_read_kind(rest, strings, sites) for (rest,) in places], columns[4], columns[:4])


def _in_order(columns: List[array[int]], claimed: int, count: int) -> List[array[int]]:
    """Return the columns ordered by number, without records that are in the wrong slot."""
    cut = claimed % count if claimed > count else 0
    turned = [column[cut:] + column[:cut] for column in columns] if cut else columns
    first = max(claimed - count, 0) + 1
    if turned[0] == _numbers(first, len(turned[0])):
        return turned
    valid = sorted((number, i) for i, number in enumerate(columns[0]) if number and (number - 1) % count == i)
    return [array(column.typecode, [column[i] for _, i in valid]) for column in columns]


@lru_cache(maxsize=4)
def _numbers(first: int, count: int) -> array[int]:
    """Return so many numbers in order; most rings of a job have the same."""
    return array("Q", range(first, first + count))


def _as_range(numbers: array[int]) -> Sequence[int]:
    """Return numbers as a range if each is one more than the one before it."""
    if not numbers or numbers[-1] - numbers[0] != len(numbers) - 1:
        return numbers
    return range(numbers[0], numbers[-1] + 1)


def _read_kind(rest: bytes, strings: Dict[int, str], sites: Dict[int, Dict[str, Any]]) -> CallSlot:
    op, api, group, site, redop, dtype, peer, tensors, flags, ndim, *dims = ring_layout.KIND.unpack(rest)
    names = [strings.get(n, "") for n in (op, api, group, redop, dtype)]
    shape = tuple(dims[:ndim]) if dtype and ndim <= ring_layout.MAX_DIMS else None
    return CallSlot(
        0, 0, 0, 0, names[0], names[1], names[2], sites.get(site), names[3], names[4], peer, tensors, flags, shape
    )
