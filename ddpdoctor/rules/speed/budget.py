"""The time budget: where the time of a mean step goes, on the critical rank, the median rank and the worst rank."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.speed import BUSY_PARTS, Budget, PhaseRow

from .steps import mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpdoctor.model.speed import Speed

    from .steps import JobSteps

NAMES = {
    "data": "data loading",
    "host": "other host code",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "exposed": "gradient reduction",
    "buffers": "buffer broadcast",
    "calls": "script's collectives",
}
"""By part of a step: its name in the budget. The last three are transfer only."""
WAITING = "waiting for ranks"
BLOCKS = 20
"""Our choice: neighboring steps are alike, so a run is resampled by blocks of them. Twenty are enough to resample."""


def make_budget(steps: JobSteps, speeds: Mapping[int, Speed]) -> Budget:
    """Return the budget of a job from the steps of its ranks."""
    wall = steps.wall_ms
    transfer = sum(map(mean, steps.transfer_ms.values()))
    waiting = median(mean(waits) for waits in steps.waits_ms.values())
    rows = sum(mean(one.input_rows) for one in steps.ranks.values())
    return Budget(
        phases=tuple(_rows(steps)),
        wall_ms=wall,
        steps=len(steps.numbers),
        count=steps.count,
        communication_share=transfer / wall if wall else 0.0,
        waiting_share=waiting / wall if wall else 0.0,
        samples_per_s=1e3 * rows / wall if rows and wall else None,
        own_ms=max(_own_ms(speed) for speed in speeds.values()),
        blocks_ms=_blocks(steps.walls_ms),
    )


def _rows(steps: JobSteps) -> Iterator[PhaseRow]:
    for part in BUSY_PARTS:
        columns = {rank: one.parts_ms[part] for rank, one in steps.ranks.items()}
        yield _row(NAMES[part], columns, steps.critical)
    for part, transfer in steps.transfer_ms.items():
        yield _row(NAMES[part], dict.fromkeys(steps.ranks, transfer), steps.critical)
    yield _row(WAITING, steps.waits_ms, steps.critical)


def _row(phase: str, columns_ms: Mapping[int, Sequence[float]], critical: Sequence[int]) -> PhaseRow:
    means = {rank: mean(column) for rank, column in columns_ms.items()}
    worst = max(means, key=lambda rank: means[rank])
    on_critical = [columns_ms[rank][i] for i, rank in enumerate(critical)]
    return PhaseRow(
        phase=phase,
        critical_ms=mean(on_critical),
        median_ms=median(means.values()),
        worst_ms=means[worst],
        worst_rank=worst,
        blocks_ms=_blocks(on_critical),
    )


def _blocks(values_ms: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of each block. Blocks have equal lengths, to within one step."""
    count = min(BLOCKS, len(values_ms))
    ends = [len(values_ms) * i // count for i in range(count + 1)] if count else []
    return tuple(mean(values_ms[start:end]) for start, end in pairwise(ends))


def _own_ms(speed: Speed) -> float:
    total = speed.totals.get("own")
    return total.sum_ms / speed.count if total is not None and speed.count else 0.0
