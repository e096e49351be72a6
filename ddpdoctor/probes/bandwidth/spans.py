"""The timed loops: single calls, each after a barrier, or batches of calls back to back.

A call's time runs from its start to its completion on this rank. On the CPU it completes when the wait for it returns.
On CUDA, events are recorded on the stream that waits for the collective. The host's clock runs too, because an event on
the wrong stream would see only the start of the work. The timed region holds only the call and the clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.garbage import no_collection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.probes.bandwidth.collectives import Call
    from ddpdoctor.probes.bandwidth.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """One rank's times in microseconds, one value per call, or per batch."""

    times_us: tuple[float, ...]
    host_us: tuple[float, ...]
    """``times_us`` by the host's clock. On the CPU the two are the same."""
    waits_us: tuple[float, ...]
    """How long this rank waited for the others in the barrier, minus the time it then took to issue the call. It is
    small for a rank that is late for either. For batches it is only the wait."""

    def __add__(self, more: Spans) -> Spans:
        return Spans(
            times_us=self.times_us + more.times_us,
            host_us=self.host_us + more.host_us,
            waits_us=self.waits_us + more.waits_us,
        )


def time_calls(group: RankGroup, op: str, calls: Iterator[Call], count: int) -> Spans:
    """Time ``count`` single calls, each after a barrier."""
    with no_collection():
        if group.device.type == "cuda":
            return _time_calls_on_stream(group, op, calls, count)
        return _time_calls_on_host(group, op, calls, count)


def time_batches(group: RankGroup, op: str, calls: Iterator[Call], batches: int, count: int) -> Spans:
    """Time ``batches`` batches of ``count`` calls, each batch after a barrier."""
    with no_collection():
        if group.device.type == "cuda":
            return _time_batches_on_stream(group, op, calls, batches, count)
        return _time_batches_on_host(group, op, calls, batches, count)


def _time_calls_on_host(group: RankGroup, op: str, calls: Iterator[Call], count: int) -> Spans:
    import torch.distributed as dist

    clock, tracker, ranks, handle = time.perf_counter_ns, group.tracker, group.ranks, group.handle
    times_us, waits_us = [], []
    for call in islice(calls, count):
        # Not ``Group.barrier``: it adds a few microseconds before the call, in which the backend's threads fall asleep.
        # We measured 3 % of an all-reduce of 1 KiB.
        tracker.enter("barrier", ranks)
        barrier = dist.barrier(handle, True)  # noqa: FBT003 - async_op
        arrived = clock()
        if barrier is not None:
            barrier.wait()
        left = clock()
        tracker.enter(op, ranks)
        began = clock()
        work = call(True)  # noqa: FBT003 - async_op
        handed_in = clock()
        if work is not None:
            work.wait()
        ended = clock()
        tracker.leave()
        times_us.append((ended - began) / 1e3)
        waits_us.append(((left - arrived) - (handed_in - began)) / 1e3)
    return Spans(times_us=tuple(times_us), host_us=tuple(times_us), waits_us=tuple(waits_us))


def _time_batches_on_host(group: RankGroup, op: str, calls: Iterator[Call], batches: int, count: int) -> Spans:
    clock, tracker, ranks = time.perf_counter_ns, group.tracker, group.ranks
    times_us, waits_us = [], []
    for _ in range(batches):
        waits_us.append(group.barrier() * 1e6)
        tracker.enter(op, ranks)
        began = clock()
        for call in islice(calls, count):
            call(False)  # noqa: FBT003 - async_op
        ended = clock()
        tracker.leave()
        times_us.append((ended - began) / 1e3)
    return Spans(times_us=tuple(times_us), host_us=tuple(times_us), waits_us=tuple(waits_us))


def _time_calls_on_stream(group: RankGroup, op: str, calls: Iterator[Call], count: int) -> Spans:
    clock, tracker, ranks = time.perf_counter_ns, group.tracker, group.ranks
    before, after = _events()
    times_us, host_us, waits_us = [], [], []
    for call in islice(calls, count):
        waited_s = group.barrier()
        tracker.enter(op, ranks)
        began = clock()
        before.record()
        call(False)  # noqa: FBT003 - async_op
        handed_in = clock()
        after.record()
        after.synchronize()
        ended = clock()
        tracker.leave()
        times_us.append(before.elapsed_time(after) * 1e3)
        host_us.append((ended - began) / 1e3)
        waits_us.append(waited_s * 1e6 - (handed_in - began) / 1e3)
    return Spans(times_us=tuple(times_us), host_us=tuple(host_us), waits_us=tuple(waits_us))


def _time_batches_on_stream(group: RankGroup, op: str, calls: Iterator[Call], batches: int, count: int) -> Spans:
    clock, tracker, ranks = time.perf_counter_ns, group.tracker, group.ranks
    before, after = _events()
    times_us, host_us, waits_us = [], [], []
    for _ in range(batches):
        waits_us.append(group.barrier() * 1e6)
        tracker.enter(op, ranks)
        began = clock()
        before.record()
        for call in islice(calls, count):
            call(False)  # noqa: FBT003 - async_op
        after.record()
        after.synchronize()
        ended = clock()
        tracker.leave()
        times_us.append(before.elapsed_time(after) * 1e3)
        host_us.append((ended - began) / 1e3)
    return Spans(times_us=tuple(times_us), host_us=tuple(host_us), waits_us=tuple(waits_us))


def _events() -> tuple[Any, Any]:
    import torch

    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
