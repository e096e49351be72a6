"""The collective calls that are measured, and the factor between algorithm and bus bandwidth of each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.system import read_text
from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.probes.bandwidth.plan import ALWAYS_IN_PLACE, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.group import RankGroup

    Call = Callable[[bool], Any]

OPERATORS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
COLD_FACTOR = 2
"""Our choice: rotating buffers take this many times the last-level cache. It is twice what strict LRU would need,
because caches do not strictly replace the oldest line."""


def bus_factor(collective: Collective, size: int) -> float | None:
    """Return bus bandwidth over algorithm bandwidth for ``size`` ranks, or None for one rank.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    if size < 2:
        return None
    if collective is Collective.ALL_REDUCE:
        return 2 * (size - 1) / size
    if collective in {Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL}:
        return (size - 1) / size
    return 1.0


def make_call(group: RankGroup, case: Case, buffers: Buffers) -> Call:
    """Return a function that makes the call: ``call(False)`` waits for it, ``call(True)`` returns a work object.

    With Gloo, waiting means until the call is done. With NCCL, only the current stream waits. The function is looked up
    in torch.distributed at each call, as in a training script.
    """
    return _MAKERS[case.collective](group, case, buffers)


def _all_reduce(group: RankGroup, case: Case, buffers: Buffers) -> Call:
    import torch.distributed as dist

    tensor, op, handle = buffers.target, _operator(case), group.handle
    # Arguments by position, because keywords cost up to a microsecond more.
    return lambda async_op: dist.all_reduce(tensor, op, handle, async_op)


def _reduce(group: RankGroup, case: Case, buffers: Buffers) -> Call:
    import torch.distributed as dist

    tensor, op, handle, root = buffers.target, _operator(case), group.handle, group.ranks[0]
    return lambda async_op: dist.reduce(tensor, dst=root, op=op, group=handle, async_op=async_op)


def _broadcast(group: RankGroup, case: Case, buffers: Buffers) -> Call:  # noqa: ARG001 - as the other makers
    import torch.distributed as dist

    tensor, handle, root = buffers.target, group.handle, group.ranks[0]
    return lambda async_op: dist.broadcast(tensor, src=root, group=handle, async_op=async_op)


def _all_gather(group: RankGroup, case: Case, buffers: Buffers) -> Call:  # noqa: ARG001 - as the other makers
    import torch.distributed as dist

    # torch 2.13 renames the function and warns about the old name.
    name = _first_of("all_gather_single", "all_gather_into_tensor")
    source, target, handle = buffers.source, buffers.target, group.handle
    return lambda async_op: getattr(dist, name)(target, source, group=handle, async_op=async_op)


def _reduce_scatter(group: RankGroup, case: Case, buffers: Buffers) -> Call:
    import torch.distributed as dist

    name = _first_of("reduce_scatter_single", "reduce_scatter_tensor")
    source, target, op, handle = buffers.source, buffers.target, _operator(case), group.handle
    return lambda async_op: getattr(dist, name)(target, source, op=op, group=handle, async_op=async_op)


def _all_to_all(group: RankGroup, case: Case, buffers: Buffers) -> Call:  # noqa: ARG001 - as the other makers
    import torch.distributed as dist

    source, target, handle = buffers.source, buffers.target, group.handle
    return lambda async_op: dist.all_to_all_single(target, source, group=handle, async_op=async_op)


def _send_recv(group: RankGroup, case: Case, buffers: Buffers) -> Call:  # noqa: ARG001 - as the other makers
    """Send to the next rank and receive from the one before, as nccl-tests' sendrecv does."""
    import torch.distributed as dist

    following = group.ranks[(group.index + 1) % group.size]
    former = group.ranks[(group.index - 1) % group.size]
    handle = group.handle
    operations = [
        dist.P2POp(dist.isend, buffers.source, following, handle),
        dist.P2POp(dist.irecv, buffers.target, former, handle),
    ]

    def send_recv(async_op: bool) -> _Both | None:  # noqa: FBT001 - as torch.distributed's own
        both = _Both(works=dist.batch_isend_irecv(operations))
        if async_op:
            return both
        both.wait()
        return None

    return send_recv


