"""What the rules of speed judge: the steps of a job's ranks side by side, and where the time of a step goes.

No common clock is needed. All ranks end a collective together, and the last one to arrive does not wait. So the
shortest time that any rank spends in it is the transfer, and what a rank spends beyond that is waiting.

On GPUs, CUDA events measure one step in twenty. DDP's timers show how long the reduction ran after backward's
computation, in other iterations than these steps, so each step gets the median of its rank. Before forward the GPU is
idle or copies the input; that time is split between data loading and other host code in proportion to the host's
time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Place
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.steps import BUSY_PARTS, SHARED_PARTS, Budget, Phase, PhaseRow
from ddpdoctor.rules.answers import Answer, passed, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import Job, Rank
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.model.steps import DeviceSteps, Speed, StepParts

MIN_STEPS = 20  # runs with fewer steps are not judged: TraceML's figure, and that of DD610
MIN_USABLE = 10  # So many must remain without warm-up and without looks at replicas. Our choice: half of them.
WARM_UP_SHARE = 0.1
# The first tenth of the steps, at most ten, is left out: torch allocates, and DDP rebuilds its buckets.
MOST_WARM_UP = 10
# A step in which ddpdoctor's own looks take more is left out. Our choice: smaller looks change no figure. The second
# limit holds if too few steps remain, as in a short run on a busy machine.
LOOK_SHARES = (0.02, 0.1)
ONE_IN = 20  # on a GPU one step in so many is measured
FIRST_ITERATION = 3  # DDP has its buckets built anew by then
# From here on torch reads DDP's timers in each hundredth iteration. The first ten include the warm-up.
USUAL_ITERATION = 100
# Our choice: neighboring steps are alike, so a run is resampled by blocks of them. Twenty are enough to resample.
BLOCKS = 20
SHARE = 0.1  # share of the step that a cause must take to be worth a finding: TraceML's warning
# Below this step, communication is the latency of a toy job, and no setting changes it: the figure.
MIN_STEP_MS = 10.0
# A job is as quick as the fastest tenth of its steps. Our choice: on a busy machine the others wait for cores.
QUICK = 0.1
OFTEN = 0.25  # a line is named if it was sampled this often, compared with the most frequent one: DD610's figure
HOST_PHASES = frozenset({Phase.BEFORE, Phase.BETWEEN})  # outside forward and backward
# By part of a step: its name in the budget. The last three are transfer only.
NAMES = {
    "data": "data loading", "host": "other host code", "forward": "forward", "loss": "loss", "backward": "backward",
    "optimizer": "optimizer", "exposed": "gradient reduction", "buffers": "buffer broadcast",
    "calls": "script's collectives",
}  # fmt: skip
PARTS = (*BUSY_PARTS, *SHARED_PARTS, "own", "gc", "wall")  # what a ring says of each step
WAITING = "waiting for ranks"
FRAMEWORKS = ("lightning", "transformers", "accelerate")
# By setting and framework, "" for DDP itself: the line that a user changes.
KNOBS = {
    "bucket_cap": {
        "": "DistributedDataParallel(..., bucket_cap_mb={mib})",
        "lightning": "DDPStrategy(bucket_cap_mb={mib})",
        "transformers": "TrainingArguments(ddp_bucket_cap_mb={mib})",
        "accelerate": "DistributedDataParallelKwargs(bucket_cap_mb={mib})",
    },
    "buffers_off": {
        "": "DistributedDataParallel(broadcast_buffers=False)",
        "lightning": "DDPStrategy(broadcast_buffers=False)",
        "transformers": "TrainingArguments(ddp_broadcast_buffers=False)",
        "accelerate": "DistributedDataParallelKwargs(broadcast_buffers=False)",
    },
    "find_unused_off": {
        "": "remove find_unused_parameters=True",
        "lightning": 'use strategy="ddp" instead of "ddp_find_unused_parameters_true"',
        "transformers": "TrainingArguments(ddp_find_unused_parameters=False)",
        "accelerate": "DistributedDataParallelKwargs(find_unused_parameters=False)",
    },
    "workers": {
        "": "DataLoader(num_workers={count})",
        "transformers": "TrainingArguments(dataloader_num_workers={count})",
    },
    "persistent": {
        "": "DataLoader(persistent_workers=True)",
        "transformers": "TrainingArguments(dataloader_persistent_workers=True)",
    },
    "accumulate": {
        "": "run the forward and backward of all micro-batches but the last inside `with model.no_sync():`",
        "lightning": "Trainer(accumulate_grad_batches=N), which skips the reductions in between",
        "accelerate": "Accelerator(gradient_accumulation_steps=N), and `with accelerator.accumulate(model):` around "
        "each batch",
    },
}


def knob_of(knobs: Mapping[str, str], frameworks: Collection[str]) -> str:
    """Return the text of the framework in use, else the one for DDP itself, else ""."""
    return next((knobs[name] for name in FRAMEWORKS if name in frameworks and name in knobs), knobs.get("", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps of one rank, in the order of ``JobSteps.numbers``."""

    # By part. Where a ring does not split "backward" from "exposed", they are estimated: see ``align``.
    parts_ms: Mapping[str, tuple[float, ...]]
    cpu_ms: Mapping[str, tuple[float, ...]]
    reductions: tuple[int, ...]
    backwards: tuple[int, ...]
    input_rows: tuple[int, ...]
    input_numel: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSteps:
    """The steps that all ranks of a group have: an even sample of the run, without warm-up and ddpdoctor's sampling."""

    numbers: tuple[int, ...]
    ranks: Mapping[int, RankSteps]
    # For each of ``SHARED_PARTS``: the shortest time on any rank, step by step.
    transfer_ms: Mapping[str, tuple[float, ...]]
    waits_ms: Mapping[int, tuple[float, ...]]  # what each rank waited for others, step by step
    critical: tuple[int, ...]  # the rank that waited least, step by step
    count: int  # steps of the whole run

    @property
    def walls_ms(self) -> tuple[float, ...]:
        return self.on_critical("wall")

    def on_critical(self, part: str) -> tuple[float, ...]:
        """Return a part of each step ("wall": all of it), on its critical rank."""
        return tuple(self.ranks[rank].parts_ms[part][i] for i, rank in enumerate(self.critical))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedState:
    """A job whose speed is known."""

    job: Job
    ranks: tuple[Rank, ...]  # The ranks that end their steps together. Each has a ``speed``.
    steps: JobSteps
    budget: Budget
    # The same with the longest steps of the run, which stand for themselves only; None if ``steps`` has all steps.
    longest: JobSteps | None = None
    total_ms: float = 0.0  # the time of all steps of the run

    def rank(self, number: int) -> Rank:
        return next(rank for rank in self.ranks if rank.rank == number)

    def share(self, saved_ms: float) -> float:
        """Return what a saving in the mean step is as a share of the step."""
        return saved_ms / self.budget.wall_ms if self.budget.wall_ms else 0.0

    def of_step(self, part_ms: float) -> str:
        """Return "12 ms of a 130 ms step"."""
        return f"{ms(part_ms)} of a {ms(self.budget.wall_ms)} step"

    def knob(self, setting: str, **values: object) -> str:
        """Return how to change a setting in the framework in use."""
        known = [rank.speed.surroundings for rank in self.ranks if rank.speed is not None]
        loaded = {name for context in known if context is not None for name in context.frameworks}
        return knob_of(KNOBS[setting], loaded).format(**values)

    def places(self, find: Callable[[Rank], Frame | None]) -> tuple[Place, ...]:
        return places_of((rank.rank, find(rank)) for rank in self.ranks)

    def is_small(self) -> str:
        """Return why the job is too small to judge its communication, or "" if it is not."""
        walls = sorted(self.steps.walls_ms)
        wall = walls[int(QUICK * len(walls))]
        limit = f"{MIN_STEP_MS:.0f} ms: call latency dominates"
        return f"a step takes {ms(wall)}, less than {limit}" if wall < MIN_STEP_MS else ""

    def too_little(self, share: float, seen: str, least: float = SHARE) -> Answer | None:
        """Return the answer about a cost that is too small to report, or a job too small to judge; None: continue."""
        if share < least:
            return passed(seen)
        small = self.is_small()
        return skipped(small) if small else None


