"""The collective calls that are measured: the ranks that make them, bus factors, buffers, and the correctness pass.

That makes one call with a known result, and compares every element on every rank.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpdoctor.collect.proc import read_text
from ddpdoctor.model.bandwidth import Collective, Wrong
from ddpdoctor.probes.bandwidth.plan import ALWAYS_IN_PLACE, DTYPES, SHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpdoctor.model.bandwidth import Case

    Call = Callable[[bool], Any]

# Our choice: time before the process group exists, for importing torch and reading the machine. Both have their own
# time limits. On a cold network file system the import alone takes half a minute.
START_ALLOWANCE_S = 60.0
OPERATORS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Our choice: rotating buffers take this many times the last-level cache. It is twice what strict LRU would need,
# because caches do not strictly replace the oldest line.
COLD_FACTOR = 2
ROOT = 0  # place in the group of the rank that broadcasts and that receives a reduction
LARGEST = 127  # the largest int8
# Values are computed for this many indexes and then repeated, rotated differently each time. The periods are primes, so
# no chunk of a ring or tree is a multiple. On the CPU a period fits the cache; on a GPU it needs few launches.
PERIODS = {"cpu": 65521, "cuda": 1048573}
ROTATION = 7919
WORKING_BYTES = 64  # The most memory allocated at once, per index of a period. A test checks this.
_MASK = 2**32 - 1


@dataclass(slots=True)
class Tracker:
    """Only the main thread writes, never inside a timed region. Writing a field is atomic, so it needs no lock."""

    phase: str = "start"
    what: str = ""
    group: tuple[int, ...] = ()
    op: str = ""
    calls: int = 0  # Calls begun in ``group`` since the bench began. Ranks with the same number are in the same call.
    inside: bool = False
    # time.monotonic() when a call last completed or ``at`` was last called.
    moved_s: float = field(default_factory=time.monotonic)
    allowance_s: float = START_ALLOWANCE_S  # added to the hang timeout: how long the next call is expected to take
    _calls: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, phase: str, what: str = "", *, allowance_s: float = 0.0) -> None:
        """Record the next phase, and how long one call or batch of it may take."""
        self.phase, self.what, self.allowance_s = phase, what, allowance_s
        self.moved_s = time.monotonic()

    def enter(self, op: str, group: tuple[int, ...]) -> None:
        """Record that a call, or a batch of one kind, is about to begin in the group of these ranks."""
        self.inside = False
        self.op, self.group = op, group
        self.calls = self._calls[group] = self._calls.get(group, 0) + 1
        self.inside = True

    def leave(self) -> None:
        """Record that the call completed here. Not for a call that raised: the watcher needs to know that."""
        self.inside = False
        self.moved_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks of the job, including this one. Functions of ``dist`` are looked up at each call."""

    handle: Any  # a torch ProcessGroup, or None for all ranks
    ranks: tuple[int, ...]  # global ranks, in the order of the group
    device: torch.device
    backend: str
    tracker: Tracker

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(dist.get_rank())

    def barrier(self) -> float:
        """Wait for all ranks; return the seconds inside the barrier, which are near zero on the last rank."""
        self.tracker.enter("barrier", self.ranks)
        device_ids = [self.device.index] if self.backend == "nccl" else None
        work = dist.barrier(group=self.handle, async_op=True, device_ids=device_ids)
        arrived = time.perf_counter_ns()
        if work is not None:
            work.wait()
        self.settle()
        waited = time.perf_counter_ns() - arrived
        self.tracker.leave()
        return waited / 1e9

    def settle(self) -> None:
        """Wait for the device, because NCCL's calls return before it has finished."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks on every rank, one row per rank. All must give as many."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in self.ranks]
        self.tracker.enter("all_gather", self.ranks)
        dist.all_gather(rows, own, group=self.handle)
        gathered: list[list[float]] = [row.tolist() for row in rows]
        self.tracker.leave()
        return gathered

    def agree(self, value: float) -> float:
        """Return the value of the group's first rank on every rank."""
        agreed = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.tracker.enter("broadcast", self.ranks)
        dist.broadcast(agreed, src=self.ranks[0], group=self.handle)
        first = float(agreed.item())
        self.tracker.leave()
        return first


def bus_factor(collective: Collective, size: int) -> float | None:
    """Return bus bandwidth over algorithm bandwidth for ``size`` ranks, or None for one rank."""
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    if size < 2:
        return None
    sends = 2 if collective is Collective.ALL_REDUCE else 1
    return sends * (size - 1) / size if collective in {Collective.ALL_REDUCE, *SHARED} else 1.0


