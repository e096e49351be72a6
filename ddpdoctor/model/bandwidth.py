"""What `allreduce-bench` is asked for, what it measured, and what follows from it. No I/O.

Sizes are bytes, times microseconds, bandwidths GB/s with GB = 1e9 bytes. Conventions are nccl-tests'
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Absence is ``None``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence


class Collective(str, Enum):
    """What can be measured; the values are torch.distributed's names, without ``_into_tensor`` and the like."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"

    @property
    def reduces(self) -> bool:
        """Whether it has a reduction operator."""
        return self in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE}


class Mode(str, Enum):
    """How calls follow each other."""

    LATENCY = "latency"
    """A barrier before each call; each call is timed by itself, from its start to its completion on this rank."""
    THROUGHPUT = "throughput"
    """A batch of calls back to back is timed, and its time divided by their number, as nccl-tests does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be measured. All ranks must have the same: ``difference`` in the agreement names who does not."""

    collectives: tuple[Collective, ...] = (Collective.ALL_REDUCE,)
    dtypes: tuple[str, ...] = ("float32",)
    redop: str = "sum"
    modes: tuple[Mode, ...] = (Mode.LATENCY, Mode.THROUGHPUT)
    min_size_bytes: int = 1024
    max_size_bytes: int = 2**30
    factor: int = 2
    """Each size is this many times the one before it; the largest is always among them."""
    backend: str = "gloo"
    in_place: bool = False
    cold: bool = False
    """Rotate buffers beyond the last-level cache, instead of using warm ones."""
    budget_s: float = 30.0
    """For measuring and checking the sweep, without start-up, and without --pairs and --by-node, which have as much."""
    iterations: int | None = None
    """Timed calls a case; None: as many as the budget allows."""
    warmup: int | None = None
    pairs: bool = False
    by_node: bool = False
    hang_timeout_s: float = 60.0
    """How long no call may complete before the bench is taken to hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of the bench."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    """"cpu", or "cuda:3"."""
    device_name: str
    """As torch gives it ("NVIDIA H100 80GB HBM3"); the processor's name for the CPU."""
    cores: int
    """Processors that this process may use."""
    version: str
    """Of ddpdoctor."""
    torch: str
    nccl: str | None = None
    driver: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of an allow-list that bear on the measurement."""
    gpu_ranks: int = 1
    """How many ranks of the bench use its GPU. Above 1 nothing that is measured is the figure of a link."""


def describe_shared_gpus(members: Sequence[Member]) -> str:
    """Say which ranks share a GPU, and what that does to the figures; "" where every rank has one of its own."""
    sharing = [member.rank for member in members if member.gpu_ranks > 1]
    return f"{rank_list(sharing)} share a GPU: these figures are not those of any link" if sharing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure."""

    collective: Collective
    dtype: str
    redop: str | None
    """None where the collective reduces nothing."""
    mode: Mode
    in_place: bool
    size_bytes: int
    """S of nccl-tests, after rounding to what can be shared out over the ranks: of all_gather the output, of
    reduce_scatter the input, of all_to_all all of a rank's data, of the others one buffer."""
    count: int
    """Elements, as nccl-tests counts them: size_bytes over the element's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A case, measured. Times are the maximum over ranks of each iteration; the statistics are over iterations."""

    collective: Collective
    dtype: str
    redop: str | None
    mode: Mode
    in_place: bool
    size_bytes: int
    count: int
    iterations: int
    first_us: float
    """The very first call of the case, before any warm-up."""
    min_us: float
    p50_us: float
    """In throughput mode the time of a batch over its calls; the statistics are over batches then."""
    p95_us: float
    p50_low_us: float
    p50_high_us: float
    """An interval of about 95 % for p50, from the order statistics of the iterations."""
    cv: float
    """Standard deviation over mean."""
    algbw_gb_s: float
    busbw_gb_s: float | None
    """None with one rank, where the formula has no value."""
    warm: bool
    wrong: int | None
    """Elements over all ranks that were not as they had to be; None where it could not be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """The first wrong element of one case on one rank, found by the correctness pass."""

    rank: int
    host: str
    collective: Collective
    dtype: str
    redop: str | None
    in_place: bool
    size_bytes: int
    index: int
    """Of the flat result on that rank."""
    expected: float
    found: float
    count: int
    """How many elements are wrong on that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How late one rank came to the barriers before the timed calls, seen by how long each rank waited in them."""

    rank: int
    host: str
    late_us: float
    """Median over calls of (median wait of the other ranks - this rank's wait); negative for one that comes early."""
    late_p95_us: float
    share: float
    """Of the calls, those in which it was the last to come."""
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two ranks, measured by themselves."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_us: float
    """Of a small message; as all that stands for the pair, the median of its visits."""
    busbw_gb_s: float
    cv: float
    """Standard deviation over mean of the bandwidths of its visits."""
    alone: bool
    """False where other pairs ran at the same time."""
    late_us: tuple[float, float] = (0.0, 0.0)
    """Of each of the two, as in ``Arrival``."""
    latencies_us: tuple[float, ...] = ()
    """Of each visit: all pairs are visited in turn, again and again."""
    busbws_gb_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The ranks of one host measured by themselves (``peer`` None), or the ranks of two hosts together."""

    host: str
    peer: str | None
    ranks: tuple[int, ...]
    latency_us: float
    busbw_gb_s: float | None
    cv: float
    alone: bool
    latencies_us: tuple[float, ...] = ()
    """Of each visit, as in ``Pair``."""
    busbws_gb_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What was not measured, and why."""

    collective: Collective
    dtype: str
    mode: Mode | None
    """None: both."""
    sizes_bytes: tuple[int, ...]
    reason: str
    """A phrase: "needs 24 GiB of 8 GiB free on rank 3", "the budget of 30 s was used up"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a rank had come when it was asked, or when it failed."""

    rank: int
    phase: str
    """"start", "connect", "check", "measure", "pairs", "nodes", "end"."""
    what: str
    """What it was at, in words: "all_reduce float32 1 MiB"; "" for nothing in particular."""
    group: tuple[int, ...]
    """Ranks of the group whose call it makes or made last."""
    calls: int
    """Collective calls it has begun in this group, the open one included."""
    op: str
    """The open or last call: "barrier", "all_reduce"."""
    inside: bool
    """The last call has begun and not returned."""
    stale_s: float
    """For how long it has completed no call."""
    stack: tuple[str, ...] = ()
    """The main thread's frames, outermost first, as "file:line function"."""
    error: str | None = None
    """The first line of the exception that ended it."""
    states: dict[str, str] = field(default_factory=dict)
    """By rank, for the ranks of its own host: the state letter of /proc/PID/stat, "" for a process that is gone."""
    ends: dict[str, str] = field(default_factory=dict)
    """By rank, how a process of its own host ended, where that was seen: "SIGKILL", "exit status 3"."""


class Ending(str, Enum):
    """How a bench ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """A rank raised or died."""
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How a bench ended that did not finish, and where each rank was. Ranks without a position did not answer."""

    ending: Ending
    phase: str
    positions: tuple[Position, ...] = ()
    signal: str | None = None
    """What interrupted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What NCCL itself said of how it connects, read from its own log of one rank."""

    rank: int
    network: str | None
    """"IB", "Socket", or a plugin's name."""
    interfaces: tuple[str, ...]
    """What it uses: "mlx5_0:1", "eth0"."""
    transports: dict[str, int]
    """How many channels it opened by way: "P2P/CUMEM", "SHM", "NET/IB/GDRDMA", "NET/Socket"."""
    nvls: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All that was seen of a bench. What was not measured is empty."""

    settings: Settings
    members: tuple[Member, ...]
    results: tuple[Measurement, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    pairs: tuple[Pair, ...] = ()
    nodes: tuple[NodeResult, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    nccl_logs: tuple[NcclLog, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know of how it was measured."""
    stop: Stop | None = None
    """None: it finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What hardware gives when it is healthy, or what the user expects."""

    gb_s: float
    """Bus bandwidth at the plateau: the least that is seen on a healthy system."""
    high_gb_s: float | None
    text: str
    """"8 H100 over NVLink4, ring"; "--expect"; the baseline's file."""
    source: str
    """Where the figure is from: an address, or the file."""
    min_size_bytes: int
    """It holds from this size on."""


class Assessment(str, Enum):
    """How a curve stands against its reference."""

    HEALTHY = "healthy"
    BELOW = "below"
    NOISY = "too-noisy"
    NO_REFERENCE = "no-reference"
    NOT_REACHED = "no-plateau"
    """The sizes measured do not reach the plateau, at which alone a reference holds."""
    NOT_DEFINED = "n/a"
    """One rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """t(S) = alpha + S / bandwidth, fitted with relative weights."""

    alpha_us: float
    bandwidth_gb_s: float
    """Algorithm bandwidth: S over t."""
    residual: float
    """Root mean square of the relative errors."""
    fits: bool
    """False where the residual is too large for the two figures to mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One collective, dtype and mode over all its sizes, and how good that is."""

    collective: Collective
    dtype: str
    redop: str | None
    mode: Mode
    in_place: bool
    plateau_gb_s: float | None
    """Bus bandwidth; None where it is not reached or not defined."""
    plateau_spread: float | None
    """(largest - smallest) / plateau, over the sizes of the plateau."""
    plateau_from_bytes: int | None
    latency_us: float | None
    """Median time of the small sizes, at which it does not depend on the size."""
    fit: Fit | None
    """None with too few sizes."""
    half_bytes: int | None
    """The size that reaches half of the plateau, by interpolation; None where the curve does not cross it."""
    standing: Assessment
    reference: Reference | None
    share: float | None
    """Plateau over reference."""
    verdict: str
    """One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One size against a baseline: bus bandwidth now over then, with the interval of the ratio of p50."""

    collective: Collective
    dtype: str
    redop: str | None
    mode: Mode
    in_place: bool
    size_bytes: int
    now_us: float
    then_us: float
    ratio: float
    """Bandwidth now over then: below 1 is slower."""
    ratio_low: float
    ratio_high: float
    below: bool
    """Below --fail-below with its whole interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run against a saved one."""

    baseline: str
    differences: tuple[str, ...]
    """What is not alike between the two runs: "torch 2.12.0 then, 2.13.0 now"."""
    changes: tuple[Change, ...]
    missing: int
    """Cases of this run that the baseline does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the curve means for DDP."""

    model_bytes: int | None
    """Gradients of --model-size in its dtype; None where no size was given."""
    dtype: str
    whole_ms: float | None
    """Time to all-reduce all of it in buckets of the default size, nothing overlapped."""
    bucket_mib: float
    """DDP's default bucket_cap_mb."""
    bucket_share: float | None
    """Of the plateau, at the default bucket."""
    try_mib: int | None
    """A bucket_cap_mb worth trying; None where the default is as good."""
    gain_ms: float | None
    gain_low_ms: float | None
    gain_high_ms: float | None
    text: tuple[str, ...]
    """Sentences for a reader, the last of which says that the true optimum needs the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Something read off the machine that could explain a low number."""

    text: str
    """What was seen, and what it does to the number."""
    source: str
    """Where it was read: a check's code ("DD321 pcie"), "NCCL's log", "/proc/stat"."""
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fix: str = ""
