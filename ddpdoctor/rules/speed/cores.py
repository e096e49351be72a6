"""DD810 and DD811: what takes the processor from training: Python's garbage collector, and too many threads."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .steps import mean
from .words import SHARE, host_lines, ms, percent, place, up_to

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.speed import CoreTime, Surroundings
    from ddpdoctor.model.stacks import Frame

    from .state import SpeedState

COLLECTION_SHARE = 0.05
"""The facts' figure: usual collections of young objects take far less."""
COMPUTE_TOO = 0.15
"""A thread computes too if it waits for a core for this share of the time. Our choice: beside a busy loop on each core,
31 threads that multiply matrices wait 0.3 of it each, and 15 that now and then add up a few numbers 0.07."""
MOST_COUNTED = 64
"""The recorder asks so many threads of a process how long they waited."""
ALIKE = 0.5
"""Ranks that lose at least this share of what the worst one loses are named with it. Our choice."""


@rule("DD810", "gc-pauses", Severity.WARNING, "Python's garbage collector takes a large part of the step")
def check_collections(state: SpeedState) -> Answer:
    """Report ranks on which garbage collection takes a large part of the time.

    ## What it means

    A full collection visits every object of the process: 170,000 after `import torch`, and millions with a data set in
    lists. All other ranks wait meanwhile. If ranks collect at different steps, each of them stops the job in turn.

    ## How it is recognized

    The recorder times each collection in the main thread. On the rank that the others wait for, collections must take
    5 % of the step.

    ## How sure

    High: collections are timed.

    ## What to do

    Call `gc.freeze()` after set-up, so that the objects which live as long as the job are not visited any more. Call
    `gc.collect()` rarely, and on all ranks at the same step. Do not just disable the collector: memory grows.

    ## Example

        Python's garbage collector takes 18 % of the step
    """
    steps = state.steps
    lost = {rank: mean(one.parts_ms["gc"]) for rank, one in steps.ranks.items()}
    critical_ms = mean([steps.ranks[rank].parts_ms["gc"][i] for i, rank in enumerate(steps.critical)])
    share = state.share(critical_ms)
    seen = f"collections take {ms(critical_ms)} of a {ms(state.budget.wall_ms)} step on the critical rank"
    if share < COLLECTION_SHARE:
        return passed(seen)
    ranks = tuple(rank for rank, value in lost.items() if value >= ALIKE * max(lost.values()))
    lines = {rank: _collected_at(state.rank(rank)) for rank in ranks}
    problem = Problem(
        summary=f"Python's garbage collector takes {percent(share)} of the step",
        ranks=ranks,
        where=tuple(place(rank, frame) for rank, frames in lines.items() for frame in frames),
        evidence=(seen,),
        fix="call gc.freeze() after setup, and call gc.collect() less often and in the same step on all ranks",
        share=share,
    )
    return judged([problem])


def _collected_at(rank: Rank) -> tuple[Frame, ...]:
    """Return the line at which a rank collects most, or if that was not noted, the one at which it was sampled most."""
    noted = rank.speed.collected_at if rank.speed is not None else None
    return (noted,) if noted is not None else host_lines(rank)[:1]


@rule("DD811", "cpu-oversubscribed", Severity.WARNING, "The ranks on a host have more threads than cores")
def check_threads(state: SpeedState) -> Answer:
    """Report ranks whose threads together exceed the cores that they may use, and that wait for cores.

    ## What it means

    Each rank starts as many threads as it was told, and all ranks of a host share its cores. OpenMP's threads spin
    while they wait for each other, so with too many of them a step can take several times as long.

    ## How it is recognized

    The threads of torch, summed over the ranks of the host, exceed the cores that the ranks may use. Each rank has
    more than one thread. The main threads could run but had no core for 10 % of the time, as the kernel counts it,
    and each other thread of the median rank of the host for 15 % of it. Waiting for cores with few threads, or with
    threads that have nothing to do, has another reason: other processes, which the script cannot help.

    ## How sure

    High: threads, cores and waiting are counted.

    ## What to do

    Set `OMP_NUM_THREADS` to the cores of the host divided by its ranks (torchrun sets it to 1), and call
    `torch.set_num_threads` with no more than that.

    ## Example

        2 ranks with 4 threads each share 2 cores: up to 52 % of the step
    """
    known = [(rank, rank.speed.surroundings, rank.speed.core_time) for rank in state.ranks if rank.speed is not None]
    rows = [(rank, about, time) for rank, about, time in known if about is not None and time is not None]
    if not rows:
        return skipped("threads and cores were not recorded")
    blamed = []
    for rank, about, _ in rows:
        local = [one for one in rows if one[0].host == rank.host]
        threads = sum(other.threads for _, other, _ in local)
        many = [_queued(other, time) for _, other, time in local if other.threads > 1]
        if about.threads > 1 and threads > about.cores and median(many) >= COMPUTE_TOO:
            blamed.append((rank, about))
    queued = median(time.queued_ms / max(1.0, time.elapsed_ms) for _, _, time in rows)
    seen = f"the main threads wait for a core {percent(queued)} of the time"
    if not blamed or queued < SHARE:
        return passed(seen)
    about = blamed[0][1]
    count = sum(rank.host == blamed[0][0].host for rank, _ in blamed)
    problem = Problem(
        summary=f"{count} ranks with {about.threads} threads each share {about.cores} cores: {up_to(queued)}",
        ranks=tuple(rank.rank for rank, _ in blamed),
        evidence=(seen,),
        fix=f"OMP_NUM_THREADS={max(1, about.cores // max(1, count))}, and no torch.set_num_threads above it",
        share=min(1.0, queued),
    )
    return judged([problem])


def _queued(about: Surroundings, time: CoreTime) -> float:
    """Return the share of the time that each thread beside the main thread waits for a core; 0 without such threads."""
    others = min(about.threads - 1, MOST_COUNTED)
    return time.others_queued_ms / (others * time.elapsed_ms) if others and time.elapsed_ms else 0.0


def threads_to_try(state: SpeedState) -> tuple[int, int]:
    """Return the threads of a rank, and the cores of its host divided by the ranks there; zeros if that is not known.

    If the ranks differ, the ones with most threads count.
    """
    around = [(rank.host, rank.speed.surroundings) for rank in state.ranks if rank.speed and rank.speed.surroundings]
    if not around:
        return 0, 0
    most = max(Counter(host for host, _ in around).values())
    return max(one.threads for _, one in around), max(1, min(one.cores for _, one in around) // most)