def make_call(group: RankGroup, case: Case, buffers: Buffers) -> Call:
    """Return a function that makes the call: ``call(False)`` waits for it, ``call(True)`` returns a work object."""
    # With NCCL, only the current stream waits. The function is looked up in torch.distributed at each call, as in a
    # training script.
    collective, source, target = case.collective, buffers.source, buffers.target
    handle, root = group.handle, group.ranks[0]
    op = None if case.redop is None else getattr(dist.ReduceOp, OPERATORS[case.redop])
    # torch 2.13 renames two functions and warns about the old names.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    calls: dict[Collective, Call] = {
        # Arguments by position, because keywords cost up to a microsecond more.
        Collective.ALL_REDUCE: lambda async_op: dist.all_reduce(target, op, handle, async_op),
        Collective.REDUCE: lambda async_op: dist.reduce(target, root, op, handle, async_op),
        Collective.BROADCAST: lambda async_op: dist.broadcast(target, root, handle, async_op),
        Collective.ALL_GATHER: lambda async_op: getattr(dist, gather)(target, source, handle, async_op),
        Collective.REDUCE_SCATTER: lambda async_op: getattr(dist, scatter)(target, source, op, handle, async_op),
        Collective.ALL_TO_ALL: lambda async_op: dist.all_to_all_single(target, source, None, None, handle, async_op),
    }
    if collective in calls:
        return calls[collective]
    # Send to the next rank and receive from the one before, as nccl-tests' sendrecv does.
    following, former = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
    operations = [dist.P2POp(dist.isend, source, following, handle), dist.P2POp(dist.irecv, target, former, handle)]

    def send_recv(async_op: bool) -> _Both | None:  # noqa: FBT001 - as torch.distributed's own
        both = _Both(dist.batch_isend_irecv(operations))
        if not async_op:
            both.wait()
        return both

    return send_recv


