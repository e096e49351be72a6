"""A process group of the bench. It tracks every call, so that a report can say where a rank hangs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddpdoctor.probes.bandwidth.tracker import Tracker


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks of the job, including this one. Functions of ``dist`` are looked up at each call."""

    handle: Any
    """A torch ProcessGroup, or None for all ranks."""
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    device: torch.device
    backend: str
    tracker: Tracker

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This process's place in the group."""
        import torch.distributed as dist

        return self.ranks.index(dist.get_rank())

    def barrier(self) -> float:
        """Wait for all ranks, and return the seconds that this rank waited inside the barrier.

        Delays before the barrier do not count, so a rank that comes late waits for nobody.
        """
        import torch.distributed as dist

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
        """Wait until the device has finished its work, because NCCL's calls return before that."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.current_stream(self.device).synchronize()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks on every rank, one row per rank. All must give the same number of values."""
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in self.ranks]
        self.tracker.enter("all_gather", self.ranks)
        dist.all_gather(rows, own, group=self.handle)
        gathered: list[list[float]] = [row.tolist() for row in rows]
        self.tracker.leave()
        return gathered

    def agree(self, value: float) -> float:
        """Return the value of the group's first rank on every rank."""
        import torch
        import torch.distributed as dist

        agreed = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.tracker.enter("broadcast", self.ranks)
        dist.broadcast(agreed, src=self.ranks[0], group=self.handle)
        first = float(agreed.item())
        self.tracker.leave()
        return first
