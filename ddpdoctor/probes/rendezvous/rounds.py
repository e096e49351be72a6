"""Who sends to whom when: in round d every node sends to the one that is d places after it, and hears the one d before.

So n - 1 rounds hold all ordered pairs, and in each round every node sends once and serves once: the time grows with n.
Nobody waits for a round to end. A node goes to its next target when it is done with the last one, and a target serves
one at a time: a pair that stalls delays those that come to its two ends, and nobody else.

Ports are opened for a block of rounds together, so that 512 nodes need no thousand descriptors each.
"""

from __future__ import annotations

BLOCK = 64
"""Ours: rounds in a block. Three descriptors a round, and 1,024 is what a shell gives a process."""


def blocks_of(count: int) -> tuple[range, ...]:
    """Return the rounds 1 to ``count`` - 1 in blocks."""
    return tuple(range(first, min(first + BLOCK, count)) for first in range(1, count, BLOCK))


def targets_of(place: int, rounds: range, count: int) -> tuple[int, ...]:
    """Return the places to which the node at ``place`` sends, in the order of the rounds."""
    return tuple((place + distance) % count for distance in rounds)


def sources_of(place: int, rounds: range, count: int) -> tuple[int, ...]:
    """Return the places that send to the node at ``place``, in the order of the rounds."""
    return tuple((place - distance) % count for distance in rounds)
