"""The buffers of a collective: in memory that is already mapped, and either one set or more than a cache holds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.system import read_text
from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.probes.bandwidth.cases import ALWAYS_IN_PLACE, DTYPES

if TYPE_CHECKING:
    import torch

    from ddpdoctor.model.bandwidth import Case
    from ddpdoctor.probes.bandwidth.group import RankGroup

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
COLD_FACTOR = 2
"""Our choice: rotating buffers take this many times the last-level cache. It is twice what strict LRU would need,
because caches do not strictly replace the oldest line."""


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
