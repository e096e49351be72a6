"""DD802: ranks take turns in being the slowest, because their steps differ in work."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.speed import BUSY_PARTS
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from .steps import mean
from .words import call_places, is_small, ms, percent, up_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .state import SpeedState
    from .steps import RankSteps

WAITED_SHARE = 0.15
"""Share of the step that the ranks wait for each other: the facts' figure."""
OFTEN = 0.25
LONG_WAIT = 0.2
"""In this share of the steps the wait must be this share of the step: a few long pauses are no imbalance."""
ONE_RANK = 0.8
"""If one rank is last more often, it is a straggler: DD610's figure."""
MOST_QUEUED = 0.02
"""If ranks wait longer for a core, other processes may be what makes them uneven. Our choice: idle machines have less.
"""
FOLLOWS = 0.7
"""Correlation from which the time of a step follows the size of its input. Our choice."""


@rule("DD802", "imbalance", Severity.WARNING, "A different rank is the slowest in each step", after=("rank-zero-work",))
def check_imbalance(state: SpeedState) -> Answer:
    """Report ranks that wait for each other in many steps, each time for another one.

    ## What it means

    The work of a step differs between ranks, and each step takes as long as the rank with the most. Mostly it is the
    length of inputs: one rank gets a long text or a large image, the others short ones.

    ## How it is recognized

    The median rank waits for others for 15 % of the time, and in a quarter of the steps for over 20 % of the step. No
    rank is the last in 80 % of these steps. If the time that ranks compute follows the size of their inputs, that is
    said.

    ## How sure

    High if it follows the size of the inputs, else medium. On a busy machine ranks are uneven because they wait for
    cores. There the rule says that it cannot tell, unless the time follows the inputs.

    ## What to do

    Give ranks batches of equal work: sort by length and draw neighbors together, or fill batches up to a number of
    tokens instead of a number of samples.

    ## Example

        the ranks wait for each other, and a different rank is the slowest in each step: up to 24 % of the step
    """
    steps = state.steps
    if len(steps.ranks) < 2 or (small := is_small(state)):
        return skipped("there is only one rank" if len(steps.ranks) < 2 else small)
    walls = steps.walls_ms
    waited = [median(row) if len(row) > 2 else max(row) for row in zip(*steps.waits_ms.values(), strict=True)]
    share = sum(waited) / sum(walls)
    long = [i for i, wait in enumerate(waited) if wait > LONG_WAIT * walls[i]]
    seen = f"ranks wait for each other {percent(share)} of the time, and for long in {len(long)} of {len(walls)} steps"
    if share < WAITED_SHARE or len(long) < OFTEN * len(walls):
        return passed(seen)
    rank, last = Counter(steps.critical[i] for i in long).most_common(1)[0]
    if last > ONE_RANK * len(long):
        return passed(f"{seen}, mostly for rank {rank}")
    follows = median(_correlation(one) for one in steps.ranks.values())
    if follows < FOLLOWS and (queued := _queued(state)) > MOST_QUEUED:
        return unknown(f"{seen}; they also wait for a core {percent(queued)} of the time, as on a busy machine")
    problem = Problem(
        confidence=Confidence.HIGH if follows >= FOLLOWS else Confidence.MEDIUM,
        summary=f"the ranks wait for each other, and a different rank is the slowest in each step: {up_to(share)}",
        ranks=tuple(steps.ranks),
        where=call_places(state, {"ddp_forward"}),
        evidence=(
            seen,
            f"rank {rank} is most often last, in {percent(last / len(long))} of them",
            _sizes(steps.ranks.values(), follows) if follows >= FOLLOWS else _spread(state),
        ),
        fix="give all ranks batches with equal work: sort by length and batch neighbors together, or fill batches to "
        "a fixed number of tokens",
        share=share,
    )
    return judged([problem])


def _queued(state: SpeedState) -> float:
    """Return the largest share of the time that a rank's main thread waited for a core."""
    times = [rank.speed.core_time for rank in state.ranks if rank.speed is not None]
    return max((time.queued_ms / max(1.0, time.elapsed_ms) for time in times if time is not None), default=1.0)


def _busy(rank: RankSteps) -> list[float]:
    return [sum(values) for values in zip(*(rank.parts_ms[part] for part in BUSY_PARTS), strict=True)]


def _correlation(rank: RankSteps) -> float:
    """Return how far the time that a rank computes follows the size of its inputs, from -1 to 1."""
    return correlation(_busy(rank), rank.input_numel)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Pearson's correlation, or 0 if one of the columns is constant."""
    a, b = mean(one), mean(other)
    spread = sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in other)
    return sum((x - a) * (y - b) for x, y in zip(one, other, strict=True)) / spread**0.5 if spread else 0.0


def _sizes(ranks: Iterable[RankSteps], follows: float) -> str:
    sizes = [size for rank in ranks for size in rank.input_numel]
    return f"step time depends on input size (correlation {follows:.2f}): {min(sizes):,} to {max(sizes):,} elements"


def _spread(state: SpeedState) -> str:
    busy = [value for rank in state.steps.ranks.values() for value in _busy(rank)]
    return f"a rank computes for {ms(min(busy))} to {ms(max(busy))} per step"
