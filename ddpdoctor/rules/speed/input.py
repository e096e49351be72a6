"""DD801: the ranks wait for their data loaders."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from statistics import median, median_low
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.predictions import PredictedStep
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.registry import rule

from .models import knob
from .steps import MIN_STEPS, mean
from .words import SHARE, call_site, making_line, ms, percent, place, up_to

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.steps import FetchTimes

    from .state import SpeedState

WORKERS = {"": "DataLoader(num_workers={})", "transformers": "TrainingArguments(dataloader_num_workers={})"}
PERSISTENT = {
    "": "DataLoader(persistent_workers=True)",
    "transformers": "TrainingArguments(dataloader_persistent_workers=True)",
}
STARVED = 0.9
"""The share of a step that making a batch must take, divided by the workers, to limit the job: the facts' figure."""
COMPUTES = 0.5
"""From this share of processor time, making a batch is computation, and below it waiting for files. Our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """How the ranks of a job get their batches."""

    make_ms: float
    """The time that one process needs for the batches of a step."""
    workers: int
    """Loader workers of each rank; 0: the rank itself makes its batches."""
    cpu_share: float
    """The share of ``make_ms`` that is processor time."""
    rest_ms: float
    """The step without data."""


@rule("DD801", "input-bound", Severity.WARNING, "All ranks wait for their data loaders", after=("cpu-oversubscribed",))
def check_input(state: SpeedState) -> Answer:
    """Report a job whose ranks all wait for data in a large part of each step.

    ## What it means

    The model could train faster than the loaders deliver batches. Faster GPUs and other settings of DDP would change
    nothing.

    ## How it is recognized

    The recorder times the loader's `__next__` on each rank. It must be 10 % of the step on the rank that the others
    wait for, and on the median rank too: one rank with slow data is a straggler.

    Loaders with workers need a second look. If all of them are equally slow, whichever rank is behind waits in its
    loader, and the others already have a batch and wait in the reduction for it. That looks like one slow rank. So the
    recorder also times how long each worker takes to make a batch. If that time, divided by the number of workers, is
    90 % of the step or more on all ranks, the job is bound by its input.

    ## How sure

    High: loaders and workers are timed.

    ## What to do

    Make batches in as many workers as keep up with the rest of the step, and not in more: the time of one batch divided
    by the rest of the step. Where making a batch takes processor time, more workers need free cores. Where it waits for
    files, more workers help also without them. `persistent_workers=True` keeps workers for the next epoch.

    ## Example

        all ranks wait for their data: up to 64 % of the step
    """
    steps = state.steps
    data = {rank: mean(one.parts_ms["data"]) for rank, one in steps.ranks.items()}
    critical_ms = mean([steps.ranks[rank].parts_ms["data"][i] for i, rank in enumerate(steps.critical)])
    median_ms = median_low(data.values())
    starved = are_starved(state)
    shares = percent(state.share(critical_ms)), percent(state.share(median_ms))
    seen = f"waiting for data takes {shares[0]} of the step on the critical rank, {shares[1]} on the median rank"
    if not starved and min(critical_ms, median_ms) < SHARE * state.budget.wall_ms:
        return passed(seen)
    found = _input(state, median_ms)
    waited_ms = max(critical_ms, median_ms)
    wanted = _wanted_workers(found)
    share = state.share(_saved_ms(state, found, wanted, waited_ms))
    if share < SHARE / 2:
        return passed(f"{seen}; more workers would not help")
    problem = Problem(
        summary=f"all ranks wait for their data: {up_to(share)}",
        ranks=tuple(steps.ranks),
        where=_places(state),
        evidence=(seen, _describe(found)),
        fix=_fix(state, found, wanted),
        share=share,
    )
    return judged([problem])


def predict_workers(state: SpeedState, count: int | None = None) -> PredictedStep | None:
    """Return the step with as many loader workers as keep up with it, or None if the ranks do not wait for data.

    A step with W workers takes what else it has to do, or the time of a batch divided by W, whichever is longer.
    ``count`` gives another number of workers.
    """
    if not state.steps.ranks:
        return None
    waited_ms = median_low(mean(one.parts_ms["data"]) for one in state.steps.ranks.values())
    found = _input(state, waited_ms)
    wanted = _wanted_workers(found) if count is None else count
    if wanted <= found.workers or (state.share(waited_ms) < SHARE / 2 and not are_starved(state)):
        return None
    predicted = PredictedStep(setting=f"workers={wanted}", change=knob(state, WORKERS).format(wanted))
    if lacking := _lacks_cores(state, found, wanted):
        return replace(predicted, reason=lacking)
    saved = _saved_ms(state, found, wanted, waited_ms), _saved_ms(state, found, wanted + 1, waited_ms)
    low, high = (1 - state.share(max(saved))), (1 - state.share(min(saved)))
    return replace(
        predicted, ratio=high, low=low, high=high, assumes=f"a batch also takes {ms(found.make_ms)} in a worker"
    )  # fmt: skip


def workers_to_try(state: SpeedState | None) -> tuple[int, int]:
    """Return the number of loader workers that is predicted to keep up, and twice as many.

    Without such a prediction, that is the present number, which a trial tries with ``persistent_workers``, or one.
    """
    predicted = predict_workers(state) if state is not None else None
    if predicted is not None and predicted.ratio is not None:
        count = int(predicted.setting.partition("=")[2])
    else:
        known = [rank.fetch_times.workers or 0 for rank in state.ranks if rank.fetch_times] if state is not None else []
        count = max(1, min(known, default=0))
    return count, 2 * count


def _lacks_cores(state: SpeedState, found: _Input, wanted: int) -> str:
    """Return that so many workers would need more cores than there are, or ""."""
    around = [rank.speed.surroundings for rank in state.ranks if rank.speed and rank.speed.surroundings]
    cores = min((one.cores for one in around), default=0)
    needed = wanted * _ranks_of_a_host(state) * found.cpu_share
    if found.cpu_share < COMPUTES or not cores or needed <= cores:
        return ""
    return f"{wanted} workers per rank would keep up, but they need {needed:.0f} cores, and there are {cores}"


def _ranks_of_a_host(state: SpeedState) -> int:
    return max(Counter(rank.host for rank in state.ranks).values())


def are_starved(state: SpeedState) -> bool:
    """Return whether the workers of all ranks are at work all the time."""
    shares = []
    for rank in state.ranks:
        made = rank.fetch_times
        if made is None or made.batches < MIN_STEPS or not made.workers:
            return False
        shares.append(made.batch_ms * _batches_a_step(rank) / made.workers)
    return min(shares) >= STARVED * state.budget.wall_ms


def _batches_a_step(rank: Rank) -> float:
    return rank.batches / rank.steps if rank.steps and rank.batches else 1.0


def _input(state: SpeedState, median_ms: float) -> _Input:
    """Return how batches are made on the median rank."""
    times: list[tuple[Rank, FetchTimes]] = [
        (rank, rank.fetch_times)
        for rank in state.ranks
        if rank.fetch_times is not None and rank.fetch_times.workers and rank.fetch_times.batches
    ]
    rest_ms = state.budget.wall_ms - median_ms
    if len(times) == len(state.ranks):
        made = median(one.batch_ms * _batches_a_step(rank) for rank, one in times)
        cpu = median(one.cpu_share for _, one in times)
        workers = min(one.workers or 0 for _, one in times)
        return _Input(make_ms=made, workers=workers, cpu_share=cpu, rest_ms=_busy_ms(state))
    cpu_ms = median(mean(one.cpu_ms["data"]) for one in state.steps.ranks.values())
    return _Input(make_ms=median_ms, workers=0, cpu_share=cpu_ms / median_ms if median_ms else 0.0, rest_ms=rest_ms)


def _busy_ms(state: SpeedState) -> float:
    """Return the step without data and without waiting for ranks that wait for theirs."""
    walls, steps = state.budget.wall_ms, state.steps
    lost = [mean(one.parts_ms["data"]) + mean(steps.waits_ms[rank]) for rank, one in steps.ranks.items()]
    return max(1e-3, walls - median(lost))


def _wanted_workers(found: _Input) -> int:
    """Return the workers with which the loader keeps up with the rest of the step."""
    return max(1, ceil(found.make_ms / max(found.rest_ms, 1e-3)))


def _saved_ms(state: SpeedState, found: _Input, wanted: int, waited_ms: float) -> float:
    if not found.workers:
        after = max(found.rest_ms, found.make_ms / wanted)
        return min(waited_ms, max(0.0, state.budget.wall_ms - after))
    return max(0.0, state.budget.wall_ms - max(found.rest_ms, found.make_ms / max(wanted, found.workers)))


def _describe(found: _Input) -> str:
    how = "CPU time" if found.cpu_share >= COMPUTES else "waiting, for example for files"
    share = found.cpu_share if found.cpu_share >= COMPUTES else 1 - found.cpu_share
    workers = f"a rank has {found.workers} workers" if found.workers else "the rank itself loads them"
    return (
        f"the batches of a step take {ms(found.make_ms)} to load ({percent(share)} of it {how}); {workers}; the rest "
        f"of the step takes {ms(found.rest_ms)}"
    )


def _fix(state: SpeedState, found: _Input, wanted: int) -> str:
    if wanted <= found.workers:
        return f"keep workers between epochs ({knob(state, PERSISTENT)}), and prefetch more batches"
    if lacking := _lacks_cores(state, found, wanted):
        return f"make batches cheaper to load (cache, decode once, smaller files): {lacking}"
    workers = knob(state, WORKERS).format(wanted)
    return f"{workers}: enough to load a batch during the rest of the step; more workers do not help"


def _places(state: SpeedState) -> tuple[Place, ...]:
    """Return for each rank the line that makes samples, where it was seen, and the line that takes batches."""
    found = []
    for rank in state.ranks:
        loader = call_site(rank, {"next_batch"})
        key = (loader.file, loader.line) if loader is not None else None
        making = making_line(rank, key)
        found += [place(rank.rank, frame) for frame in (making, loader) if frame is not None]
    return tuple(found)
