"""DD802, DD809 to DD812, DD814 and DD815: what a rank spends time on while the others, or its GPU, wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.steps import BUSY_PARTS, Phase
from ddpdoctor.rules.answers import Answer, found, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from .input import are_starved
from .state import HOST_PHASES, MOST_WARM_UP, SHARE, call_site, host_lines, mean, ms, places_of, up_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.stacks import Frame

    from .state import JobSteps, RankSteps, SpeedState

WAITED_SHARE = 0.15  # share of the step that the ranks wait for each other: the facts' figure
OFTEN = 0.25
# In this share of the steps the wait must be this share of the step: a few long pauses are no imbalance.
LONG_WAIT = 0.2
# If one rank is last more often, it is a straggler; the share of the lost time that one must cause: DD610's figure.
ONE_RANK = 0.8
# If ranks wait longer for a core, other processes may be what makes them uneven. Our choice: idle machines have less.
MOST_QUEUED = 0.02
FOLLOWS = 0.7  # Correlation from which the time of a step follows the size of its input. Our choice.
SLOW = 1.5  # a step over 1.5 medians is a stall
MOST_SLOW = 1 / 3  # If more steps are slow, they are no stalls. Our choice: the median must be that of the others.
MIN_STALLS = 3  # our choice: one long pause, or two, may be anything
LARGEST = 0.5  # If one pause is more than this share of all, nothing comes back time after time. Our choice.
MODEL_PARTS = ("forward", "loss", "backward", "optimizer")
# By part of the step, where a hook of the model does the work: the phase whose lines are named.
MODEL_PHASES = {"forward": frozenset({Phase.FORWARD}), "backward": frozenset({Phase.BACKWARD})}
NAMES = {"host": "host code outside forward and backward", "data": "the loader"}
# If collections are this share of what is lost, they are the cause. Our choice: then no other cause is larger.
COLLECTED = 0.5
COLLECTION_SHARE = 0.05  # the facts' figure: usual collections of young objects take far less
# A thread computes too if it waits for a core for this share of the time. Our choice: beside a busy loop on each core,
# 31 threads that multiply matrices wait 0.3 of it each, and 15 that now and then add up a few numbers 0.07.
COMPUTE_TOO = 0.15
MOST_COUNTED = 64  # the recorder asks so many threads of a process how long they waited
ALIKE = 0.5  # Ranks that lose at least this share of what the worst one loses are named with it. Our choice.
# Where the host takes this share of the GPU's time for the same phase, the GPU does nothing but follow. Our choice.
PACE = 0.9
LEAST_SHARE = 0.3  # Of the step that forward and backward must take. Our choice.


@rule("DD802", "imbalance", Severity.WARNING, "A different rank is the slowest in each step", after=("rank-zero-work",))
def check_imbalance(state: SpeedState) -> Answer:
    """Report ranks that wait for each other in many steps, each time for a different one."""
    steps, walls = state.steps, state.steps.walls_ms
    if len(steps.ranks) < 2:
        return skipped("there is only one rank")
    if small := state.is_small():
        return skipped(small)
    waited = [median(row) if len(row) > 2 else max(row) for row in zip(*steps.waits_ms.values(), strict=True)]
    share = sum(waited) / sum(walls)
    long = [i for i, wait in enumerate(waited) if wait > LONG_WAIT * walls[i]]
    seen = f"ranks wait for each other {share:.0%} of the time, and for long in {len(long)} of {len(walls)} steps"
    if share < WAITED_SHARE or len(long) < OFTEN * len(walls):
        return passed(seen)
    rank, last = Counter(steps.critical[i] for i in long).most_common(1)[0]
    if last > ONE_RANK * len(long):
        return passed(f"{seen}, mostly for rank {rank}")
    busy = {number: _sums(timing, BUSY_PARTS) for number, timing in steps.ranks.items()}
    follows = median(correlation(busy[number], timing.input_numel) for number, timing in steps.ranks.items())
    if follows >= FOLLOWS:
        sizes = [size for timing in steps.ranks.values() for size in timing.input_numel]
        why = f"{min(sizes):,} to {max(sizes):,} elements"
        why = f"step time depends on input size (correlation {follows:.2f}): {why}"
    else:
        times = [rank.speed.core_time for rank in state.ranks if rank.speed and rank.speed.core_time]
        queued = max((time.queued_ms / max(1.0, time.elapsed_ms) for time in times), default=1.0)
        if queued > MOST_QUEUED:
            return unknown(f"{seen}; they also wait for a core {queued:.0%} of the time, as on a busy machine")
        every = [value for values in busy.values() for value in values]
        why = f"a rank computes for {ms(min(every))} to {ms(max(every))} per step"
    return found(
        confidence=Confidence.HIGH if follows >= FOLLOWS else Confidence.MEDIUM,
        summary=f"the ranks wait for each other, and a different rank is the slowest in each step: {up_to(share)}",
        ranks=tuple(steps.ranks),
        where=state.places(lambda rank: call_site(rank, "ddp_forward")),
        evidence=(seen, f"rank {rank} is most often last, in {last / len(long):.0%} of them", why),
        fix="give all ranks batches with equal work: sort by length and batch neighbors together, or fill batches to "
        "a fixed number of tokens",
        share=share,
    )


def correlation(column: Sequence[float], other: Sequence[float]) -> float:
    """Return Pearson's correlation, or 0 if one of the columns is constant."""
    a, b = mean(column), mean(other)
    spread = sum((x - a) ** 2 for x in column) * sum((y - b) ** 2 for y in other)
    return sum((x - a) * (y - b) for x, y in zip(column, other, strict=True)) / spread**0.5 if spread else 0.0


