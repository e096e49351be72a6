"""A rank that comes late to the calls: what it does before them takes long, and the others wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Mode
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.bandwidth.localise_words import say_time

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Arrival, Bench

LATE_US = 2000.0
"""Ours: two ranks on two busy cores come some hundred microseconds apart at the median. A call over a fast network
takes less than this even for the largest bucket of DDP, so that to wait for it doubles the time."""
RELATIVE = 2.0
"""Ours: and so many times the time of a small call, where that is long in itself because cores are shared."""
SHARE = 0.8
"""Of the calls, in which it must be the last to come; the same as of steps, for a straggler in training (DD610)."""
LEAST_CALLS = 20
"""As for a straggler: fewer are an accident."""


def find_late(bench: Bench) -> Arrival | None:
    """Return the rank that comes late; at most one can be the last in most calls."""
    times = [result.p50_us for result in bench.results if result.mode is Mode.LATENCY]
    least = max(LATE_US, RELATIVE * min(times, default=0.0))
    late = (one for one in bench.arrivals if one.late_us >= least and one.share >= SHARE and one.calls >= LEAST_CALLS)
    return next(late, None)


def say_late(late: Arrival, bench: Bench) -> Problem:
    """Name the late rank. The others wait for it, and so does every call; none of them is slow."""
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
