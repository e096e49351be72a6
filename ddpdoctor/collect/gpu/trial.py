"""Gives every GPU some work (--deep), each in its own process, because that may hang or crash."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import TYPE_CHECKING

from ddpdoctor.collect.child import ChildEnd, run_child
from ddpdoctor.collect.gpu.nvml import NO_DRIVER, is_nvidia_here
from ddpdoctor.model.gpus import GpuTrial, GpuWork, PeerCopy
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

    Run = Callable[[tuple[str, ...], float], ChildEnd]

PROBE = "ddpdoctor.probes.gpu_trial"
WORK_LIMIT_S = 60.0
"""Our choice: enough to import torch from a slow disk, create a context and work for seconds."""
COPIES_LIMIT_S = 120.0
"""Our choice: eight GPUs have 56 pairs, and each takes a fraction of a second."""


def read_gpu_trial(system: System, plan: ReadingPlan) -> GpuTrial:
    """Return how every GPU did its work; raises ``NotRead`` without --deep or without GPUs."""
    if not plan.deep:
        raise NotRead(Unread(why=Why.NOT_ASKED, reason="GPUs are tested only with --deep"))
    if not is_nvidia_here(system) or not system.live:
        raise NotRead(NO_DRIVER)
    return try_gpus(lambda arguments, limit_s: run_child(PROBE, arguments, system.env, limit_s))


def try_gpus(run: Run) -> GpuTrial:
    """Try all GPUs in parallel, then the copies between them."""
    count = _count(run(("count",), WORK_LIMIT_S))
    with ThreadPoolExecutor(max_workers=count, thread_name_prefix="ddpdoctor-trial") as pool:
        work = tuple(pool.map(lambda index: _work(run, index), range(count)))
    copies = _copies(run(("copies",), COPIES_LIMIT_S), count) if count > 1 and all(one.ok for one in work) else ()
    return GpuTrial(work=work, copies=copies)


def _count(ended: ChildEnd) -> int:
    said = ended.records
    if not said and ended.status is None:
        raise NotRead(Unread(why=Why.TIMEOUT, reason=f"torch did not count the GPUs within {WORK_LIMIT_S:.0f} s"))
    if not said:
        raise NotRead(Unread(why=Why.ERROR, reason=f"torch could not count the GPUs: {ended.last_error}"))
    if not said[0]["count"]:
        raise NotRead(Unread(why=Why.ABSENT, reason="torch sees no GPU"))
    return int(said[0]["count"])


def _work(run: Run, index: int) -> GpuWork:
    started = time.monotonic()
    ended = run(("work", f"cuda:{index}"), WORK_LIMIT_S)
    said = ended.records
    if said:
        return GpuWork(index=index, timed_out=False, **said[-1])
    error = f"no result within {WORK_LIMIT_S:.0f} s" if ended.status is None else ended.last_error
    return GpuWork(
        index=index, ok=False, error=error, timed_out=ended.status is None, seconds=time.monotonic() - started
    )


def _copies(ended: ChildEnd, count: int) -> tuple[PeerCopy, ...]:
    """Return the results of the pairs; if the process hung or died before the last, the next pair failed."""
    found = tuple(PeerCopy(**result) for result in ended.records)
    left = list(permutations(range(count), 2))[len(found) :]
    if ended.status == 0 or not left:
        return found
    what = "this copy was not done" if found else "no copy was done"
    reason = f"{what} within {COPIES_LIMIT_S:.0f} s" if ended.status is None else ended.last_error
    return (*found, PeerCopy(source=left[0][0], target=left[0][1], ok=False, error=reason, gb_s=None))
