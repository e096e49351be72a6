"""DD809 and DD814: a few steps take much longer than the others, because of one rank or of all."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.speed import BUSY_PARTS
from ddpdoctor.model.steps import Phase
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.registry import rule

from .input import are_starved
from .words import HOST_PHASES, SHARE, host_lines, ms, percent, place, up_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .state import SpeedState
    from .steps import JobSteps, RankSteps

SLOW = 1.5
"""A step over 1.5 medians is a stall."""
MOST_SLOW = 1 / 3
"""If more steps are slow, they are no stalls. Our choice: the median must be that of the others."""
MIN_STALLS = 3
"""Our choice: one long pause, or two, may be anything."""
LARGEST = 0.5
"""If one pause is more than this share of all, nothing comes back time after time. Our choice."""
MODEL_PARTS = ("forward", "loss", "backward", "optimizer")
MODEL_PHASES = {"forward": frozenset({Phase.FORWARD}), "backward": frozenset({Phase.BACKWARD})}
"""By part of the step, where a hook of the model does the work: the phase whose lines are named."""
NAMES = {"host": "host code outside forward and backward", "data": "the loader"}
COLLECTED = 0.5
"""If collections are this share of what is lost, they are the cause. Our choice: then no other cause is larger."""
ONE_RANK = 0.8
"""The share of the lost time that one rank must cause: DD610's figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stalls:
    """The slow steps of a job."""

    places: tuple[int, ...]
    """Their positions in the steps."""
    usual_ms: float
    lost_ms: dict[int, float]
    """By rank: how long the others waited in these steps for what it did beyond its usual work."""
    alike_ms: float
    """What all ranks alike did in these steps beyond their usual work."""
    collected_ms: float
    """What garbage collections took in these steps, on the rank that came last."""
    alike_data_ms: float
    """The part of it in the loader."""
    total_ms: float
    """The whole time that the steps stand for."""


def _find(steps: JobSteps, total_ms: float) -> _Stalls | None:
    walls = steps.walls_ms
    usual = median(walls)
    slow = tuple(i for i, wall in enumerate(walls) if wall > SLOW * usual)
    if not MIN_STALLS <= len(slow) <= MOST_SLOW * len(walls):
        return None
    beyond = {rank: _beyond(one) for rank, one in steps.ranks.items()}
    usual_data = {rank: median(one.parts_ms["data"]) for rank, one in steps.ranks.items()}
    lost: dict[int, float] = {}
    alike = alike_data = collected = longest = 0.0
    for i in slow:
        rank = steps.critical[i]
        waits = [steps.waits_ms[other][i] for other in steps.ranks if other != rank]
        lost[rank] = lost.get(rank, 0.0) + min(median(waits) if waits else 0.0, beyond[rank][i])
        alike += min(values[i] for values in beyond.values())
        collected += steps.ranks[rank].parts_ms["gc"][i]
        longest = max(longest, walls[i] - usual)
        alike_data += max(0.0, min(one.parts_ms["data"][i] - usual_data[other] for other, one in steps.ranks.items()))
    if longest > LARGEST * sum(walls[i] - usual for i in slow):
        return None
    return _Stalls(
        places=slow, usual_ms=usual, lost_ms=lost, alike_ms=alike, collected_ms=collected, alike_data_ms=alike_data,
        total_ms=total_ms,
    )  # fmt: skip


def _beyond(rank: RankSteps) -> list[float]:
    """Return what a rank did in each step beyond the usual.

    A step in which the model takes longer, as for a larger input or on a machine that is busy for a while, has no work
    beside training. What the model takes longer is inferred from backward, in which a script has no other work.
    """
    model = [sum(values) for values in zip(*(rank.parts_ms[part] for part in MODEL_PARTS), strict=True)]
    busy = [sum(values) for values in zip(*(rank.parts_ms[part] for part in BUSY_PARTS), strict=True)]
    backward = rank.parts_ms["backward"]
    usual_busy, usual_model, usual_backward = median(busy), median(model), median(backward)
    slower = [max(0.0, own / usual_backward - 1) if usual_backward else 0.0 for own in backward]
    return [max(0.0, own - usual_busy - more * usual_model) for own, more in zip(busy, slower, strict=True)]


def _stalls(state: SpeedState) -> tuple[JobSteps, _Stalls] | None:
    """Return the stalls of an even sample of the steps, or of the longest steps of a run in which they are rare."""
    found = _find(state.steps, sum(state.steps.walls_ms))
    if found is not None:
        return state.steps, found
    if state.longest is None:
        return None
    whole = _find(state.longest, state.total_ms)
    return (state.longest, whole) if whole is not None else None


