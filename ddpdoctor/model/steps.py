"""Steps of training, and the time budget of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.stacks import Frame

RECENT_STEPS = 20  # how many of the last steps count for a rank's pace right now
# The parts of a step in which a rank needs no other rank.
BUSY_PARTS = ("data", "host", "forward", "loss", "backward", "optimizer")
SHARED_PARTS = ("buffers", "exposed", "calls")  # the parts that need all ranks: each of them is transfer and waiting


class Phase(IntEnum):
    """The parts of a step, in their order."""

    BEFORE = 0  # from the end of the previous step to forward: optimizer, data, host code
    FORWARD = 1
    BETWEEN = 2  # from the end of forward to backward: the loss
    BACKWARD = 3  # backward, including the reduction of gradients if there is one


class StepEnd(str, Enum):
    """The event that ends a step."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    REDUCTION = "reduction of gradients"
    OPTIMIZER = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The last steps of a rank as columns, oldest first, in microseconds. Forward is recorded only for DDP models."""

    ends_with: StepEnd
    group: str  # the group whose members end their steps together; empty for the group of all ranks
    numbers: Sequence[int]  # From 1. Steps whose waiting time is unknown are left out.
    phases_us: Sequence[Sequence[int]]  # one column per phase
    waits_us: Sequence[Sequence[int]]  # the time of each phase spent in collectives, one column per phase
    ended_ns: Sequence[int] = ()  # when each step ended, by the clock of the recorded calls; empty if not known
    unknown: int = 0  # how many steps were left out


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSeen:
    """How often a rank's main thread was sampled at a user's line in a phase, outside collectives."""

    frame: Frame
    phase: Phase
    times: int
    in_child: bool  # the sample is from a child process of the rank, such as a DataLoader worker
    calls_module: bool = False  # not the innermost of the user's lines, but one that called a model or library


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """The work of all loader workers of a rank together."""

    batches: int
    making_ms: float  # time they took to make batches, summed over the workers
    pauses_ms: float  # Time they waited for work. A single pause counts at most as long as making the next batch.
    cpu_ms: float = 0.0  # processor time of making batches
    workers: int | None = None  # workers that a loader has at a time; None if that is not known

    @property
    def busy_share(self) -> float:
        """The share of time that they worked. It is near 1 if they limit how fast the rank gets batches."""
        return self.making_ms / (self.making_ms + self.pauses_ms) if self.making_ms else 0.0

    @property
    def cpu_share(self) -> float:
        """The share of making a batch that takes a processor. The rest waits, as for files."""
        return min(1.0, self.cpu_ms / self.making_ms) if self.making_ms else 0.0

    @property
    def batch_ms(self) -> float:
        """The time that one worker takes to make a batch."""
        return self.making_ms / self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A rank's usual step: the medians over its steps, in milliseconds."""

    steps: int
    step_ms: float
    busy_ms: tuple[float, ...]  # one value per phase, without waiting
    waited_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentPace:
    """A rank's pace over its last steps."""

    number: int  # number of the last step
    ended_ns: int  # when it ended
    step_ms: float  # from the end of one step to the end of the next, on average
    waits_share: float  # the share of these steps in which the rank waited for others: 0 to 1


def recent_pace(times: StepTimes) -> RecentPace | None:
    """Return a rank's pace over its last steps (some may be missing in between), or None without known ends."""
    if not times.numbers or not times.ended_ns:
        return None
    numbers, ended_ns = times.numbers[-RECENT_STEPS:], times.ended_ns[-RECENT_STEPS:]
    totals, waits = step_totals(times)[-RECENT_STEPS:], wait_totals(times)[-RECENT_STEPS:]
    steps = numbers[-1] - numbers[0]
    step_ms = (ended_ns[-1] - ended_ns[0]) / steps / 1e6 if steps else totals[-1] / 1e3
    share = min(1.0, sum(waits) / sum(totals)) if sum(totals) else 0.0
    return RecentPace(number=numbers[-1], ended_ns=ended_ns[-1], step_ms=step_ms, waits_share=share)


def step_totals(times: StepTimes) -> tuple[int, ...]:
    """Return how long each step took, in microseconds."""
    return tuple(map(sum, zip(*times.phases_us, strict=True)))