def _sums(rank: RankSteps, parts: Sequence[str]) -> list[float]:
    return [sum(values) for values in zip(*(rank.parts_ms[part] for part in parts), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stalls:
    """A few steps that take much longer than the others."""

    steps: JobSteps
    places: tuple[int, ...]  # their positions in the steps
    usual_ms: float
    # By rank: how long the others waited in these steps for what it did beyond its usual work.
    lost_ms: dict[int, float]
    alike_ms: float  # what all ranks alike did in these steps beyond their usual work
    alike_data_ms: float  # the part of it in the loader
    collected_ms: float  # what garbage collections took in these steps, on the rank that came last
    total_ms: float  # the whole time that the steps stand for

    @property
    def often(self) -> str:
        return f"{len(self.places)} of {len(self.steps.numbers)} steps"

    @property
    def lengths(self) -> str:
        walls = self.steps.walls_ms
        return f"a step usually takes {ms(self.usual_ms)}, and {ms(median(walls[i] for i in self.places))}"


def _stalls(state: SpeedState) -> _Stalls | None:
    """Return the stalls of an even sample of the steps, or of the longest steps of a run in which they are rare."""
    stalls = _find_stalls(state.steps, sum(state.steps.walls_ms))
    return stalls or (_find_stalls(state.longest, state.total_ms) if state.longest is not None else None)


def _find_stalls(steps: JobSteps, total_ms: float) -> _Stalls | None:
    """Return the slow steps, and what ranks did in them beyond the usual.

    A step in which the model takes longer, as for a larger input or on a machine that is busy for a while, has no work
    beside training. How much longer is inferred from backward, in which a script has no other work.
    """
    walls = steps.walls_ms
    usual_ms = median(walls)
    slow = tuple(i for i, wall in enumerate(walls) if wall > SLOW * usual_ms)
    longer = [walls[i] - usual_ms for i in slow]
    if not MIN_STALLS <= len(slow) <= MOST_SLOW * len(walls) or max(longer) > LARGEST * sum(longer):
        return None
    beyond: dict[int, list[float]] = {}
    for rank, timing in steps.ranks.items():
        busy, model, backward = _sums(timing, BUSY_PARTS), _sums(timing, MODEL_PARTS), timing.parts_ms["backward"]
        usual_busy, usual_model, usual_backward = median(busy), median(model), median(backward)
        slower = [max(0.0, own / usual_backward - 1) if usual_backward else 0.0 for own in backward]
        rows = zip(busy, slower, strict=True)
        beyond[rank] = [max(0.0, own - usual_busy - more * usual_model) for own, more in rows]
    usual_data = {rank: median(timing.parts_ms["data"]) for rank, timing in steps.ranks.items()}
    lost: dict[int, float] = {}
    for i in slow:
        rank = steps.critical[i]
        waits = [steps.waits_ms[other][i] for other in steps.ranks if other != rank]
        lost[rank] = lost.get(rank, 0.0) + min(median(waits) if waits else 0.0, beyond[rank][i])
    data = [min(timing.parts_ms["data"][i] - usual_data[rank] for rank, timing in steps.ranks.items()) for i in slow]
    return _Stalls(
        steps=steps, places=slow, usual_ms=usual_ms, lost_ms=lost, total_ms=total_ms,
        alike_ms=sum(min(values[i] for values in beyond.values()) for i in slow),
        alike_data_ms=sum(max(0.0, time_ms) for time_ms in data),
        collected_ms=sum(steps.on_critical("gc")[i] for i in slow),
    )  # fmt: skip


@rule("DD809", "rank-zero-work", Severity.WARNING, "One rank does extra work in some steps, and the others wait for it")
def check_rank_work(state: SpeedState) -> Answer:
    """Report a rank that does extra work every few steps while all others wait for it."""
    stalls = _stalls(state)
    if stalls is None:
        return passed("no steps are repeatedly much longer than the others")
    rank = max(stalls.lost_ms, key=lambda number: stalls.lost_ms[number])
    lost = stalls.lost_ms[rank]
    share = min(1.0, lost / stalls.total_ms)
    seen = f"the others wait for one rank {share:.0%} of the time, in long steps"
    if share < SHARE or lost < ONE_RANK * sum(stalls.lost_ms.values()):
        return passed(seen)
    if stalls.collected_ms > COLLECTED * lost:
        return passed(f"{seen}; the cause is garbage collection")
    if are_starved(state):
        return passed(f"{seen}; the loader workers of all ranks are always busy")
    parts = stalls.steps.ranks[rank].parts_ms
    more_ms = {part: mean([parts[part][i] for i in stalls.places]) - median(parts[part]) for part in BUSY_PARTS}
    part = max(more_ms, key=lambda name: more_ms[name])
    others = [peer for peer in state.ranks if peer.rank != rank]
    lines = host_lines(state.rank(rank), others, MODEL_PHASES.get(part, HOST_PHASES))
    return found(
        confidence=Confidence.HIGH if lines else Confidence.MEDIUM,
        summary=f"rank {rank} holds up the others in {stalls.often}{_at(lines)}: {up_to(share, of='time')}",
        ranks=(rank,),
        where=places_of((rank, frame) for frame in lines),
        evidence=(
            f"{stalls.lengths} if rank {rank} is last",
            f"rank {rank} then spends {ms(more_ms[part])} more in {NAMES.get(part, part)}",
        ),
        fix="split this work between all ranks, do it less often, or do it in the background "
        "(torch.distributed.checkpoint.async_save for checkpoints)",
        share=share,
    )


@rule("DD814", "periodic-stall", Severity.WARNING, "All ranks pause every few steps")
def check_periodic(state: SpeedState) -> Answer:
    """Report work that all ranks do at the same time every few steps, and that takes a large part of the time."""
    stalls = _stalls(state)
    if stalls is None:
        return passed("no steps are repeatedly much longer than the others")
    own = stalls.alike_ms - stalls.alike_data_ms
    share = min(1.0, own / stalls.total_ms)
    seen = f"all ranks pause for {max(0.0, share):.0%} of the time, in long steps"
    if share < SHARE or stalls.alike_data_ms > own:
        return passed(seen)
    if stalls.collected_ms > COLLECTED * own:
        return passed(f"{seen}; the cause is garbage collection")
    lines = {rank.rank: frames[0] for rank in state.ranks if (frames := host_lines(rank))}
    return found(
        confidence=Confidence.HIGH if lines else Confidence.MEDIUM,
        summary=f"all ranks pause in {stalls.often}{_at(list(lines.values()))}: {up_to(share, of='time')}",
        ranks=tuple(stalls.steps.ranks),
        where=places_of(lines.items()),
        evidence=(f"{stalls.lengths} with a pause",),
        fix="do this work less often, split it between the ranks, or do it in the background",
        share=share,
    )


def _at(lines: Sequence[Frame]) -> str:
    return f", in {lines[0].function} ({lines[0].file.rpartition('/')[2]}:{lines[0].line})" if lines else ""


@rule("DD810", "gc-pauses", Severity.WARNING, "Python's garbage collector takes a large part of the step")
def check_collections(state: SpeedState) -> Answer:
    """Report ranks on which garbage collection takes a large part of the time."""
    lost = {rank: mean(timing.parts_ms["gc"]) for rank, timing in state.steps.ranks.items()}
    critical_ms = mean(state.steps.on_critical("gc"))
    share = state.share(critical_ms)
    seen = f"collections take {state.of_step(critical_ms)} on the critical rank"
    if share < COLLECTION_SHARE:
        return passed(seen)
    ranks = tuple(rank for rank, value in lost.items() if value >= ALIKE * max(lost.values()))
    # The line that was noted; else the one at which the rank was sampled most.
    lines = (
        (rank.rank, (rank.speed and rank.speed.collected_at) or next(iter(host_lines(rank)), None))
        for rank in map(state.rank, ranks)
    )
    return found(
        summary=f"Python's garbage collector takes {share:.0%} of the step",
        ranks=ranks,
        where=places_of(lines),
        evidence=(seen,),
        fix="call gc.freeze() after setup, and call gc.collect() less often and in the same step on all ranks",
        share=share,
    )


@rule("DD811", "cpu-oversubscribed", Severity.WARNING, "The ranks on a host have more threads than cores")
def check_threads(state: SpeedState) -> Answer:
    """Report ranks whose threads together exceed the cores that they may use, and that wait for cores."""
    known = [(rank, rank.speed.surroundings, rank.speed.core_time) for rank in state.ranks if rank.speed is not None]
    rows = [(rank, about, time) for rank, about, time in known if about is not None and time is not None]
    if not rows:
        return skipped("threads and cores were not recorded")
    blamed = []
    for rank, about, _ in rows:
        local = [(other, time) for peer, other, time in rows if peer.host == rank.host]
        # How long each thread beside the main thread waits for a core.
        waits = [
            time.others_queued_ms / (min(other.threads - 1, MOST_COUNTED) * time.elapsed_ms) if time.elapsed_ms else 0.0
            for other, time in local
            if other.threads > 1
        ]
        is_over = about.threads > 1 and sum(other.threads for other, _ in local) > about.cores
        if is_over and median(waits) >= COMPUTE_TOO:
            blamed.append((rank, about))
    queued = median(time.queued_ms / max(1.0, time.elapsed_ms) for _, _, time in rows)
    seen = f"the main threads wait for a core {queued:.0%} of the time"
    if not blamed or queued < SHARE:
        return passed(seen)
    host, about = blamed[0][0].host, blamed[0][1]
    count = sum(rank.host == host for rank, _ in blamed)
    return found(
        summary=f"{count} ranks with {about.threads} threads each share {about.cores} cores: {up_to(queued)}",
        ranks=tuple(rank.rank for rank, _ in blamed),
        evidence=(seen,),
        fix=f"OMP_NUM_THREADS={max(1, about.cores // max(1, count))}, and no torch.set_num_threads above it",
        share=min(1.0, queued),
    )


@rule("DD812", "data-parallel", Severity.WARNING, "A model uses DataParallel instead of DistributedDataParallel")
def check_data_parallel(state: SpeedState) -> Answer:
    """Report a rank that trains a model in `torch.nn.DataParallel`."""
    used = ((rank.rank, seen) for rank in state.ranks if rank.speed for seen in rank.speed.data_parallel)
    wrapped = {number: seen for number, seen in used if seen.devices != 1}
    if not wrapped:
        return passed("no model uses DataParallel")
    devices = max(seen.devices for seen in wrapped.values())
    what = "which runs one process for all GPUs" if devices else "which does nothing without GPUs"
    return found(
        summary=f"the model uses DataParallel, {what}",
        ranks=tuple(wrapped),
        where=places_of((number, seen.site) for number, seen in wrapped.items()),
        evidence=(f"DataParallel has {devices} devices" if devices else "DataParallel found no GPU",),
        fix="start one process per GPU with torchrun, and wrap the model in DistributedDataParallel; "
        "`ddpdoctor explain DD812` shows the code",
        share=0.0,
    )


@rule("DD815", "host-bound", Severity.WARNING, "The GPUs wait for the host to queue their work")
def check_host(state: SpeedState) -> Answer:
    """Report jobs whose GPUs are faster than the host queues work for them."""
    measured = {rank.rank: rank.speed.device for rank in state.ranks if rank.speed is not None and rank.speed.device}
    if not state.budget.is_device or not measured:
        return skipped("no step was measured on a GPU")
    follows = True
    sums_ms = []
    for steps in measured.values():
        late = [behind for number, behind in zip(steps.numbers, steps.behind, strict=True) if number > MOST_WARM_UP]
        host, device = (
            [median(column[phase]) for phase in ("forward", "backward")] for column in (steps.host_ms, steps.device_ms)
        )
        follows &= not median(late) and all(cpu_ms >= PACE * other for cpu_ms, other in zip(host, device, strict=True))
        sums_ms.append((sum(host), sum(device)))
    host_ms, device_ms = (median(column) for column in zip(*sums_ms, strict=True))
    share = state.share(device_ms)
    seen = f"forward and backward take {ms(host_ms)} on the host and {ms(device_ms)} on the GPU"
    if share < LEAST_SHARE or not follows:
        return passed(seen)
    return found(
        summary=f"the GPUs wait for the host: {seen}",
        ranks=tuple(measured),
        evidence=(
            f"forward and backward take {share:.0%} of a {ms(state.budget.wall_ms)} step",
            "the GPU reached each mark before the host queued the next one",
        ),
        fix="use torch.compile or CUDA graphs, larger batches, fused=True in the optimizer, and fewer .item() and "
        ".cpu() calls",
        confidence=Confidence.MEDIUM,
    )