def build_speed_state(job: Job) -> SpeedState | Unread:
    """Return what is known of a job's speed, or why nothing is."""
    groups: dict[object, dict[int, Speed]] = {}
    for rank in job.ranks:
        if rank.speed is not None:
            groups.setdefault((rank.speed.ends_with, rank.speed.group), {})[rank.rank] = rank.speed
    speeds = max(groups.values(), key=len, default={})
    is_device = any(speed.device is not None for speed in speeds.values())
    steps = align_devices(speeds) if is_device else align(speeds)
    count = max((speed.count for speed in speeds.values()), default=0)
    if not speeds:
        why = "no rank recorded the steps of a training loop"
    elif steps is None and is_device:
        why = f"too few steps were measured on the GPUs: about {ONE_IN * MIN_USABLE} steps are needed"
    elif steps is None and count < MIN_STEPS:
        why = f"{count} steps are too few: at least {MIN_STEPS} are needed"
    elif steps is None:
        why = f"fewer than {MIN_USABLE} of {count} steps are usable after dropping warm-up and ddpdoctor's own sampling"
    elif not is_device and not any(any(speed.kept.is_split) for speed in speeds.values()):
        why = "the time of gradient reduction was not measured"
    else:
        is_sample = not is_device and any(speed.sample_bits for speed in speeds.values())
        totals = (speed.totals["wall"].sum_ms for speed in speeds.values() if "wall" in speed.totals)
        return SpeedState(
            job=job,
            ranks=tuple(rank for rank in job.ranks if rank.rank in speeds),
            steps=steps,
            budget=make_budget(steps, speeds, is_device=is_device),
            longest=align(speeds, longest=True) if is_sample else None,
            total_ms=max(totals, default=0.0),
        )
    return Unread(why=Why.ABSENT, reason=why)


