"""What a reader must know besides the numbers: what is not there, who came late, what could explain a low number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size, format_time
from ddpdoctor.model.bandwidth import Mode, Standing
from ddpdoctor.report.bandwidth.words import format_share
from ddpdoctor.report.hosts import format_hosts
from ddpdoctor.report.ranks import format_ranks

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Arrival, LeftOut, Reason
    from ddpdoctor.report.bandwidth.reading import Bandwidth

LATE_SHARE = 0.8
"""A rank that comes last to so many of the calls is worth a line. Ours: as for stragglers of a job."""


def find_late(bench: Bandwidth) -> Arrival | None:
    """Return the rank that comes last to most calls, where it is later than a small call takes."""
    latest = max(bench.arrivals, key=lambda arrival: arrival.late_us, default=None)
    small = min((one.p50_us for one in bench.results if one.mode is Mode.LATENCY), default=0.0)
    if latest is None or latest.share < LATE_SHARE or latest.late_us <= small:
        return None
    return latest


def describe_late(late: Arrival) -> str:
    """Say who comes late, and that the times of the collectives do not contain it."""
    share, time = format_share(late.share), format_time(late.late_us)
    calls = f"comes last to {share} of the calls, {time} after the others (median)"
    return f"rank {late.rank} on {late.host} {calls}; the times above do not contain it"


def describe_left_out(one: LeftOut) -> str:
    """Say what was not measured, and why."""
    mode = "" if one.mode is None else f" {one.mode.value}"
    sizes = [format_size(size) for size in one.sizes_bytes]
    span = (
        sizes[0] if len(sizes) == 1 else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}" if sizes else "all sizes"
    )
    return f"{one.collective.value} {one.dtype}{mode}, {span}: {one.reason}"


def name_reasons(bench: Bandwidth) -> str:
    """Name the list of reasons: there may be some where no number is low."""
    low = any(curve.standing is Standing.BELOW for curve in bench.curves)
    return "what could explain it" if low else "seen on the machines"


def describe_reason(reason: Reason, *, several: bool) -> str:
    """Say what was seen, on whom, and where it was read; ``several``: there is more than one host."""
    hosts = f"on {format_hosts(reason.hosts)}" if several and reason.hosts else ""
    whom = " ".join(part for part in (format_ranks(reason.ranks), hosts) if part)
    return f"{whom + ': ' if whom else ''}{reason.text} ({reason.source})"
