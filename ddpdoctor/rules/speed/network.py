"""How much of the network a job's reductions use, and how much it could carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.model.bandwidth_references import read_references
from ddpdoctor.model.reading import known
from ddpdoctor.model.speed import NetworkUse

from .curves import ring_factor
from .settings import settings_of

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.node import Node

    from .curves import MeasuredCurves
    from .state import SpeedState

BENCH = "allreduce-bench"
_BYTES_PER_S_OF_MBIT = 1e6 / 8


def network_use(state: SpeedState, curves: MeasuredCurves | None = None) -> NetworkUse | None:
    """Return what the reductions use, or None if the bytes of a step are unknown.

    Both figures are bus bandwidths, as in nccl-tests: what each rank sends in a ring, 2 (N - 1) / N of the size.
    """
    settings, ranks = settings_of(state), len(state.ranks)
    if not settings.gradient_bytes or not settings.reductions or ranks < 2 or not state.budget.wall_ms:
        return None
    step_bytes = settings.gradient_bytes * settings.reductions
    limit = _by_bench(curves) or _by_link(state.job) or _by_reference(state.job, ranks)
    return NetworkUse(
        step_bytes=round(step_bytes),
        used_gb_s=ring_factor(ranks) * step_bytes / state.budget.wall_ms / 1e6,
        limit_gb_s=limit[0] if limit else None,
        source=limit[1] if limit else "",
    )


def _by_bench(curves: MeasuredCurves | None) -> tuple[float, str] | None:
    """Return the best bus bandwidth that a bench measured, whatever the size."""
    if curves is None:
        return None
    points = zip(curves.mid.sizes_bytes, curves.mid.times_ms, strict=True)
    return max(ring_factor(curves.mid.ranks) * size / time / 1e6 for size, time in points), BENCH


def _by_link(job: Job) -> tuple[float, str] | None:
    """Return the rate of the slowest link of a job over Gloo on several hosts: a ring crosses each host's link once."""
    hosts = {rank.host for rank in job.ranks}
    if len(hosts) < 2 or any(group.backend != "gloo" for rank in job.ranks for group in rank.groups):
        return None
    nodes = [node for node in (job.machine, *(seen.machine for seen in job.elsewhere)) if node is not None]
    links = [link for node in nodes if (link := _link(node)) is not None]
    if len(links) < len(hosts):
        return None
    name, speed_mb_s = min(links, key=lambda link: link[1])
    return speed_mb_s * _BYTES_PER_S_OF_MBIT / 1e9, f"the {speed_mb_s / 1000:g} Gbit/s link {name}"


def _link(node: Node) -> tuple[str, int] | None:
    network = known(node.network)
    if network is None:
        return None
    default = next((one for one in network.interfaces if one.name == network.default_interface), None)
    return (default.name, default.speed_mb_s) if default is not None and default.speed_mb_s else None


def _by_reference(job: Job, ranks: int) -> tuple[float, str] | None:
    """Return what a published system like this one reaches, by the name of its GPUs."""
    gpus = known(job.machine.gpus) if job.machine is not None else None
    names = {gpu.name for gpu in gpus.devices} if gpus is not None else set()
    nccl = all(group.backend == "nccl" for rank in job.ranks for group in rank.groups)
    if len(names) != 1 or not nccl:
        return None
    name, nodes = names.pop(), len({rank.host for rank in job.ranks})
    fitting = (
        row
        for row in read_references()
        if row.gpu.fullmatch(name) and (row.ranks, row.nodes, row.collective) == (ranks, nodes, Collective.ALL_REDUCE)
    )
    row = next(fitting, None)
    return None if row is None else (row.low_gb_s, f"published for {row.text}")
