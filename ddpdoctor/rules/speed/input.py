"""DD801: the ranks wait for their data loaders, and how many workers would keep up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from statistics import median, median_low
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.tuning import PredictedStep
from ddpdoctor.rules.answers import Answer, found, passed
from ddpdoctor.rules.registry import rule

from .state import MIN_STEPS, SHARE, call_site, mean, ms, places_of, up_to

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.stacks import Frame

    from .state import SpeedState

# The share of a step that making a batch must take, divided by the workers, to limit the job: the facts' figure.
STARVED = 0.9
# From this share of processor time, making a batch is computation, and below it waiting for files. Our choice.
COMPUTES = 0.5
# Functions of a script's dataset that the loader calls in the rank itself, without workers.
MAKING = frozenset({"__getitem__", "__getitems__", "__iter__", "__next__"})


@rule("DD801", "input-bound", Severity.WARNING, "All ranks wait for their data loaders", after=("cpu-oversubscribed",))
def check_input(state: SpeedState) -> Answer:
    """Report a job whose ranks all wait for data in a large part of each step."""
    steps = state.steps
    critical_ms = mean(steps.on_critical("data"))
    median_ms = median_low(mean(times.parts_ms["data"]) for times in steps.ranks.values())
    critical, usual = state.share(critical_ms), state.share(median_ms)
    seen = f"waiting for data takes {critical:.0%} of the step on the critical rank, {usual:.0%} on the median rank"
    if not are_starved(state) and min(critical_ms, median_ms) < SHARE * state.budget.wall_ms:
        return passed(seen)
    loading = _loading(state, median_ms)
    wanted = loading.wanted
    share = state.share(loading.saved_ms(wanted, max(critical_ms, median_ms)))
    if share < SHARE / 2:
        return passed(f"{seen}; more workers would not help")
    if wanted <= loading.workers:
        fix = f"keep workers between epochs ({state.knob('persistent')}), and prefetch more batches"
    elif lacking := loading.lacks_cores(wanted):
        fix = f"make batches cheaper to load (cache, decode once, smaller files): {lacking}"
    else:
        enough = "enough to load a batch during the rest of the step; more workers do not help"
        fix = f"{state.knob('workers', count=wanted)}: {enough}"
    lines = []
    for rank in state.ranks:
        loader = call_site(rank, "next_batch")
        lines += [(rank.rank, _making_line(rank, loader)), (rank.rank, loader)]
    took = f"the batches of a step take {ms(loading.make_ms)} to load"
    how = f"{1 - loading.cpu_share:.0%} of it waiting, for example for files"
    if loading.cpu_share >= COMPUTES:
        how = f"{loading.cpu_share:.0%} of it CPU time"
    who = f"a rank has {loading.workers} workers" if loading.workers else "the rank itself loads them"
    return found(
        summary=f"all ranks wait for their data: {up_to(share)}",
        ranks=tuple(steps.ranks),
        where=places_of(lines),
        evidence=(seen, f"{took} ({how}); {who}; the rest of the step takes {ms(loading.rest_ms)}"),
        fix=fix,
        share=share,
    )


def predict_workers(state: SpeedState, count: int | None = None) -> PredictedStep | None:
    """Return the step with as many loader workers as keep up with it, or None if the ranks do not wait for data.

    A step with W workers takes the time of its other work, or that of a batch divided by W, whichever is longer.
    ``count`` gives another number of workers.
    """
    if not state.steps.ranks:
        return None
    waited_ms = median_low(mean(rank.parts_ms["data"]) for rank in state.steps.ranks.values())
    loading = _loading(state, waited_ms)
    wanted = loading.wanted if count is None else count
    if wanted <= loading.workers or (state.share(waited_ms) < SHARE / 2 and not are_starved(state)):
        return None
    predicted = PredictedStep(setting=f"workers={wanted}", change=state.knob("workers", count=wanted))
    if lacking := loading.lacks_cores(wanted):
        return replace(predicted, reason=lacking)
    high, low = sorted((1 - state.share(loading.saved_ms(n, waited_ms)) for n in (wanted, wanted + 1)), reverse=True)
    assumes = f"a batch also takes {ms(loading.make_ms)} in a worker"
    return replace(predicted, ratio=high, low=low, high=high, assumes=assumes)


def are_starved(state: SpeedState) -> bool:
    """Return whether the workers of all ranks are always busy."""
    for rank in state.ranks:
        made = rank.fetch_times
        if made is None or made.batches < MIN_STEPS or not made.workers:
            return False
        if made.batch_ms * _batches_a_step(rank) / made.workers < STARVED * state.budget.wall_ms:
            return False
    return True


def _batches_a_step(rank: Rank) -> float:
    return rank.batches / rank.steps if rank.steps and rank.batches else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loading:
    make_ms: float  # the time that one process needs for the batches of a step
    workers: int  # loader workers of each rank; 0: the rank itself makes its batches
    cpu_share: float  # the share of ``make_ms`` that is processor time
    rest_ms: float  # the step without data
    wall_ms: float
    ranks_of_host: int
    cores: int  # of a host; 0: unknown

    @property
    def wanted(self) -> int:
        """The workers with which the loader keeps up with the rest of the step."""
        return max(1, ceil(self.make_ms / max(self.rest_ms, 1e-3)))

    def saved_ms(self, workers: int, waited_ms: float) -> float:
        """Return what this many workers save of a step in which a rank waits this long for data."""
        after = max(self.rest_ms, self.make_ms / max(workers, self.workers))
        saved = max(0.0, self.wall_ms - after)
        return saved if self.workers else min(waited_ms, saved)

    def lacks_cores(self, workers: int) -> str:
        """Return the reason if this many workers would need more cores than there are, or ""."""
        needed = workers * self.ranks_of_host * self.cpu_share
        if self.cpu_share < COMPUTES or not self.cores or needed <= self.cores:
            return ""
        return f"{workers} workers per rank would keep up, but they need {needed:.0f} cores, and there are {self.cores}"


def _loading(state: SpeedState, waited_ms: float) -> _Loading:
    wall_ms, ranks = state.budget.wall_ms, state.steps.ranks
    around = [rank.speed.surroundings for rank in state.ranks if rank.speed and rank.speed.surroundings]
    cores = min((context.cores for context in around), default=0)
    made = [
        (times.batch_ms * _batches_a_step(rank), times)
        for rank in state.ranks
        if (times := rank.fetch_times) is not None and times.workers and times.batches
    ]
    if len(made) == len(state.ranks):
        make_ms, workers = median(ms for ms, _ in made), min(times.workers or 0 for _, times in made)
        cpu_share = median(times.cpu_share for _, times in made)
        # Without data, and without waiting for ranks that wait for theirs.
        lost = median(mean(times.parts_ms["data"]) + mean(state.steps.waits_ms[rank]) for rank, times in ranks.items())
        rest_ms = max(1e-3, wall_ms - lost)
    else:
        make_ms, workers, rest_ms = waited_ms, 0, wall_ms - waited_ms
        cpu_ms = median(mean(rank.cpu_ms["data"]) for rank in ranks.values())
        cpu_share = cpu_ms / waited_ms if waited_ms else 0.0
    return _Loading(
        make_ms=make_ms, workers=workers, cpu_share=cpu_share, rest_ms=rest_ms, wall_ms=wall_ms, cores=cores,
        ranks_of_host=max(Counter(rank.host for rank in state.ranks).values()),
    )  # fmt: skip


def _making_line(rank: Rank, loader: Frame | None) -> Frame | None:
    """Return the line at which a rank's batches are made: in its workers, or in its own loader; None if not seen.

    ``loader`` is the line that takes batches. An idle forked worker still has it on its stack. A spawned worker first
    runs the script's module, which makes no batch.
    """
    lines: Counter[Frame] = Counter()
    taken = (loader.file, loader.line) if loader is not None else None
    for line in rank.lines_seen:
        frame = line.frame
        if (frame.file, frame.line) == taken or frame.function == "<module>" or line.calls_module:
            continue
        if line.in_child or frame.function in MAKING:
            lines[frame] += line.times
    return lines.most_common(1)[0][0] if lines else None
