"""How much slower something is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.bandwidth.localise_edges import Measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import NodeResult, Pair
    from ddpdoctor.rules.bandwidth.localise_edges import Slowness

NARROW = (
    "small messages do not take twice as long as usual: the way of the data is narrow, rather than a processor slow"
)
SLOW_TO_ANSWER = "it is slow to answer rather than to carry: look at the core that it runs on before its links"


def say_amount(slowness: Slowness) -> str:
    """Say briefly what was reached and what is usual: "0.012 GB/s where 0.93 GB/s is usual"."""
    own = _range(slowness.measure, slowness.low, slowness.high)
    usual = _range(slowness.measure, slowness.usual, slowness.usual)
    small = "" if slowness.measure is Measure.BANDWIDTH else " for a small message"
    return f"{own}{small} where {usual} is usual"


def say_evidence(found: Sequence[Slowness], whose: str) -> tuple[str, ...]:
    """Say in what it is slow, by how much, and what that rules out; ``whose`` is like "the pairs of rank 2"."""
    lines = [
        f"{whose}: {say_amount(slowness)}, the median of the others; at least twice as slow in "
        f"{slowness.slow_turns} of {slowness.turns} turns"
        for slowness in found
    ]
    measures = {slowness.measure for slowness in found}
    if measures == {Measure.BANDWIDTH}:
        lines.append(NARROW)
    elif measures == {Measure.LATENCY}:
        lines.append(SLOW_TO_ANSWER)
    return tuple(lines)


def say_seen(results: Sequence[Pair | NodeResult], noun: str) -> str:
    """Say what was compared: "3 pairs of ranks: 0.91-1.1 GB/s, 430-520 us"."""
    rates = [result.busbw_gb_s for result in results if result.busbw_gb_s is not None]
    times = [result.latency_us for result in results]
    reach = [_range(Measure.BANDWIDTH, min(rates), max(rates))] if rates else []
    return f"{len(results)} {noun}: {', '.join([*reach, _range(Measure.LATENCY, min(times), max(times))])}"


def say_time(time_us: float) -> str:
    """Write a time: "430 us", "2.4 ms"."""
    return _range(Measure.LATENCY, time_us, time_us)


def _range(measure: Measure, low: float, high: float) -> str:
    unit, scale = ("GB/s", 1.0) if measure is Measure.BANDWIDTH else ("us", 1.0) if high < 1000 else ("ms", 1e-3)
    first, last = _number(low * scale), _number(high * scale)
    return f"{first} {unit}" if first == last else f"{first}-{last} {unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