def align(speeds: Mapping[int, Speed], *, longest: bool = False) -> JobSteps | None:
    """Return the common steps of ranks, or None if there are too few.

    With ``longest`` they include the longest steps of the run in addition to the even sample.
    """
    tables = {
        rank: {n: i for i, n in enumerate(speed.kept.numbers) if longest or speed.kept.is_even[i]}
        for rank, speed in speeds.items()
    }
    common = sorted(set.intersection(*map(set, tables.values()))) if tables else []
    last = max(common, default=0)
    warm_up = min(MOST_WARM_UP, int(WARM_UP_SHARE * last) + 1)
    parts = {rank: speed.kept.parts_ms for rank, speed in speeds.items()}
    for most in LOOK_SHARES:
        looks = ((parts[rank]["own"], parts[rank]["wall"], at) for rank, at in tables.items())
        looked_at = {n for own, wall, at in looks for n in common if own[at[n]] > most * wall[at[n]]}
        numbers = [number for number in common if number > warm_up and number not in looked_at]
        if len(numbers) < MIN_USABLE or last < MIN_STEPS:
            continue
        ranks: dict[int, RankSteps] = {}
        for rank, speed in speeds.items():
            kept, places = speed.kept, [tables[rank][number] for number in numbers]
            own_ms = {part: tuple(kept.parts_ms[part][i] for i in places) for part in PARTS}
            # Of long runs the recorder splits backward's computation from the exposed reduction in some steps only. In
            # the others the computation is taken to be as long as usual.
            if split_ms := [kept.parts_ms["backward"][i] for i in places if kept.is_split[i]]:
                usual_ms = median(split_ms)
                both = zip(own_ms["backward"], own_ms["exposed"], (kept.is_split[i] for i in places), strict=True)
                split = [
                    (b, e) if is_split else (min(b, usual_ms), e + max(0.0, b - usual_ms)) for b, e, is_split in both
                ]
                own_ms["backward"], own_ms["exposed"] = zip(*split, strict=True)
            cpu_ms = {name: tuple(values[i] for i in places) for name, values in kept.cpu_ms.items()}
            ranks[rank] = RankSteps(parts_ms=own_ms, cpu_ms=cpu_ms, **_counts(kept, places))
        rows = {part: zip(*(rank.parts_ms[part] for rank in ranks.values()), strict=True) for part in SHARED_PARTS}
        return _side_by_side(numbers, ranks, {part: tuple(map(min, row)) for part, row in rows.items()}, speeds)
    return None


