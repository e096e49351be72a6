"""Computes how much memory a rank may take for its buffers, and how much a case needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.probes.bandwidth.buffers import count_sets, set_bytes
from ddpdoctor.probes.bandwidth.pattern import working_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddpdoctor.model.bandwidth import Case, Member
    from ddpdoctor.probes.bandwidth.group import Group

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
USABLE_SHARE = 0.8
"""Our choice: the rest is for other processes. A machine short of memory would measure its swap."""
UNLIMITED_BYTES = 2**60
"""Limits from here on mean "no limit". cgroup v1 writes it as the largest multiple of the page size below 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
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


def find_room(group: Group, members: Sequence[Member]) -> Room:
    """Return the least room of all ranks. This is collective, and no buffers may be held. ``members`` are all ranks."""
    own = read_free_bytes(group.device) / count_takers(members[group.ranks[group.index]], members)
    free = [row[0] for row in group.gather([own])]
    least = min(range(group.size), key=free.__getitem__)
    return Room(free_bytes=int(free[least]), rank=group.ranks[least])


def count_takers(own: Member, members: Sequence[Member]) -> int:
    """Return how many ranks share a rank's memory: the ranks on its GPU, or without GPUs those on its host."""
    if own.device != "cpu":
        return own.gpu_ranks
    return sum(one.host == own.host for one in members)


def needed_bytes(case: Case, group: Group, most: int = 1) -> int:
    """Return the memory of a rank for a case: its buffers (``most`` is as in ``make_sets``) and working memory.

    The correctness pass needs a little. Gloo gathers into a copy of the output, and reduces a copy of reduce_scatter's
    input (seen as growth of the process with torch 2.13). The other collectives take next to nothing.
    """
    copies: bool = group.backend == "gloo" and case.collective in {Collective.ALL_GATHER, Collective.REDUCE_SCATTER}
    sets = count_sets(group.device, case, group.size, most)
    return sets * set_bytes(case, group.size) + copies * case.size_bytes + working_bytes(case, group)


def read_free_bytes(device: torch.device, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the free memory of a GPU, or of this machine within the limits of this process's control groups."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # torch caches the memory of freed tensors and reuses it for new ones.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    available = int(found[1]) * 1024 if found else UNLIMITED_BYTES
    return min([available, *(_left_in(folder) for folder in _groups(proc, cgroups))])


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the folders of this process's memory cgroups (v1 and v2) and of all their parents."""
    found = [cgroups, cgroups / "memory"]
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = cgroups / "memory" if controllers else cgroups
        # A path with ".." leads out of the container's view and cannot be read.
        for name in [] if ".." in path else [part for part in path.split("/") if part]:
            folder /= name
            found.append(folder)
    return found


def _left_in(folder: Path) -> int:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= UNLIMITED_BYTES:
        return UNLIMITED_BYTES
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    # Inactive page cache can be reclaimed.
    cache = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return max(0, limit - used + (int(cache[1]) if cache else 0))


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
