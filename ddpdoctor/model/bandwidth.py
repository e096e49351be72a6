"""The settings, measurements and conclusions of `allreduce-bench`; GB are 1e9 bytes.

The conventions are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from ddpdoctor.model.words import rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence


class Collective(str, Enum):
    """A collective that can be measured. The values are torch.distributed's names without ``_into_tensor`` etc."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"

    @property
    def reduces(self) -> bool:
        return self in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE}


class Mode(str, Enum):
    """How calls are timed."""

    LATENCY = "latency"  # each call alone, after a barrier, from its start to its completion on this rank
    THROUGHPUT = "throughput"  # a batch of back-to-back calls, divided by their number, as in nccl-tests


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure. All ranks need equal settings: ``difference`` in the agreement names the ranks that differ."""

    collectives: tuple[Collective, ...] = (Collective.ALL_REDUCE,)
    dtypes: tuple[str, ...] = ("float32",)
    redop: str = "sum"
    modes: tuple[Mode, ...] = (Mode.LATENCY, Mode.THROUGHPUT)
    min_size_bytes: int = 1024
    max_size_bytes: int = 2**30
    factor: int = 2  # Each size is this many times the previous one. The largest size is always measured.
    backend: str = "gloo"
    in_place: bool = False
    cold: bool = False  # rotate through more buffers than the last-level cache holds, instead of reusing warm ones
    budget_s: float = 30.0  # for the sweep, without start-up; --pairs and --by-node have the same again
    iterations: int | None = None  # Timed calls per case. None: as many as the budget allows.
    warmup: int | None = None
    pairs: bool = False
    by_node: bool = False
    hang_timeout_s: float = 60.0  # the bench counts as hung when no call completes for this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of the bench."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str  # "cpu", or "cuda:3"
    device_name: str  # torch's name for the GPU ("NVIDIA H100 80GB HBM3"), or the processor's name for the CPU
    cores: int  # processors that this process may use
    version: str  # the version of ddpdoctor
    torch: str
    nccl: str | None = None
    driver: str | None = None
    variables: dict[str, str] = field(default_factory=dict)  # that affect it, from an allow-list
    gpu_ranks: int = 1  # How many ranks of the bench use its GPU. If above 1, no measurement describes a link.


def describe_shared_gpus(members: Sequence[Member]) -> str:
    """Describe which ranks share a GPU and the effect on the figures, or return "" if every rank has its own GPU."""
    sharing = [member.rank for member in members if member.gpu_ranks > 1]
    return f"{rank_list(sharing)} share a GPU: these figures are not those of a link" if sharing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGroup:
    """The calls that are compared with each other over all sizes."""

    collective: Collective
    dtype: str
    redop: str | None  # None if the collective reduces nothing
    mode: Mode
    in_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(CallGroup):
    """One thing to measure."""

    # S of nccl-tests, rounded so that it divides evenly over the ranks. It is the size of the output for all_gather, of
    # the input for reduce_scatter, of all of a rank's data for all_to_all, and of one buffer for the others.
    size_bytes: int
    count: int  # elements, as nccl-tests counts them: size_bytes divided by the element's size


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Case):
    """A measured case. The time of an iteration is the maximum over ranks; the statistics are over iterations."""

    iterations: int
    first_us: float  # the very first call of the case, before any warm-up
    min_us: float
    p50_us: float  # in throughput mode, statistics are over batches: time divided by number of calls
    p95_us: float
    p50_low_us: float
    p50_high_us: float  # an interval of about 95 % for p50, from the order statistics of the iterations
    cv: float  # standard deviation divided by mean
    algbw_gb_s: float
    busbw_gb_s: float | None  # None with one rank, because the formula has no value then
    warm: bool
    wrong: int | None  # number of wrong elements over all ranks, or None if they could not be checked


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
    index: int  # position in the flat result on that rank
    expected: float
    found: float
    count: int  # how many elements are wrong on that rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How late one rank reached the barriers before the timed calls, computed from each rank's wait in them."""

    rank: int
    host: str
    late_us: float  # median over calls of (median wait of the others - its own); negative: it comes early
    late_p95_us: float
    share: float  # the fraction of calls in which it came last
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two ranks that were measured as a pair."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_us: float  # Latency of a small message. Like all figures of the pair, it is the median over its visits.
    busbw_gb_s: float
    cv: float  # standard deviation divided by mean, of the bandwidths of its visits
    alone: bool  # False if other pairs ran at the same time
    late_us: tuple[float, float] = (0.0, 0.0)  # how late each of the two came, as in ``Arrival``
    latencies_us: tuple[float, ...] = ()  # One value per visit. All pairs are visited in turn, repeatedly.
    busbws_gb_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """A measurement of the ranks of one host (``peer`` is None), or of the ranks of two hosts together."""

    host: str
    peer: str | None
    ranks: tuple[int, ...]
    latency_us: float
    busbw_gb_s: float | None
    cv: float
    alone: bool
    latencies_us: tuple[float, ...] = ()  # one value per visit, as in ``Pair``
    busbws_gb_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What was not measured, and why."""

    collective: Collective
    dtype: str
    mode: Mode | None  # None: both
    sizes_bytes: tuple[int, ...]
    reason: str  # a phrase: "needs 24 GiB of 8 GiB free on rank 3", "the budget of 30 s was used up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a rank had got when it was asked, or when it failed."""

    rank: int
    phase: str  # "start", "connect", "check", "measure", "pairs", "nodes", "end"
    what: str  # what it was doing: "all_reduce float32 1 MiB", or "" for nothing in particular
    group: tuple[int, ...]  # ranks of the group of its open or last call
    calls: int  # collective calls it has begun in this group, including the open one
    op: str  # the open or last call: "barrier", "all_reduce"
    inside: bool  # the last call has not returned
    stale_s: float  # seconds since it last completed a call
    stack: tuple[str, ...] = ()  # the main thread's frames, outermost first, as "file:line function"
    error: str | None = None  # the first line of the exception that ended it
    states: dict[str, str] = field(default_factory=dict)  # of /proc/PID/stat for each rank on its host; "": gone
    ends: dict[str, str] = field(default_factory=dict)  # of each rank on its host: "SIGKILL", "exit status 3"