class _Both(list[Any]):
    def wait(self) -> None:
        for work in self:
            work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Input and output of a call. In place, they are the same tensor or one is a part of the other."""

    source: torch.Tensor
    target: torch.Tensor


def make_sets(group: RankGroup, case: Case, most: int = 1) -> tuple[Buffers, ...]:
    """Return the buffers that calls use in turn: enough to exceed the cache, at most ``most``, which is 1 if warm."""
    return tuple(make_buffers(group, case) for _ in range(count_sets(group.device, case, group.size, most)))


def make_buffers(group: RankGroup, case: Case) -> Buffers:
    """Return one set of zeros, which stay zeros under every operator."""
    # Other values would overflow in repeated sums, and arithmetic on non-finite values may take another path.

    def zeros(count: int) -> torch.Tensor:
        """Return zeros that were really written. With torch.zeros, the first call would pay for the page faults."""
        return torch.empty(count, dtype=getattr(torch, case.dtype), device=group.device).fill_(0)

    source_count, target_count = counts(case, group.size)
    whole = zeros(case.count if case.in_place else target_count)
    if case.collective in ALWAYS_IN_PLACE:
        return Buffers(source=whole, target=whole)
    if not case.in_place:
        return Buffers(source=zeros(source_count), target=whole)
    share = case.count // group.size
    own = whole[group.index * share : (group.index + 1) * share]
    gathers = case.collective is Collective.ALL_GATHER
    return Buffers(source=own, target=whole) if gathers else Buffers(source=whole, target=own)


def counts(case: Case, size: int) -> tuple[int, int]:
    share = case.count // size
    if case.collective is Collective.ALL_GATHER:
        return share, case.count
    if case.collective is Collective.REDUCE_SCATTER:
        return case.count, share
    return case.count, case.count


def set_bytes(case: Case, size: int) -> int:
    if case.in_place:
        return case.size_bytes
    return sum(counts(case, size)) * DTYPES[case.dtype]


def count_sets(device: torch.device, case: Case, size: int, most: int) -> int:
    if most == 1:
        return 1
    return min(most, math.ceil(COLD_FACTOR * cache_bytes(device) / set_bytes(case, size)) + 1)


def cache_bytes(device: torch.device, caches: Path = CACHES) -> int:
    """Return the size of the last-level cache, of a CPU by sysfs ("32768K" in ``index3/size``)."""
    # If there is none, as in some virtual machines, return 64 MiB, which is more than most have.
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    read = (re.fullmatch(r"(\d+)([KMG]?)", read_text(file).strip()) for file in caches.glob("index*/size"))
    return max((int(found[1]) * units[found[2]] for found in read if found), default=0) or 64 * 2**20


def check(group: RankGroup, case: Case, buffers: Buffers, hosts: Sequence[str]) -> tuple[tuple[Wrong, ...], float]:
    """Make the call once; return what is wrong on any rank, and the call's time in us on the slowest one, to all ranks.

    ``hosts`` is indexed by global rank. The buffers are zeros again afterwards. Nothing as large as a buffer is
    allocated. torch's errors propagate.
    """
    receives = case.collective is Collective.BROADCAST and group.index != ROOT
    if receives or buffers.target is not buffers.source:
        buffers.target.fill_(255 if case.dtype == "uint8" else -1)
    if not receives:
        start = group.index * (case.count // group.size) if case.collective is Collective.ALL_GATHER else 0
        write_pattern(buffers.source, put_in(case, group, group.index), start)
    call = make_call(group, case, buffers)
    group.barrier()
    group.tracker.enter(case.collective.value, group.ranks)
    began = time.perf_counter_ns()
    call(False)  # noqa: FBT003 - async_op
    group.settle()
    ended = time.perf_counter_ns()
    group.tracker.leave()
    own = _compare_output(buffers.target, _expected(group, case), tolerance(case, group))
    buffers.source.zero_()
    if buffers.target is not buffers.source:
        buffers.target.zero_()
    rows = group.gather([(ended - began) / 1e3, *own])
    wrong = [
        Wrong(
            rank=rank, host=hosts[rank], collective=case.collective, dtype=case.dtype, redop=case.redop,
            in_place=case.in_place, size_bytes=case.size_bytes, index=int(index), expected=expected, found=found,
            count=int(count),
        )
        for rank, (_, count, index, expected, found) in zip(group.ranks, rows, strict=True)
        if count
    ]  # fmt: skip
    return tuple(wrong), max(row[0] for row in rows)


def write_pattern(tensor: torch.Tensor, pattern: Pattern, index: int) -> None:
    at = 0
    for piece in pattern.pieces(index, index + tensor.numel()):
        tensor[at : at + piece.numel()].copy_(piece)
        at += piece.numel()


def _expected(group: RankGroup, case: Case) -> list[tuple[int, int, Pattern, int]]:
    """Return what this rank's output must hold: start, count, pattern, and index of the pattern at the start."""
    collective, share, own = case.collective, case.count // group.size, group.index
    if collective is Collective.REDUCE and own != ROOT:
        return []  # the contents of the other ranks' buffers are undefined
    if collective in {Collective.ALL_REDUCE, Collective.REDUCE}:
        return [(0, case.count, reduced(case, group), 0)]
    if collective is Collective.REDUCE_SCATTER:
        return [(0, share, reduced(case, group), own * share)]
    if collective in {Collective.BROADCAST, Collective.SEND_RECV}:
        source = ROOT if collective is Collective.BROADCAST else (own - 1) % group.size
        return [(0, case.count, put_in(case, group, source), 0)]
    indexes = [(rank if collective is Collective.ALL_GATHER else own) * share for rank in range(group.size)]
    return [(rank * share, share, put_in(case, group, rank), index) for rank, index in enumerate(indexes)]


def _compare_output(
    output: torch.Tensor, parts: Sequence[tuple[int, int, Pattern, int]], allowed: float
) -> tuple[int, int, float, float]:
    """Return how many elements are wrong, then index, expected and found value of the first one."""
    count, first = 0, (0, 0.0, 0.0)
    for start, length, pattern, index in parts:
        at = start
        for expected in pattern.pieces(index, index + length):
            found = output[at : at + expected.numel()]
            at += expected.numel()
            if not allowed and torch.equal(found, expected):
                continue
            # Also true for NaN.
            close = torch.isclose(found.to(torch.float64), expected, rtol=allowed, atol=0.0) if allowed else None
            places = (found != expected if close is None else ~close).nonzero()
            if places.numel() and not count:
                place = int(places[0])
                first = at - expected.numel() + place, float(expected[place]), float(found[place])
            count += int(places.numel())
    return count, *first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """How many ranks contribute at an index, and which values."""

    active: int
    low: int
    high: Callable[[int], int]  # the largest value when this many ranks contribute
    neutral: int  # the value of the other ranks, which does not change the result
    combine: str  # the function of torch that combines two values

    def values(self, ranks: torch.Tensor, size: int, places: torch.Tensor) -> torch.Tensor:
        """Return what these ranks of ``size`` contribute at these places."""
        high = self.high(min(size, self.active))
        return _pseudo_random(ranks, places) % (high - self.low + 1) + self.low


