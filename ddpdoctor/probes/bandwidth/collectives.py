"""The collective calls that are measured, and the factor between algorithm and bus bandwidth of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.bandwidth import Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.buffers import Buffers
    from ddpdoctor.probes.bandwidth.group import RankGroup

    Call = Callable[[bool], Any]

OPERATORS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}


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
