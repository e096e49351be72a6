"""The steps of a job on GPUs, side by side: the phases as CUDA events measured them, one step in twenty.

DDP's timers say how long the reduction ran after backward's computation, in other iterations than these steps. So each
step is given the median of its rank. What the GPU does before forward is idleness, or copies of the input; it is split
between data loading and other host code as the host's time is.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from .steps import MIN_USABLE, MOST_WARM_UP, JobSteps, RankSteps, waits_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.speed import DeviceSteps, Speed

FIRST_ITERATION = 3
"""DDP has its buckets built anew by then."""
USUAL_ITERATION = 100
"""From here on torch reads DDP's timers in each hundredth iteration. The first ten include the warm-up."""


def align_devices(speeds: Mapping[int, Speed]) -> JobSteps | None:
    """Return the common steps of ranks that are measured on their GPUs, or None if they are too few or not all are."""
    known = {rank: speed.device for rank, speed in speeds.items() if speed.device is not None}
    tables = {rank: {number: i for i, number in enumerate(steps.numbers)} for rank, steps in known.items()}
    common = set.intersection(*map(set, tables.values())) if len(known) == len(speeds) and known else set()
    numbers = sorted(number for number in common if number > MOST_WARM_UP)
    exposed = {rank: _exposed_ms(steps) for rank, steps in known.items()}
    if len(numbers) < MIN_USABLE or None in exposed.values():
        return None
    ranks = {rank: _columns(known[rank], exposed[rank] or 0.0, [tables[rank][n] for n in numbers]) for rank in known}
    none = (0.0,) * len(numbers)
    least = min(value or 0.0 for value in exposed.values())
    transfer = {"buffers": none, "exposed": (least,) * len(numbers), "calls": none}
    waits = {rank: waits_of(one, transfer) for rank, one in ranks.items()}
    order = list(waits)
    return JobSteps(
        numbers=tuple(numbers),
        ranks=ranks,
        transfer_ms=transfer,
        waits_ms=waits,
        critical=tuple(order[row.index(min(row))] for row in zip(*waits.values(), strict=True)),
        count=min(speed.count for speed in speeds.values()),
    )


def _exposed_ms(steps: DeviceSteps) -> float | None:
    """Return a rank's usual time from the end of backward's computation to the end of its reductions."""
    late = [ms for iteration, ms in steps.exposed_ms.items() if iteration >= USUAL_ITERATION]
    early = [ms for iteration, ms in steps.exposed_ms.items() if iteration > FIRST_ITERATION]
    return median(late or early) if late or early else None


def _columns(steps: DeviceSteps, exposed_ms: float, places: Sequence[int]) -> RankSteps:
    rows = [_parts(steps, exposed_ms, i) for i in places]
    return RankSteps(
        parts_ms={part: tuple(row[part] for row in rows) for part in rows[0]},
        cpu_ms={"data": tuple(steps.data_cpu_ms[i] for i in places)},
        reductions=tuple(steps.reductions[i] for i in places),
        backwards=tuple(steps.backwards[i] for i in places),
        input_rows=tuple(steps.input_rows[i] for i in places),
        input_numel=tuple(steps.input_numel[i] for i in places),
    )


def _parts(steps: DeviceSteps, exposed_ms: float, i: int) -> dict[str, float]:
    times = {phase: column[i] for phase, column in steps.device_ms.items()}
    host_before = steps.host_ms["before"][i]
    data = times["before"] * min(1.0, steps.data_ms[i] / host_before) if host_before else 0.0
    exposed = min(exposed_ms, times["backward"])
    return {
        "data": data,
        "host": times["before"] - data,
        "forward": times["forward"],
        "loss": times["between"],
        "backward": times["backward"] - exposed,
        "optimizer": times["optimizer"],
        "exposed": exposed,
        "buffers": 0.0,
        "calls": 0.0,
        "own": 0.0,
        "gc": min(steps.gc_ms[i], times["before"]),
        "wall": sum(times.values()),
    }