@dataclass(frozen=True, slots=True, kw_only=True)
class _Both:
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _operator(case: Case) -> Any:
    import torch.distributed as dist

    assert case.redop is not None
    return getattr(dist.ReduceOp, OPERATORS[case.redop])


def _first_of(name: str, older: str) -> str:
    import torch.distributed as dist

    return name if hasattr(dist, name) else older


_MAKERS: dict[Collective, Callable[[RankGroup, Case, Buffers], Call]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.BROADCAST: _broadcast,
    Collective.REDUCE: _reduce,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.SEND_RECV: _send_recv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Input and output of a call. In place, they are the same tensor or one is a part of the other."""

    source: torch.Tensor
    target: torch.Tensor


def make_sets(group: RankGroup, case: Case, most: int = 1) -> tuple[Buffers, ...]:
    """Return the buffers that calls use in turn.

    There are enough sets to exceed the cache, but at most ``most``: 1 if they may be warm, else the number of calls.
    """
    return tuple(make_buffers(group, case) for _ in range(count_sets(group.device, case, group.size, most)))


def make_buffers(group: RankGroup, case: Case) -> Buffers:
    """Return one set of zeros.

    Zeros stay zeros under every operator. Other values would overflow in repeated sums, and arithmetic on non-finite
    values may take another path.
    """
    source_count, target_count = counts(case, group.size)
    if case.collective in ALWAYS_IN_PLACE:
        both = _touched(case, target_count, group.device)
        return Buffers(source=both, target=both)
    if not case.in_place:
        return Buffers(
            source=_touched(case, source_count, group.device), target=_touched(case, target_count, group.device)
        )
    whole = _touched(case, case.count, group.device)
    share = case.count // group.size
    own = whole[group.index * share : (group.index + 1) * share]
    gathers = case.collective is Collective.ALL_GATHER
    return Buffers(source=own, target=whole) if gathers else Buffers(source=whole, target=own)


def counts(case: Case, size: int) -> tuple[int, int]:
    """Return the number of elements of input and output."""
    share = case.count // size
    if case.collective is Collective.ALL_GATHER:
        return share, case.count
    if case.collective is Collective.REDUCE_SCATTER:
        return case.count, share
    return case.count, case.count


def set_bytes(case: Case, size: int) -> int:
    """Return the memory of one set."""
    if case.in_place:
        return case.size_bytes
    return sum(counts(case, size)) * DTYPES[case.dtype]


def count_sets(device: torch.device, case: Case, size: int, most: int) -> int:
    """Return how many sets the calls rotate over."""
    if most == 1:
        return 1
    return min(most, math.ceil(COLD_FACTOR * cache_bytes(device) / set_bytes(case, size)) + 1)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return read_cache_bytes(CACHES)


def read_cache_bytes(caches: Path) -> int:
    """Return the largest cache size in a sysfs folder ("32768K" in ``index3/size``).

    If there is none, as in some virtual machines, return 64 MiB, which is more than most have.
    """
    sizes = [_parse_size(read_text(file)) for file in caches.glob("index*/size")]
    return max(sizes, default=0) or 64 * 2**20


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found[2]] if found else 0


def _touched(case: Case, count: int, device: torch.device) -> torch.Tensor:
    """Return zeros that were really written. With torch.zeros, the first call would pay for the page faults."""
    import torch

    return torch.empty(count, dtype=getattr(torch, case.dtype), device=device).fill_(0)


def push_out(device: torch.device) -> None:
    """Write more than the cache holds, to evict the buffers from it."""
    import torch

    torch.empty(COLD_FACTOR * cache_bytes(device), dtype=torch.uint8, device=device).fill_(1)
