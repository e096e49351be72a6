"""What became of payloads that were sent between nodes: stalled, sent again and again, or slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reaching import Contact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.reaching import NodePair, Transfer

    Key = tuple[int, int]

FIRST_FLIGHT = 20
"""Ours: twice the initial window of 10 segments (RFC 6928). Where no large packet ever arrives, the window does not
open, and no more than its first filling is sent anew."""
LOSSY = 0.01
"""Ours: a share of segments sent again from which on TCP's throughput falls far below the link (Mathis et al., 1997:
it goes with one over the square root of the loss); a healthy link between machines of a cluster loses none."""
LEAST_RETRANSMITTED = 3
"""Ours: fewer may be the end of a burst that overran a buffer once."""
SLOWER = 5.0
"""Ours: so many times less than the fastest pair. A busy host is slower by less. It is not the median: of the pairs of
three nodes, one that is slow has two thirds."""
LEAST_DELAY_S = 0.25
"""Ours: and so much longer than that. With twelve processes to a core, processes that had to wait for it made up to
0.13 s; 4 MiB over a link of 100 Mbit/s take 0.34 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a pair was."""

    pair: NodePair
    bytes_s: float
    duration_s: float


def is_black_hole(pair: NodePair) -> bool:
    """Say whether small payloads arrive whole and of large ones nothing does: packets of full size vanish."""
    if pair.small is None or pair.large is None or pair.small.contact is not Contact.CONNECTED:
        return False
    return pair.large.contact is Contact.NO_ANSWER and not _got_through(pair.large)


def _got_through(large: Transfer) -> bool:
    """Say whether something was acknowledged; without that count, whether more was sent than fits into a window."""
    if large.delivered_bytes is not None:
        return large.delivered_bytes > 0
    if large.sent is None or large.retransmitted is None:
        return False
    return large.sent - large.retransmitted > FIRST_FLIGHT


def lost_share(pair: NodePair) -> float | None:
    """Return the share of segments that had to be sent again; None where it is not known, or nothing to go by."""
    large = pair.large
    if large is None or large.sent is None or large.retransmitted is None or not large.sent or is_black_hole(pair):
        return None
    return large.retransmitted / large.sent


def is_lossy(pair: NodePair) -> bool:
    """Say whether a pair loses more than a healthy network does.

    Where most of what was sent again had arrived, it is the way back that loses, or a host that is slow to acknowledge.
    """
    share, large = lost_share(pair), pair.large
    if share is None or large is None or large.retransmitted is None:
        return False
    arrived = (large.needless or 0) * 2 >= large.retransmitted
    return share >= LOSSY and large.retransmitted >= LEAST_RETRANSMITTED and not arrived


def slow_pairs(pairs: Mapping[Key, NodePair]) -> dict[Key, Rate]:
    """Return the pairs that are far slower than the fastest. It takes two pairs at least."""
    rates = {key: rate for key, pair in pairs.items() if (rate := rate_of(pair)) is not None}
    fastest = max(rates.values(), key=lambda rate: rate.bytes_s, default=None)
    return {key: rate for key, rate in rates.items() if fastest is not None and _is_slow(rate, fastest)}


def rate_of(pair: NodePair) -> Rate | None:
    """Return how fast a large payload was, or how fast it got on until it was given up.

    None where it got on at no time or broke off, and where it was slow by loss.
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