def align_devices(speeds: Mapping[int, Speed]) -> JobSteps | None:
    """Return the common steps of ranks that are measured on their GPUs, or None if they are too few or not all are."""
    known = {rank: speed.device for rank, speed in speeds.items() if speed.device is not None}
    tables = {rank: {number: i for i, number in enumerate(steps.numbers)} for rank, steps in known.items()}
    common = set.intersection(*map(set, tables.values())) if len(known) == len(speeds) and known else set()
    numbers = sorted(number for number in common if number > MOST_WARM_UP)
    if len(numbers) < MIN_USABLE:
        return None
    exposed_ms: dict[int, float] = {}
    ranks: dict[int, RankSteps] = {}
    for rank, steps in known.items():
        late = [ms for iteration, ms in steps.exposed_ms.items() if iteration >= USUAL_ITERATION]
        early = [ms for iteration, ms in steps.exposed_ms.items() if iteration > FIRST_ITERATION]
        if not late and not early:
            return None
        exposed_ms[rank] = median(late or early)
        places, rows = [tables[rank][number] for number in numbers], []
        for i in places:
            times = {phase: column[i] for phase, column in steps.device_ms.items()}
            host_before = steps.host_ms["before"][i]
            data = times["before"] * min(1.0, steps.data_ms[i] / host_before) if host_before else 0.0
            exposed = min(exposed_ms[rank], times["backward"])
            rows.append({
                "data": data, "host": times["before"] - data, "forward": times["forward"], "loss": times["between"],
                "backward": times["backward"] - exposed, "optimizer": times["optimizer"], "exposed": exposed,
                "buffers": 0.0, "calls": 0.0, "own": 0.0, "gc": min(steps.gc_ms[i], times["before"]),
                "wall": sum(times.values()),
            })  # fmt: skip
        ranks[rank] = RankSteps(
            parts_ms={part: tuple(row[part] for row in rows) for part in rows[0]},
            cpu_ms={"data": tuple(steps.data_cpu_ms[i] for i in places)},
            **_counts(steps, places),
        )
    none = (0.0,) * len(numbers)
    transfer = {"buffers": none, "exposed": (min(exposed_ms.values()),) * len(numbers), "calls": none}
    return _side_by_side(numbers, ranks, transfer, speeds)


def _side_by_side(
    numbers: Sequence[int], ranks: Mapping[int, RankSteps], transfer: Mapping[str, tuple[float, ...]],
    speeds: Mapping[int, Speed],
) -> JobSteps:  # fmt: skip
    """Return steps with the time that each rank waits for others: what it spends beyond the transfer."""
    least = tuple(map(sum, zip(*(transfer[part] for part in SHARED_PARTS), strict=True)))
    waits = {}
    for rank, timing in ranks.items():
        spent = map(sum, zip(*(timing.parts_ms[part] for part in SHARED_PARTS), strict=True))
        waits[rank] = tuple(own - shortest for own, shortest in zip(spent, least, strict=True))
    order = list(waits)
    return JobSteps(
        numbers=tuple(numbers), ranks=ranks, transfer_ms=transfer, waits_ms=waits,
        critical=tuple(order[row.index(min(row))] for row in zip(*waits.values(), strict=True)),
        count=min(speed.count for speed in speeds.values()),
    )  # fmt: skip


def _counts(steps: StepParts | DeviceSteps, places: Sequence[int]) -> dict[str, tuple[int, ...]]:
    names = ("reductions", "backwards", "input_rows", "input_numel")
    return {name: tuple(getattr(steps, name)[i] for i in places) for name in names}


