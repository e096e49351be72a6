"""Puts the steps of several ranks side by side, and splits what they share into transfer and waiting.

No common clock is needed. All ranks end a collective together, and the last one to come waits for nobody. So the
shortest time that any rank spends in it is the transfer, and what a rank spends beyond that is waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.speed import BUSY_PARTS, SHARED_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.speed import Speed, StepParts

MIN_STEPS = 20
"""Runs with fewer steps are not judged: TraceML's figure, and that of DD610."""
MIN_USABLE = 10
"""So many must remain without warm-up and without looks at replicas. Our choice: half of them."""
WARM_UP_SHARE = 0.1
MOST_WARM_UP = 10
"""The first tenth of the steps, at most ten, is left out: torch allocates, and DDP rebuilds its buckets."""
LOOK_SHARES = (0.02, 0.1)
"""A step in which ddpdoctor's own looks take more is left out. Our choice: smaller looks change no figure. The second
limit holds if too few steps remain, as in a short run on a busy machine."""
_PARTS = (*BUSY_PARTS, *SHARED_PARTS, "own", "gc", "wall")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps of one rank, in the order of ``JobSteps.numbers``."""

    parts_ms: Mapping[str, tuple[float, ...]]
    """By part. Where a ring does not split "backward" from "exposed", they are estimated: see ``_split``."""
    cpu_ms: Mapping[str, tuple[float, ...]]
    reductions: tuple[int, ...]
    backwards: tuple[int, ...]
    input_rows: tuple[int, ...]
    input_numel: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSteps:
    """The steps that all ranks of a group have: an even sample of the run, without warm-up and without looks."""

    numbers: tuple[int, ...]
    ranks: Mapping[int, RankSteps]
    transfer_ms: Mapping[str, tuple[float, ...]]
    """For each of ``SHARED_PARTS``: the shortest time on any rank, step by step."""
    waits_ms: Mapping[int, tuple[float, ...]]
    """What each rank waited for others, step by step."""
    critical: tuple[int, ...]
    """The rank that waited least, step by step."""
    count: int
    """Steps of the whole run."""

    @property
    def walls_ms(self) -> tuple[float, ...]:
        """The length of each step, on its critical rank."""
        return tuple(self.ranks[rank].parts_ms["wall"][i] for i, rank in enumerate(self.critical))

    @property
    def wall_ms(self) -> float:
        """The mean step."""
        return mean(self.walls_ms)


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def usual(values: Sequence[float]) -> float:
    """Return the mean without a few very long times: all that are not 0 count as their median.

    Sizes of messages and the work of a rank change little from step to step, and how long a rank waits for a core
    changes a lot.
    """
    known = [value for value in values if value > 0]
    return min(mean(values), median(known) * len(known) / len(values)) if known else 0.0


def largest_group(ranks: Iterable[Rank]) -> dict[int, Speed]:
    """Return the ranks that end their steps together, by number; if there are several such groups, the largest."""
    groups: dict[object, dict[int, Speed]] = {}
    for rank in ranks:
        if rank.speed is not None:
            groups.setdefault((rank.speed.ends_with, rank.speed.group), {})[rank.rank] = rank.speed
    return max(groups.values(), key=len, default={})


def align(speeds: Mapping[int, Speed], *, longest: bool = False) -> JobSteps | None:
    """Return the common steps of ranks, or None if there are too few.

    With ``longest`` they include the longest steps of the run besides the even sample.
    """
    tables = {rank: _places(speed.kept, longest=longest) for rank, speed in speeds.items()}
    common = set.intersection(*map(set, tables.values())) if tables else set()
    usable = (_usable(sorted(common), tables, speeds, limit) for limit in LOOK_SHARES)
    numbers: list[int] = next((found for found in usable if len(found) >= MIN_USABLE), [])
    if max(common, default=0) < MIN_STEPS or not numbers:
        return None
    ranks = {rank: _columns(speed.kept, [tables[rank][n] for n in numbers]) for rank, speed in speeds.items()}
    transfer = {
        part: tuple(map(min, zip(*(one.parts_ms[part] for one in ranks.values()), strict=True)))
        for part in SHARED_PARTS
    }
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


def _places(parts: StepParts, *, longest: bool) -> dict[int, int]:
    """Return the places of the steps of the even sample, or of all kept steps, by number."""
    return {number: i for i, number in enumerate(parts.numbers) if longest or parts.is_even[i]}


def _usable(
    numbers: list[int], tables: Mapping[int, Mapping[int, int]], speeds: Mapping[int, Speed], look_share: float
) -> list[int]:
    warm_up = min(MOST_WARM_UP, int(WARM_UP_SHARE * max(numbers, default=0)) + 1)

    def is_looked_at(number: int) -> bool:
        return any(
            speeds[rank].kept.parts_ms["own"][at[number]] > look_share * speeds[rank].kept.parts_ms["wall"][at[number]]
            for rank, at in tables.items()
        )

    return [number for number in numbers if number > warm_up and not is_looked_at(number)]


def _columns(parts: StepParts, places: Sequence[int]) -> RankSteps:
    chosen = {part: tuple(parts.parts_ms[part][i] for i in places) for part in _PARTS}
    is_split = [parts.is_split[i] for i in places]
    chosen["backward"], chosen["exposed"] = _split(chosen["backward"], chosen["exposed"], is_split)
    return RankSteps(
        parts_ms=chosen,
        cpu_ms={name: tuple(values[i] for i in places) for name, values in parts.cpu_ms.items()},
        reductions=tuple(parts.reductions[i] for i in places),
        backwards=tuple(parts.backwards[i] for i in places),
        input_rows=tuple(parts.input_rows[i] for i in places),
        input_numel=tuple(parts.input_numel[i] for i in places),
    )


def _split(
    backward_ms: Sequence[float], exposed_ms: Sequence[float], is_split: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return backward's computation and the exposed reduction of each step.

    Of long runs the recorder reads only some steps. In the others the computation is taken to be as long as usual.
    """
    known = [value for value, split in zip(backward_ms, is_split, strict=True) if split]
    if not known:
        return tuple(backward_ms), tuple(exposed_ms)
    usual = median(known)
    rows = [
        (value, exposed) if split else (min(value, usual), exposed + max(0.0, value - usual))
        for value, exposed, split in zip(backward_ms, exposed_ms, is_split, strict=True)
    ]
    backward, exposed = zip(*rows, strict=True)
    return backward, exposed


def waits_of(rank: RankSteps, transfer_ms: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    """Return what a rank waits for others, step by step: what it spends beyond the transfer."""
    beyond = [
        [own - least for own, least in zip(rank.parts_ms[part], transfer_ms[part], strict=True)]
        for part in SHARED_PARTS
    ]
    return tuple(map(sum, zip(*beyond, strict=True)))
