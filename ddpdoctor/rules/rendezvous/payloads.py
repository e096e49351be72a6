"""How payloads between nodes fared: stalled, resent again and again, or slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reaching import Contact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.reaching import NodePair, Transfer

    Key = tuple[int, int]

FIRST_FLIGHT = 20
"""Our choice: twice the initial window of 10 segments (RFC 6928). If no large packet ever arrives, the window does not
open, and only its first segments are resent."""
LOSSY = 0.01
"""Our choice: the share of resent segments from which on TCP's throughput is far below the link's (Mathis et al., 1997:
it goes with one over the square root of the loss). A healthy link between machines of a cluster loses none."""
LEAST_RETRANSMITTED = 3
"""Our choice: fewer may be the end of a burst that overran a buffer once."""
SLOWER = 5.0
"""Our choice: this many times slower than the fastest pair. A busy host is slower by less. The median does not work:
with three nodes, one slow node is part of two thirds of the pairs."""
LEAST_DELAY_S = 0.25
"""Our choice: it must also take this much longer. With twelve processes per core, waiting for the core took up to 0.13
s; 4 MiB over a link of 100 Mbit/s take 0.34 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a pair was."""

    pair: NodePair
    bytes_s: float
    duration_s: float


def is_black_hole(pair: NodePair) -> bool:
    """Return whether small payloads arrive but nothing of large ones does, because full-size packets vanish."""
    if pair.small is None or pair.large is None or pair.small.contact is not Contact.CONNECTED:
        return False
    return pair.large.contact is Contact.NO_ANSWER and not _got_through(pair.large)


def _got_through(large: Transfer) -> bool:
    """Return whether anything was acknowledged or, if unknown, whether more was sent than fits into a window."""
    if large.delivered_bytes is not None:
        return large.delivered_bytes > 0
    if large.sent is None or large.retransmitted is None:
        return False
    return large.sent - large.retransmitted > FIRST_FLIGHT


def lost_share(pair: NodePair) -> float | None:
    """Return the share of segments that had to be resent, or None if it is unknown or the pair is a black hole."""
    large = pair.large
    if large is None or large.sent is None or large.retransmitted is None or not large.sent or is_black_hole(pair):
        return None
    return large.retransmitted / large.sent


def is_lossy(pair: NodePair) -> bool:
    """Return whether a pair loses more than a healthy network does.

    If most resent segments had arrived, the way back loses packets, or a host is slow to acknowledge.
    """
    share, large = lost_share(pair), pair.large
    if share is None or large is None or large.retransmitted is None:
        return False
    arrived = (large.needless or 0) * 2 >= large.retransmitted
    return share >= LOSSY and large.retransmitted >= LEAST_RETRANSMITTED and not arrived


def slow_pairs(pairs: Mapping[Key, NodePair]) -> dict[Key, Rate]:
    """Return the pairs that are far slower than the fastest. It takes at least two pairs."""
    rates = {key: rate for key, pair in pairs.items() if (rate := rate_of(pair)) is not None}
    fastest = max(rates.values(), key=lambda rate: rate.bytes_s, default=None)
    return {key: rate for key, rate in rates.items() if fastest is not None and _is_slow(rate, fastest)}


def rate_of(pair: NodePair) -> Rate | None:
    """Return the rate of a large payload, or its rate until it was given up.

    Return None if it made no progress or broke off, or if packet loss made it slow.
    """
    large = pair.large
    if large is None or not large.duration_s or is_lossy(pair):
        return None
    if large.contact is Contact.CONNECTED:
        return Rate(pair=pair, bytes_s=large.size_bytes / large.duration_s, duration_s=large.duration_s)
    if large.contact is Contact.NO_ANSWER and large.delivered_bytes:
        return Rate(pair=pair, bytes_s=large.delivered_bytes / large.duration_s, duration_s=large.duration_s)
    return None


def _is_slow(rate: Rate, fastest: Rate) -> bool:
    return rate.bytes_s * SLOWER <= fastest.bytes_s and rate.duration_s - fastest.duration_s >= LEAST_DELAY_S


def say_rate(bytes_s: float) -> str:
    """Return "12.5 MB/s", "1.2 GB/s" or "4.8 kB/s"."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e5)):
        if bytes_s >= size:
            return f"{bytes_s / max(size, 1e6):.1f} {unit}"
    return f"{bytes_s / 1e3:.1f} kB/s"