def make_budget(steps: JobSteps, speeds: Mapping[int, Speed], *, is_device: bool = False) -> Budget:
    """Return where the time of a mean step goes: on the critical rank, the median rank and the worst rank."""

    def row(phase: str, columns_ms: Mapping[int, Sequence[float]]) -> PhaseRow:
        means = {rank: mean(column) for rank, column in columns_ms.items()}
        worst = max(means, key=lambda rank: means[rank])
        on_critical = [columns_ms[rank][i] for i, rank in enumerate(steps.critical)]
        return PhaseRow(
            phase=phase, critical_ms=mean(on_critical), median_ms=median(means.values()), worst_ms=means[worst],
            worst_rank=worst, blocks_ms=_blocks(on_critical), ranks_ms=tuple(means.values()),
        )  # fmt: skip

    ranks, walls = steps.ranks, steps.walls_ms
    wall = mean(walls)
    waiting = median(map(mean, steps.waits_ms.values()))
    rows = sum(mean(rank.input_rows) for rank in ranks.values())
    looked = (speed for speed in speeds.values() if speed.count and "own" in speed.totals)
    own = (speed.totals["own"].sum_ms / speed.count for speed in looked)
    return Budget(
        phases=(
            *(row(NAMES[part], {rank: timing.parts_ms[part] for rank, timing in ranks.items()}) for part in BUSY_PARTS),
            *(row(NAMES[part], dict.fromkeys(ranks, transfer)) for part, transfer in steps.transfer_ms.items()),
            row(WAITING, steps.waits_ms),
        ),
        wall_ms=wall,
        steps=len(steps.numbers),
        count=steps.count,
        communication_share=sum(map(mean, steps.transfer_ms.values())) / wall if wall else 0.0,
        waiting_share=waiting / wall if wall else 0.0,
        samples_per_s=1e3 * rows / wall if rows and wall else None,
        own_ms=max(own, default=0.0),
        is_device=is_device,
        blocks_ms=_blocks(walls),
        ranks=tuple(ranks),
    )


def _blocks(values_ms: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of each block. Blocks have equal lengths, to within one step."""
    count = min(BLOCKS, len(values_ms))
    ends = [len(values_ms) * i // count for i in range(count + 1)] if count else []
    return tuple(mean(values_ms[start:end]) for start, end in pairwise(ends))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def usual(values: Sequence[float]) -> float:
    """Return the mean without a few very long times: all that are not 0 count as their median.

    Sizes of messages and the work of a rank change little from step to step, and how long a rank waits for a core
    changes a lot.
    """
    known = [value for value in values if value > 0]
    return min(mean(values), median(known) * len(known) / len(values)) if known else 0.0


def ms(value: float) -> str:
    """Return a time: "12.3 ms"."""
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def up_to(share: float, *, of: str = "step") -> str:
    return f"up to {share:.0%} of the {of}"


def places_of(lines: Iterable[tuple[int, Frame | None]]) -> tuple[Place, ...]:
    return tuple(
        Place(rank=rank, file=frame.file, line=frame.line, function=frame.function)
        for rank, frame in lines
        if frame is not None
    )


def call_site(rank: Rank, *ops: str) -> Frame | None:
    """Return the line that makes most calls of these operations on a rank, or None if none is recorded."""
    log = rank.recent_calls
    sites = Counter(call.site for call in log.of_kinds(lambda kind: kind.op in ops) if call.site is not None)
    return sites.most_common(1)[0][0] if sites else None


def host_lines(rank: Rank, others: Iterable[Rank] = (), phases: Collection[Phase] = HOST_PHASES) -> tuple[Frame, ...]:
    """Return up to two lines at which a rank was sampled outside forward and backward, more often than the others.

    A line that calls a model, as in an evaluation, comes before the line in the model. With ``phases`` it is lines of
    these phases. In forward every line is below one that calls the model, so such lines are left out there.
    """

    def samples(rank: Rank) -> Counter[tuple[Frame, bool]]:
        found: Counter[tuple[Frame, bool]] = Counter()
        for line in rank.lines_seen:
            if line.phase in phases and not line.in_child and (line.phase in HOST_PHASES or not line.calls_module):
                found[line.frame, line.calls_module] += line.times
        return found

    compared = [samples(other) for other in others]
    own = samples(rank)
    beyond = {line: times - sum(peer[line] for peer in compared) / max(1, len(compared)) for line, times in own.items()}
    most = max(beyond.values(), default=0.0)
    often = [line for line, times in beyond.items() if times > 0 and times >= OFTEN * most]
    often.sort(key=lambda line: (not line[1], -beyond[line]))
    return tuple(dict.fromkeys(frame for frame, _ in often))[:2]