_OPERATORS = {
    "sum": _Operator(active=16, low=0, high=lambda active: LARGEST // active, neutral=0, combine="add"),
    # Two ranks: an average may be rounded at each step, so fewer ranks allow a tighter tolerance.
    "avg": _Operator(active=2, low=0, high=lambda active: LARGEST // active, neutral=0, combine="add"),
    "prod": _Operator(active=6, low=1, high=lambda _: 2, neutral=1, combine="mul"),
    "min": _Operator(active=16, low=0, high=lambda _: LARGEST - 1, neutral=LARGEST, combine="minimum"),
    "max": _Operator(active=16, low=1, high=lambda _: LARGEST, neutral=0, combine="maximum"),
}


class Pattern:
    """Values by index. At most one period of them is in memory, and nothing until ``pieces`` is iterated."""

    def __init__(
        self, make: Callable[[torch.Tensor], torch.Tensor], group: RankGroup, dtype: torch.dtype | None
    ) -> None:
        """``make`` returns the values at places below the period. They become ``dtype``."""
        self._make, self._dtype = make, dtype
        self._period, self._device = PERIODS[group.device.type], group.device

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield the values of the indexes from ``start`` to ``stop``, in pieces of a period at most."""
        made = None
        if stop - start >= self._period:
            made = self._values(0, self._period)
            # Doubled, so that every rotation is one contiguous piece.
            made = torch.cat([made, made])
        while start < stop:
            block, place = divmod(start, self._period)
            count = min(stop - start, self._period - place)
            begin = (place + ROTATION * block) % self._period
            yield self._values(begin, count) if made is None else made[begin : begin + count]
            start += count

    def _values(self, begin: int, count: int) -> torch.Tensor:
        places = torch.arange(begin, begin + count, dtype=torch.int64, device=self._device)
        values = self._make(places.remainder_(self._period))
        return values if self._dtype is None else values.to(self._dtype)


def put_in(case: Case, group: RankGroup, rank: int) -> Pattern:
    """Return the input of the rank at a place in the group."""
    redop = case.redop

    def make(places: torch.Tensor) -> torch.Tensor:
        if redop is None:
            return _pseudo_random(rank, places) % (LARGEST + 1)
        # A rank's input: its own value if it is one of the next active ranks after place, else neutral
        size = group.size
        operator = _OPERATORS[redop]
        values = operator.values(torch.full_like(places, rank), size, places)
        return torch.where((rank - places) % size < min(size, operator.active), values, operator.neutral)

    return Pattern(make, group, getattr(torch, case.dtype))


def reduced(case: Case, group: RankGroup) -> Pattern:
    """Return the reduction over all ranks of the group, in float64 if it may be inexact."""
    assert case.redop is not None
    operator, size = _OPERATORS[case.redop], group.size

    def make(places: torch.Tensor) -> torch.Tensor:
        result = torch.full_like(places, operator.neutral)
        for offset in range(min(size, operator.active)):
            result = getattr(torch, operator.combine)(result, operator.values((places + offset) % size, size, places))
        return result.to(torch.float64) / size if case.redop == "avg" else result

    return Pattern(make, group, None if tolerance(case, group) else getattr(torch, case.dtype))


def tolerance(case: Case, group: RankGroup) -> float:
    """Return the allowed relative error of a result, 0 if it must be exact."""
    # Backends average by dividing at the end or by multiplying each value first. Both are exact if the number of ranks
    # is a power of two. Otherwise each value, their sum and 1/n are rounded once.
    if case.redop != "avg" or group.size & (group.size - 1) == 0:
        return 0.0
    return 2 * float(torch.finfo(getattr(torch, case.dtype)).eps)


def working_bytes(case: Case, group: RankGroup) -> int:
    """Return the most memory that the pass needs beyond the buffers. It does not depend on the number of ranks."""
    return min(case.count, PERIODS[group.device.type]) * WORKING_BYTES


def _pseudo_random(ranks: torch.Tensor | int, places: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random numbers below 2**32, with the multipliers of xxHash and Knuth."""
    mixed = (places * 2654435761 + ranks * 2246822519 + 374761393) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 668265263) & _MASK
    return mixed ^ (mixed >> 13)