class Ending(str, Enum):
    """How a bench ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"  # a rank raised or died
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How an unfinished bench ended, and where each rank was. Ranks without a position did not answer."""

    ending: Ending
    phase: str
    positions: tuple[Position, ...] = ()
    signal: str | None = None  # what interrupted it


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """How NCCL connects, according to its own log of one rank."""

    rank: int
    network: str | None  # "IB", "Socket", or a plugin's name
    interfaces: tuple[str, ...]  # the interfaces that it uses: "mlx5_0:1", "eth0"
    transports: dict[str, int]  # opened channels: "P2P/CUMEM", "SHM", "NET/IB/GDRDMA", "NET/Socket"
    nvls: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything that a bench measured. A field is empty if its part was not measured."""

    settings: BenchSettings
    members: tuple[Member, ...]
    results: tuple[Measurement, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    pairs: tuple[Pair, ...] = ()
    nodes: tuple[NodeResult, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    nccl_logs: tuple[NcclLog, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader must know about how it was measured
    stop: Stop | None = None  # None: it finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The bandwidth of healthy hardware, or the one that the user expects."""

    gb_s: float  # the lowest bus bandwidth at the plateau on a healthy system
    high_gb_s: float | None
    text: str  # "8 H100 over NVLink4, ring"; "--expect"; the baseline's file
    source: str  # where the figure is from: a URL or a file
    min_size_bytes: int  # the figure applies to this size and larger ones


