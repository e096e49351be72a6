"""Schedules the mesh: in round d, every node sends to the node d places after it, and receives from the one d before.

So n - 1 rounds cover all ordered pairs, and in each round every node sends once and serves once. The time grows with n.
No node waits for a round to end. A node goes on to its next target when it is done with one, and a target serves one
source at a time. A stalled pair delays only the nodes that wait for its two ends.

Ports are opened for a block of rounds at once, so that 512 nodes do not need a thousand descriptors each.
"""

from __future__ import annotations

BLOCK = 64
"""Our choice: rounds per block. A round needs three descriptors, and a shell usually allows 1,024 per process."""


def blocks_of(count: int) -> tuple[range, ...]:
    """Return the rounds 1 to ``count`` - 1 in blocks."""
    return tuple(range(first, min(first + BLOCK, count)) for first in range(1, count, BLOCK))


def targets_of(place: int, rounds: range, count: int) -> tuple[int, ...]:
    """Return the places to which the node at ``place`` sends, in the order of the rounds."""
    return tuple((place + distance) % count for distance in rounds)


def sources_of(place: int, rounds: range, count: int) -> tuple[int, ...]:
    """Return the places that send to the node at ``place``, in the order of the rounds."""
    return tuple((place - distance) % count for distance in rounds)
