"""Runs and trials side by side: how much a setting or another run changes the step, and what the speed depends on.

What varies within each run gives the interval of a change: the bootstrap 95 % interval.
"""

from __future__ import annotations

import random
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.bandwidth import Collective, read_references
from ddpdoctor.model.reading import known
from ddpdoctor.model.steps import NetworkUse, SpeedSettings
from ddpdoctor.model.tuning import PhaseChange, RatioRange, TimeChange

from .gradients import reduced_models
from .reduction import ring_factor
from .state import mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.steps import Budget

    from .reduction import MeasuredCurves
    from .state import SpeedState

    Value = TypeVar("Value")

RESAMPLES = 2000
SEED = 0
PART = 0.025  # the share of resamples outside a 95 % interval at each end
NOISY = 0.05  # of A/A: a wider interval is too noisy to show effects of 5 %, the least that are reported
LEAST_GAIN = 0.05
LEAST_SHARE = 0.01  # Of the first run's step. Our choice: a smaller change is called none, however certain it is.
_BYTES_PER_S_OF_MBIT = 1e6 / 8


def _interval(draw: Callable[[random.Random], float]) -> tuple[float, float]:
    dice = random.Random(SEED)  # noqa: S311 - resampling, no secret
    drawn = sorted(draw(dice) for _ in range(RESAMPLES))
    at = int(PART * RESAMPLES)
    return drawn[at], drawn[-1 - at]


def measure_effect(blocks_s: Sequence[float], base_s: Sequence[float]) -> RatioRange:
    """Compare a setting with the base, round by round. The interval is that of the median of the ratios."""
    ratios = [block / base for block, base in zip(blocks_s, base_s, strict=True)]
    low, high = _interval(lambda dice: median(dice.choices(ratios, k=len(ratios))))
    return RatioRange(ratio=median(ratios), low=low, high=high)


def spread_of(effect: RatioRange) -> float:
    """Return how far a range reaches from 1."""
    return max(abs(effect.low - 1), abs(effect.high - 1))


def is_gain(effect: RatioRange, noise: RatioRange) -> bool:
    """Return whether a setting is faster by more than 5 % and more than the noise that A/A shows."""
    gain = 1 - effect.ratio
    return effect.high < 1 and gain >= LEAST_GAIN and gain > spread_of(noise)


def compare_steps(first: Budget, second: Budget) -> TimeChange:
    """Return how the mean step changes from one run to another."""
    return _change((first.wall_ms, second.wall_ms), (first.blocks_ms, second.blocks_ms), first.wall_ms)


def compare_phases(first: Budget, second: Budget) -> tuple[PhaseChange, ...]:
    """Return how each phase of the step changes, in the order of the budget."""
    pairs = [(phase, other) for phase in first.phases for other in second.phases if phase.phase == other.phase]
    changes = (
        (row.phase, _change((row.critical_ms, other.critical_ms), (row.blocks_ms, other.blocks_ms), first.wall_ms))
        for row, other in pairs
    )
    return tuple(PhaseChange(phase=phase, time=time) for phase, time in changes)


def _change(
    means_ms: tuple[float, float], blocks_ms: tuple[Sequence[float], Sequence[float]], wall_ms: float
) -> TimeChange:
    """Return the change between two means. Its interval is over the blocks of both runs."""
    before, after = blocks_ms
    low, high = _interval(lambda rng: mean(rng.choices(after, k=len(after))) - mean(rng.choices(before, k=len(before))))
    is_large = abs(means_ms[1] - means_ms[0]) >= LEAST_SHARE * wall_ms
    return TimeChange(
        first_ms=means_ms[0], second_ms=means_ms[1], low_ms=low, high_ms=high,
        is_change=(low > 0 or high < 0) and is_large,
    )  # fmt: skip