@rule("DD809", "rank-zero-work", Severity.WARNING, "One rank does extra work in some steps, and the others wait for it")
def check_rank_work(state: SpeedState) -> Answer:
    """Report a rank that does something of its own every few steps while all others wait for it.

    ## What it means

    Every few steps one rank, mostly rank 0, evaluates, saves a checkpoint or writes logs. The other ranks go on to the
    next reduction and wait there until it comes. The time is lost on all of them.

    ## How it is recognized

    A stall is a step that takes over 1.5 times as long as the median step. There must be at least three, and at most a
    third of the steps. In them one rank must come last and cost the others at least 10 % of the time of all steps. What
    the model itself takes longer in such a step does not count, nor do garbage collections. The lines are those at
    which this rank was sampled outside forward and backward, and the others were not; or in forward, if that is where
    it loses the time, as in a hook of the model.

    ## How sure

    High if a line of the script was seen, else medium.

    ## What to do

    Evaluate on all ranks, each on its share of the data, and reduce the result. Save less often, or in the background
    (`torch.distributed.checkpoint.async_save`). Log every N steps.

    ## Example

        rank 0 holds up the others in 10 of 80 steps, in accuracy (train.py:31): up to 43 % of the time
    """
    found = _stalls(state)
    if found is None:
        return passed("no steps are repeatedly much longer than the others")
    steps, stalls = found
    rank = max(stalls.lost_ms, key=lambda number: stalls.lost_ms[number])
    lost = stalls.lost_ms[rank]
    share = min(1.0, lost / stalls.total_ms)
    seen = f"the others wait for one rank {percent(share)} of the time, in long steps"
    if share < SHARE or lost < ONE_RANK * sum(stalls.lost_ms.values()):
        return passed(seen)
    if stalls.collected_ms > COLLECTED * lost:
        return passed(f"{seen}; the cause is garbage collection")
    if are_starved(state):
        return passed(f"{seen}; the loader workers of all ranks are always busy")
    others = [one for one in state.ranks if one.rank != rank]
    part, more_ms = _where_spent(steps, stalls.places, rank)
    lines = host_lines(state.rank(rank), others, MODEL_PHASES.get(part, HOST_PHASES))
    at = f", in {lines[0].function} ({lines[0].file.rpartition('/')[2]}:{lines[0].line})" if lines else ""
    often = f"{len(stalls.places)} of {len(steps.numbers)} steps"
    problem = Problem(
        confidence=Confidence.HIGH if lines else Confidence.MEDIUM,
        summary=f"rank {rank} holds up the others in {often}{at}: {up_to(share, of='time')}",
        ranks=(rank,),
        where=tuple(place(rank, frame) for frame in lines),
        evidence=(
            f"a step usually takes {ms(stalls.usual_ms)}, and {_longest(steps, stalls.places)} if rank {rank} is last",
            f"rank {rank} then spends {ms(more_ms)} more in {NAMES.get(part, part)}",
        ),
        fix="split this work between all ranks, do it less often, or do it in the background "
        "(torch.distributed.checkpoint.async_save for checkpoints)",
        share=share,
    )
    return judged([problem])


@rule("DD814", "periodic-stall", Severity.WARNING, "All ranks pause every few steps")
def check_periodic(state: SpeedState) -> Answer:
    """Report work that all ranks do at the same time every few steps, and that takes a large part of the time.

    ## What it means

    Every few steps all ranks do something beside training: they save a checkpoint each, evaluate all of the data, or
    restart their loaders. No rank waits for another, so nothing looks wrong in a single step.

    ## How it is recognized

    Stalls are found as for `rank-zero-work`. What all ranks alike do in them beyond the usual must be 10 % of the time
    of all steps, and not in the loader (then the job is bound by its input). A busy machine or a larger input makes the
    model slower too, so what it takes longer in proportion to backward does not count, nor do garbage collections.

    ## How sure

    High if a line of the script was seen, else medium.

    ## What to do

    Do it less often, split it between the ranks, or do it in the background.

    ## Example

        all ranks pause in 10 of 80 steps, in save (train.py:40): up to 35 % of the time
    """
    found = _stalls(state)
    if found is None:
        return passed("no steps are repeatedly much longer than the others")
    steps, stalls = found
    own = stalls.alike_ms - stalls.alike_data_ms
    share = min(1.0, own / stalls.total_ms)
    seen = f"all ranks pause for {percent(max(0.0, share))} of the time, in long steps"
    if share < SHARE or stalls.alike_data_ms > own:
        return passed(seen)
    if stalls.collected_ms > COLLECTED * own:
        return passed(f"{seen}; the cause is garbage collection")
    lines = {rank.rank: host_lines(rank)[:1] for rank in state.ranks}
    first = next((frames[0] for frames in lines.values() if frames), None)
    at = f", in {first.function} ({first.file.rpartition('/')[2]}:{first.line})" if first is not None else ""
    often = f"{len(stalls.places)} of {len(steps.numbers)} steps"
    problem = Problem(
        confidence=Confidence.HIGH if first is not None else Confidence.MEDIUM,
        summary=f"all ranks pause in {often}{at}: {up_to(share, of='time')}",
        ranks=tuple(steps.ranks),
        where=tuple(place(number, frame) for number, frames in lines.items() for frame in frames),
        evidence=(f"a step usually takes {ms(stalls.usual_ms)}, and {_longest(steps, stalls.places)} with a pause",),
        fix="do this work less often, split it between the ranks, or do it in the background",
        share=share,
    )
    return judged([problem])


def _longest(steps: JobSteps, places: Sequence[int]) -> str:
    return ms(median(steps.walls_ms[i] for i in places))


def _where_spent(steps: JobSteps, places: Sequence[int], rank: int) -> tuple[str, float]:
    """Return the part of the step in which a rank does most beyond the usual in these steps, and how much."""
    parts = steps.ranks[rank].parts_ms
    beyond = {part: sum(parts[part][i] for i in places) / len(places) - median(parts[part]) for part in BUSY_PARTS}
    part = max(beyond, key=lambda name: beyond[name])
    return part, beyond[part]
