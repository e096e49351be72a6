"""A rank that comes late to the calls: it is busy before them, and the others wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Mode
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.bandwidth.localise_words import say_time

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Arrival, Bench

LATE_US = 2000.0
"""Our choice: on two busy cores, two ranks arrive some hundred microseconds apart at the median. Over a fast network,
even DDP's largest bucket takes less than this, so waiting this long doubles the time."""
RELATIVE = 2.0
"""Our choice: it must also be this many times the time of a small call, which is long itself if cores are shared."""
SHARE = 0.8
"""The share of calls in which it must come last; the same share as of steps for a straggler in training (DD610)."""
LEAST_CALLS = 20
"""The least number of calls, as for a straggler: fewer are chance."""


def find_late(bench: Bench) -> Arrival | None:
    """Return the rank that comes late, if any. Only one rank can be last in most calls."""
    times = [result.p50_us for result in bench.results if result.mode is Mode.LATENCY]
    least = max(LATE_US, RELATIVE * min(times, default=0.0))
    late = (one for one in bench.arrivals if one.late_us >= least and one.share >= SHARE and one.calls >= LEAST_CALLS)
    return next(late, None)


def say_late(late: Arrival, bench: Bench) -> Problem:
    """Report the late rank. The others wait for it in every call, but none of them is slow."""
    seen = (
        f"before each of {late.calls} calls all ranks met: it came {say_time(late.late_us)} after the others at the "
        f"median, {say_time(late.late_p95_us)} in one of twenty, and last in {late.share:.0%} of them"
    )
    next_us = max((one.late_us for one in bench.arrivals if one.rank != late.rank), default=0.0)
    return Problem(
        summary=f"rank {late.rank} on {late.host} comes {say_time(late.late_us)} late to each call: the others wait "
        "for it, and none of them is slow",
        evidence=(seen, f"none of the others comes later than {say_time(max(next_us, 0.0))} after the rest"),
        fix="look at what this rank does before a call: a process that shares its core (`top`, `pidstat -t 1`), a core "
        "in a power saving state, the interrupts of a network card; give each rank cores of its own "
        "(torchrun --numa-binding, srun --cpu-bind=cores)",
        ranks=(late.rank,),
        hosts=(late.host,),
    )
