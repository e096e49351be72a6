"""The step with more ranks than were run, by models of a ring and of a tree. Never a finding.

A ring takes ``2 (N - 1) a + 2 (N - 1) / N * S / B`` (Patarasuk and Yuan, 2009; NVIDIA/nccl, src/graph/tuning.cc), a
tree ``2 ceil(log2 N) a`` and about twice the time of its bytes. Waiting grows with the slowest of N ranks, whose time
is beyond the mean by up to ``sigma * sqrt(2 ln N)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, log2, sqrt
from typing import TYPE_CHECKING

from ddpdoctor.model.scaling import PredictedSize

from .curves import ring_factor
from .simulation import ReductionCost, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .predictions import PredictionBasis

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
TREE_BYTES = 2.0
"""A tree reaches about half of the ring's bandwidth (tuning.cc; double binary trees, NCCL 2.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """The largest job that was run."""

    ranks: int
    step_ms: float
    efficiency: float
    spread_ms: float
    """Sigma: standard deviation of a rank's own time."""


def predict_sizes(
    basis: PredictionBasis, measured: MeasuredSize, sizes: Sequence[int] = SIZES
) -> tuple[PredictedSize, ...]:
    """Return the step for each larger number of ranks, with the batch per rank of the measured job.

    Empty if nothing tells how fast the network is.
    """
    networks = [one for one in basis.networks if isinstance(one, ReductionCost)]
    if basis.gradients is None or not networks:
        return ()
    larger = (size for size in sizes if size > measured.ranks)
    return tuple(_predict(basis, measured, networks, size) for size in larger)


def _predict(
    basis: PredictionBasis, measured: MeasuredSize, networks: Sequence[ReductionCost], ranks: int
) -> PredictedSize:
    waiting_ms = waiting_of(measured.spread_ms, ranks)
    more_ms = [
        reduction_ms(basis, cost) - reduction_ms(basis, network)
        for network in networks
        for cost in (ring_cost(network, measured.ranks, ranks), tree_cost(network, measured.ranks, ranks))
    ]
    steps = [
        max(0.0, one) + measured.step_ms + waiting_ms - waiting_of(measured.spread_ms, measured.ranks)
        for one in more_ms
    ]
    low_ms, high_ms = min(steps), max(steps)
    return PredictedSize(
        ranks=ranks,
        low_ms=low_ms,
        high_ms=high_ms,
        waiting_ms=waiting_ms,
        low=measured.efficiency * measured.step_ms / high_ms,
        high=measured.efficiency * measured.step_ms / low_ms,
    )


def reduction_ms(basis: PredictionBasis, network: ReductionCost) -> float:
    """Return the reduction of a step that backward does not hide."""
    gradients = basis.gradients
    if gradients is None:
        return 0.0
    return basis.reductions * (simulate(gradients, gradients.bucket_bytes, network) - gradients.compute_end_ms)


def waiting_of(spread_ms: float, ranks: int) -> float:
    """Return how far the slowest of so many ranks is beyond the mean, at most: sigma * sqrt(2 ln N)."""
    return spread_ms * sqrt(2 * log(ranks))


def ring_cost(network: ReductionCost, measured: int, ranks: int) -> ReductionCost:
    """Return the cost of a bucket on a ring of more ranks: more hops, and slightly more bytes on each."""
    return ReductionCost(
        latency_ms=network.latency_ms * (ranks - 1) / (measured - 1),
        bytes_per_ms=network.bytes_per_ms * ring_factor(measured) / ring_factor(ranks),
    )


def tree_cost(network: ReductionCost, measured: int, ranks: int) -> ReductionCost:
    """Return the cost of a bucket on a tree. The measured job is taken for a ring."""
    hop_ms = network.latency_ms / (2 * (measured - 1))
    return ReductionCost(
        latency_ms=2 * ceil(log2(ranks)) * hop_ms,
        bytes_per_ms=network.bytes_per_ms * ring_factor(measured) / TREE_BYTES,
    )
