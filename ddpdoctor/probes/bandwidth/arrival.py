"""Computes how late each rank comes from its waits in the barriers: the rank that comes last does not wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Arrival

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MOST_KEPT = 200
"""Our choice: calls kept per case. Enough for a median, and small even with a thousand ranks."""


class BarrierWaits:
    """Collects the waits of all cases measured with barriers."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """``hosts`` has each rank's host, in group order. The group must be the whole job."""
        self._hosts = tuple(hosts)
        self._late_us: list[torch.Tensor] = []

    def add(self, waits_us: Sequence[Sequence[float]]) -> None:
        """Add the waits of a case: one row per rank, one value per call."""
        if len(waits_us) > 1:
            self._late_us.append(lateness(waits_us))

    def summary(self) -> tuple[Arrival, ...]:
        """Return how late each rank came, or () for a single rank or without measurements."""
        import torch

        if not self._late_us:
            return ()
        late_us = torch.cat(self._late_us)
        last = late_us.argmax(dim=1)
        # torch.quantile takes no more than 16 million values.
        middle, high = (late_us.kthvalue(math.ceil(share * len(late_us)), dim=0).values for share in (0.5, 0.95))
        return tuple(
            Arrival(
                rank=rank,
                host=host,
                late_us=float(middle[rank]),
                late_p95_us=float(high[rank]),
                share=float((last == rank).double().mean()),
                calls=len(late_us),
            )
            for rank, host in enumerate(self._hosts)
        )


def lateness(waits_us: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return the median wait of the other ranks minus the rank's own: one row per call, one column per rank.

    ``waits_us`` has one row per rank. The rank that comes last has the largest value, which is how late it is.
    """
    import torch

    waits = torch.tensor([row[:MOST_KEPT] for row in waits_us], dtype=torch.float64).T
    ordered, order = waits.sort(dim=1)
    place = order.argsort(dim=1)
    others = waits.shape[1] - 1
    return (_without(ordered, place, (others - 1) // 2) + _without(ordered, place, others // 2)) / 2 - waits


def _without(ordered: torch.Tensor, place: torch.Tensor, index: int) -> torch.Tensor:
    """Return for each rank the wait at ``index`` of the sorted row after its own wait is removed."""
    return ordered.gather(1, (place <= index).long() + index)