def wait_totals(times: StepTimes) -> tuple[int, ...]:
    """Return how long the rank waited for others in each step, in microseconds."""
    return tuple(map(sum, zip(*times.waits_us, strict=True)))


def pace_of(times: StepTimes) -> Pace | None:
    """Return a rank's usual step, or None if it has no complete step."""
    if not times.numbers:
        return None
    busy = [
        median(max(0, spent - waited) for spent, waited in zip(*columns, strict=True))
        for columns in zip(times.phases_us, times.waits_us, strict=True)
    ]
    return Pace(
        steps=len(times.numbers),
        step_ms=median(step_totals(times)) / 1e3,
        busy_ms=tuple(value / 1e3 for value in busy),
        waited_ms=median(wait_totals(times)) / 1e3,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTimes:
    """Medians over the backwards of one DDP model on one rank that were read. Times count from backward's start."""

    number: int  # of the model among those of its rank, by their first reduction, from 1
    group: str  # name of the process group that DDP reduces in
    sizes_bytes: tuple[int, ...]  # in the model's order; in a very large one neighbors are folded
    ready_ms: tuple[float | None, ...]  # by the same tensors; None if it usually had no gradient
    bucket_bytes: tuple[int, ...]  # the buckets' sizes, in the order in which they are reduced
    compute_end_ms: float  # when the computation of backward ended
    exposed_ms: float  # from there to the end of backward: the reduction that nothing hid, and waiting for slower ranks
    readings: int  # backwards that were read
    reductions: int  # backwards that could have been read
    cap_bytes: int | None = None  # DDP's ``bucket_cap_mb``; the first bucket of the default has another
    finds_unused: bool | None = None
    static_graph: bool | None = None
    bucket_view: bool | None = None
    syncs_buffers: bool | None = None
    unused_bytes: int = 0  # the most bytes of parameters without a gradient in one of the readings
    same_unused: bool | None = None  # in all steps; DDP looks only with ``find_unused_parameters``


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Steps of one rank as columns, by number. With ``BUSY_PARTS``, ``SHARED_PARTS`` and "own" a step adds up."""

    numbers: Sequence[int]
    # One column for each part, and for "own" (ddpdoctor's own looks), "gc" (inside the others) and "wall".
    parts_ms: Mapping[str, Sequence[float]]
    is_even: Sequence[int]  # of the even sample of the run; the others are kept because they are long
    is_split: Sequence[int]  # it is known when backward's computation ended; else "backward" includes "exposed"
    # Processor time of the main thread: "before", "forward", "between", "backward" (the phases), and "data".
    cpu_ms: Mapping[str, Sequence[float]]
    reductions: Sequence[int]  # reductions in each step, of the DDP model that reduced most often
    backwards: Sequence[int]
    input_rows: Sequence[int]  # the first dimension of forward's first tensor, summed over the step: the batch size
    input_numel: Sequence[int]  # the number of elements of these tensors
    ended_ns: Sequence[int] = ()  # when each step ended, by the clock of the recorded calls; empty if not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTotal:
    """One part of the steps over the whole run."""

    sum_ms: float
    bins: Sequence[int]  # bin ``i``: the steps in which it took ``2 ** (i - 1)`` to ``2 ** i`` microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTime:
    """The main thread's time since the first step, as the kernel counts it."""

    elapsed_ms: float
    on_core_ms: float
    queued_ms: float  # it could run, and another thread had the core
    others_queued_ms: float = 0.0  # the same for up to 64 other threads of the process, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a rank had when it trained."""

    threads: int  # of torch, for one operation
    cores: int  # on which the process may run
    frameworks: tuple[str, ...] = ()  # of lightning, transformers (its Trainer) and accelerate, outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSeen:
    """A model that the script wrapped in ``torch.nn.DataParallel``."""

    devices: int
    site: Frame | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandReduced:
    """Gradients that the script gave to all_reduce one by one."""

    gradients: int
    site: Frame | None
    copied: bool = False  # a copy of each was reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps:
    """Steps of one rank that CUDA events measured on its GPU, as columns: one in twenty, the same on all ranks."""

    numbers: Sequence[int]
    # By phase: "before" (idle, or copies of the input), "forward", "between", "backward", "optimizer".
    device_ms: Mapping[str, Sequence[float]]
    host_ms: Mapping[str, Sequence[float]]  # what the host took to queue the same
    data_ms: Sequence[float]  # the host's wait for a batch, a part of "before" there
    data_cpu_ms: Sequence[float]
    gc_ms: Sequence[float]
    input_rows: Sequence[int]
    input_numel: Sequence[int]
    reductions: Sequence[int]
    backwards: Sequence[int]
    behind: Sequence[int]  # changes of phase before which the GPU was not done; 0 where it waits for the host
    exposed_ms: Mapping[int, float]  # by DDP's iteration: from backward's computation to the reductions' end


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of one rank."""

    ends_with: StepEnd
    group: str  # the group whose members end their steps together; empty for the group of all ranks
    count: int  # steps in the whole run
    sample_bits: int  # ``kept`` has an even sample of one step in ``2 ** sample_bits``, and the longest steps
    kept: StepParts  # steps of the whole run
    # By part, of the whole run. "unsplit" is the sum of "backward" and "exposed" in steps that are not split.
    totals: Mapping[str, PartTotal] = field(default_factory=dict)
    core_time: CoreTime | None = None
    surroundings: Surroundings | None = None
    data_parallel: tuple[DataParallelSeen, ...] = ()
    hand_reduced: HandReduced | None = None
    collected_at: Frame | None = None  # the user's line at which garbage collections took most time, if any took long
    device: DeviceSteps | None = None  # None on a CPU; on a GPU the other figures are the host's


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One row of the time budget: means over the steps, in milliseconds."""

    phase: str
    critical_ms: float  # on the rank that the others wait for, which may be another one in each step
    median_ms: float  # on the median rank
    worst_ms: float
    worst_rank: int
    blocks_ms: tuple[float, ...] = ()  # like ``critical_ms``, in each block of consecutive steps
    ranks_ms: tuple[float, ...] = ()  # on each of ``Budget.ranks``


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSettings:
    """What the speed of a job depends on, as it was set. None: unknown, or not equal on all ranks."""

    rows: float | None = None  # of a rank's batches in the mean step: forward's first dimension
    reductions: float | None = None  # in the mean step, of the DDP model that reduces most often
    threads: int | None = None
    cores: int | None = None
    workers: int | None = None  # of the loader that each rank trains with
    gradient_bytes: int | None = None
    buckets: int | None = None
    bucket_cap_bytes: int | None = None
    finds_unused: bool | None = None
    static_graph: bool | None = None
    bucket_view: bool | None = None
    syncs_buffers: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkUse:
    """What a job's reductions use of the network. Figures are bus bandwidths, as in nccl-tests."""

    step_bytes: int  # gradients that are reduced in a step
    used_gb_s: float  # the mean over the whole step
    limit_gb_s: float | None  # what the network could carry, or None if that is not known
    source: str  # who says so: "allreduce-bench", "the link eth0 of 1 Gbit/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Where the time of a step goes. The critical column adds up to the wall time of a step."""

    phases: tuple[PhaseRow, ...]
    wall_ms: float  # the mean step, from the end of one to the end of the next
    steps: int  # steps that it is the mean of
    count: int  # steps of the whole run
    communication_share: float  # reductions, broadcasts of buffers, the script's collectives
    waiting_share: float  # what the median rank waits for slower ones, as a share of the step
    samples_per_s: float | None = None  # over all ranks, by forward's first dimension
    own_ms: float = 0.0  # What ddpdoctor's own looks at replicas take, per step of the whole run. It is in no phase.
    is_device: bool = False  # whether these are times of the GPUs
    overlap: float | None = None  # the share of the reduction that backward hides, or None if it is not known
    blocks_ms: tuple[float, ...] = ()  # like ``wall_ms``, in each block of consecutive steps
    ranks: tuple[int, ...] = ()

    @property
    def efficiency_bound(self) -> float:
        """The upper bound of the scaling efficiency: the share of the step without communication and waiting."""
        return max(0.0, 1 - self.communication_share - self.waiting_share)