def settings_of(state: SpeedState) -> SpeedSettings:
    """Return the settings of a job. Those of DDP are known if it has one DDP model."""
    models, steps = reduced_models(state), state.steps.ranks.values()
    ddp = list(models[0].times.values()) if len(models) == 1 else []
    around = [rank.speed.surroundings for rank in state.ranks if rank.speed and rank.speed.surroundings]
    loaders = [max(rank.loaders or (), key=lambda loader: loader.trained_batches, default=None) for rank in state.ranks]
    return SpeedSettings(
        rows=mean([mean(step.input_rows) for step in steps]) or None,
        reductions=_common(mean(step.reductions) for step in steps),
        threads=_common(context.threads for context in around),
        cores=_common(context.cores for context in around),
        workers=_common(None if loader is None else loader.workers for loader in loaders),
        gradient_bytes=_common(sum(times.bucket_bytes) for times in ddp),
        buckets=_common(len(times.bucket_bytes) for times in ddp),
        bucket_cap_bytes=_common(times.cap_bytes for times in ddp),
        finds_unused=_common(times.finds_unused for times in ddp),
        static_graph=_common(times.static_graph for times in ddp),
        bucket_view=_common(times.bucket_view for times in ddp),
        syncs_buffers=_common(times.syncs_buffers for times in ddp),
    )


def _common(values: Iterable[Value | None]) -> Value | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def network_use(state: SpeedState, curves: MeasuredCurves | None = None) -> NetworkUse | None:
    """Return what the reductions use, or None if the bytes of a step are unknown.

    Both figures are bus bandwidths, as in nccl-tests: what each rank sends in a ring, 2 (N - 1) / N of the size. What
    the network could carry is the best that a bench measured, whatever the size; else the rate of the slowest link, or
    what is published.
    """
    settings, ranks = settings_of(state), len(state.ranks)
    if not settings.gradient_bytes or not settings.reductions or ranks < 2 or not state.budget.wall_ms:
        return None
    limit = _by_link(state.job) or _by_reference(state.job, ranks)
    if curves is not None:
        _, mid, _ = curves
        points = zip(mid.sizes_bytes, mid.times_ms, strict=True)
        limit = max(ring_factor(mid.ranks) * size / time / 1e6 for size, time in points), "allreduce-bench"
    step_bytes = settings.gradient_bytes * settings.reductions
    return NetworkUse(
        step_bytes=round(step_bytes),
        used_gb_s=ring_factor(ranks) * step_bytes / state.budget.wall_ms / 1e6,
        limit_gb_s=limit[0] if limit else None,
        source=limit[1] if limit else "",
    )


def _by_link(job: Job) -> tuple[float, str] | None:
    """Return the rate of the slowest link of a job over Gloo on several hosts: a ring crosses each host's link once."""
    hosts = {rank.host for rank in job.ranks}
    if len(hosts) < 2 or any(group.backend != "gloo" for rank in job.ranks for group in rank.groups):
        return None
    links = []
    for node in (job.machine, *(seen.machine for seen in job.elsewhere)):
        network = known(node.network) if node is not None else None
        if network is not None:
            name = network.default_interface
            links += [(i.speed_mb_s, i.name) for i in network.interfaces if i.name == name and i.speed_mb_s]
    if len(links) < len(hosts):
        return None
    speed_mb_s, name = min(links)
    return speed_mb_s * _BYTES_PER_S_OF_MBIT / 1e9, f"the {speed_mb_s / 1000:g} Gbit/s link {name}"


def _by_reference(job: Job, ranks: int) -> tuple[float, str] | None:
    """Return what a published system like this one reaches, by the name of its GPUs."""
    gpus = known(job.machine.gpus) if job.machine is not None else None
    names = {gpu.name for gpu in gpus.devices} if gpus is not None else set()
    nccl = all(group.backend == "nccl" for rank in job.ranks for group in rank.groups)
    if len(names) != 1 or not nccl:
        return None
    name, shape = names.pop(), (ranks, len({rank.host for rank in job.ranks}), Collective.ALL_REDUCE)
    rows = (row for row in read_references() if (row.ranks, row.nodes, row.collective) == shape)
    row = next((row for row in rows if row.gpu.fullmatch(name)), None)
    return None if row is None else (row.reference.gb_s, f"published for {row.reference.text}")