class Assessment(str, Enum):
    """How a curve compares with its reference."""

    HEALTHY = "healthy"
    BELOW = "below"
    NOISY = "too-noisy"
    NO_REFERENCE = "no-reference"
    NOT_REACHED = "no-plateau"  # the measured sizes do not reach the plateau, and references apply only there
    NOT_DEFINED = "n/a"  # there is only one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """t(S) = alpha + S / bandwidth, fitted with relative weights."""

    alpha_us: float
    bandwidth_gb_s: float  # algorithm bandwidth: S / t
    residual: float  # root mean square of the relative errors
    fits: bool  # False if the residual is too large for the two figures to mean anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(CallGroup):
    """One collective, dtype and mode over all sizes, with an assessment."""

    plateau_gb_s: float | None  # bus bandwidth, or None if the plateau is not reached or not defined
    plateau_spread: float | None  # (largest - smallest) / plateau, over the sizes of the plateau
    plateau_from_bytes: int | None
    latency_us: float | None  # median time of the small sizes, for which the time does not depend on the size
    fit: Fit | None  # None with too few sizes
    half_bytes: int | None  # the interpolated size that reaches half of the plateau; None: none does
    assessment: Assessment = field(metadata={"json": "standing"})
    reference: Reference | None
    share: float | None  # plateau divided by reference
    verdict: str  # one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(CallGroup):
    """One size compared with a baseline: the ratio of bus bandwidths, with an interval from the two p50."""

    size_bytes: int
    now_us: float
    then_us: float
    ratio: float  # bandwidth now divided by bandwidth then: below 1 is slower
    ratio_low: float
    ratio_high: float
    below: bool  # the whole interval is below --fail-below


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run compared with a saved one."""

    baseline: str
    differences: tuple[str, ...]  # what differs between the setups of the two runs: "torch 2.12.0 then, 2.13.0 now"
    changes: tuple[Change, ...]
    missing: int  # cases of this run that the baseline does not have


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the curve means for DDP."""

    model_bytes: int | None  # size of the gradients for --model-size in its dtype, or None if no size was given
    dtype: str
    whole_ms: float | None  # time to all-reduce all gradients in buckets of the default size, without overlap
    bucket_mib: float  # DDP's default bucket_cap_mb
    bucket_share: float | None  # the fraction of the plateau that the default bucket size reaches
    try_mib: int | None  # a bucket_cap_mb worth trying, or None if the default is as good
    gain_ms: float | None
    gain_low_ms: float | None
    gain_high_ms: float | None
    text: tuple[str, ...]  # Sentences for the reader. The last one says that the true optimum depends on the model.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Something found on the machine that could explain a low number."""

    text: str  # what was seen, and what it does to the number
    source: str  # where it was read: a check's code ("DD321 pcie"), "NCCL's log", "/proc/stat"
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBandwidth:
    """A row of the table."""

    gpu: re.Pattern[str]  # matches torch's whole name: "NVIDIA GH200" is no H200, and a MIG slice is no GPU
    ranks: int
    nodes: int
    collective: Collective
    algorithm: str  # "nvls" or "ring"; empty if there is no choice
    reference: Reference  # its range begins at the lowest figure measured from that size on, or that a cloud accepts
    checked: bool  # whether the figure was found at its source when the row was written


@cache
def read_references() -> tuple[KnownBandwidth, ...]:
    """Return the rows of the table."""
    table = pkgutil.get_data("ddpdoctor.model", "bandwidth_references.tsv") or b""
    _, *rows = (line.split("\t") for line in table.decode("utf-8").splitlines())
    return tuple(
        KnownBandwidth(
            gpu=re.compile(gpu), ranks=int(ranks), nodes=int(nodes), collective=Collective(collective),
            algorithm=algorithm, checked=checked == "yes",
            reference=Reference(
                gb_s=float(low), high_gb_s=float(high) if high else None, text=text, source=source,
                min_size_bytes=int(min_size),
            ),
        )
        for gpu, ranks, nodes, collective, algorithm, low, high, min_size, text, source, checked in rows
    )  # fmt: skip
