"""Computes how much memory a rank may take for its buffers, and how much a case needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.limits import read_machine, read_memory_limit
from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.model.words import format_size
from ddpdoctor.probes.bandwidth.buffers import count_sets, set_bytes
from ddpdoctor.probes.bandwidth.pattern import working_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddpdoctor.model.bandwidth import Case, Member
    from ddpdoctor.model.facts import Space
    from ddpdoctor.probes.bandwidth.group import RankGroup

USABLE_SHARE = 0.8
"""Our choice: the rest is for other processes. A machine short of memory would measure its swap."""
UNKNOWN_BYTES = 2**60
"""More than any machine has, if neither the machine nor a control group says what is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The free memory of the rank that has least, the same value on all ranks."""

    free_bytes: int
    rank: int

    def refuse(self, needed_bytes: int) -> str:
        """Return why a case cannot be measured, as a phrase, or "" if it can."""
        if needed_bytes <= self.free_bytes * USABLE_SHARE:
            return ""
        return f"needs {_readable(needed_bytes)} of {_readable(self.free_bytes)} free on rank {self.rank}"


def _readable(size_bytes: int) -> str:
    """Return a size in whole GiB, or below 10 GiB in whole MiB, so that rounding loses less than a tenth."""
    unit = 2**30 if size_bytes >= 10 * 2**30 else 2**20
    return format_size(round(size_bytes / unit) * unit)


def find_free_memory(group: RankGroup, members: Sequence[Member]) -> FreeMemory:
    """Return the least room of all ranks. This is collective, and no buffers may be held. ``members`` are all ranks."""
    own = read_free_bytes(group.device) / count_takers(members[group.ranks[group.index]], members)
    free = [row[0] for row in group.gather([own])]
    least = min(range(group.size), key=free.__getitem__)
    return FreeMemory(free_bytes=int(free[least]), rank=group.ranks[least])


def count_takers(own: Member, members: Sequence[Member]) -> int:
    """Return how many ranks share a rank's memory: the ranks on its GPU, or without GPUs those on its host."""
    if own.device != "cpu":
        return own.gpu_ranks
    return sum(one.host == own.host for one in members)


def needed_bytes(case: Case, group: RankGroup, most: int = 1) -> int:
    """Return the memory of a rank for a case: its buffers (``most`` is as in ``make_sets``) and working memory.

    The correctness pass needs a little. Gloo gathers into a copy of the output, and reduces a copy of reduce_scatter's
    input (seen as growth of the process with torch 2.13). The other collectives take next to nothing.
    """
    copies: bool = group.backend == "gloo" and case.collective in {Collective.ALL_GATHER, Collective.REDUCE_SCATTER}
    sets = count_sets(group.device, case, group.size, most)
    return sets * set_bytes(case, group.size) + copies * case.size_bytes + working_bytes(case, group)


def read_free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of this machine within the limits of this process's control groups."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # torch caches the memory of freed tensors and reuses it for new ones.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return left_of(read_machine(), read_memory_limit())


def left_of(*spaces: Space | None) -> int:
    """Return what the tightest of these limits leaves."""
    return min([UNKNOWN_BYTES, *(max(0, one.limit_bytes - one.used_bytes) for one in spaces if one is not None)])
