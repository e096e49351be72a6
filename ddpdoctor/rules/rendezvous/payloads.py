"""What became of payloads that were sent between nodes: stalled, sent again and again, or slow."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reaching import Contact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
"""Ours: so many times less than the median of the other pairs. A busy host is slower by less."""
LEAST_DELAY_S = 0.25
"""Ours: and so much longer than their median. With twelve processes to a core, processes that had to wait for it made
up to 0.13 s; 4 MiB over a link of 100 Mbit/s take 0.34 s."""


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
    """Return the pairs that are far slower than the median of the others. It takes two pairs at least."""
    rates = {key: rate for key, pair in pairs.items() if (rate := rate_of(pair)) is not None}
    if len(rates) < 2:
        return {}
    speeds = sorted(rate.bytes_s for rate in rates.values())
    durations = sorted(rate.duration_s for rate in rates.values())
    return {key: rate for key, rate in rates.items() if _is_slow(rate, speeds, durations)}


def rate_of(pair: NodePair) -> Rate | None:
    """Return how fast a large payload was; None where it did not arrive, or was slow by loss."""
    large = pair.large
    if large is None or large.contact is not Contact.CONNECTED or not large.duration_s or is_lossy(pair):
        return None
    return Rate(pair=pair, bytes_s=large.size_bytes / large.duration_s, duration_s=large.duration_s)


def _is_slow(rate: Rate, speeds: Sequence[float], durations: Sequence[float]) -> bool:
    """Compare with the others' medians; both lists are sorted and hold the pair itself."""
    delay_s = rate.duration_s - _median_without(durations, rate.duration_s)
    return rate.bytes_s * SLOWER <= _median_without(speeds, rate.bytes_s) and delay_s >= LEAST_DELAY_S


def _median_without(values: Sequence[float], own: float) -> float:
    """Return the median of sorted values but one: of n * n pairs, without looking at all of them for each."""
    count, place = len(values) - 1, bisect_left(values, own)

    def other(index: int) -> float:
        return values[index if index < place else index + 1]

    return (other((count - 1) // 2) + other(count // 2)) / 2


def say_rate(bytes_s: float) -> str:
    """Return "12.5 MB/s" or "1.2 GB/s"."""
    return f"{bytes_s / 1e9:.1f} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.1f} MB/s"
