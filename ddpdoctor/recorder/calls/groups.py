"""What the recorder knows of process groups: their names, and how many collectives each has begun."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Dict, Optional, Tuple

from ..state import here, pass_on
from ..storage import ring_layout

c10d: Any = None
"""torch.distributed.distributed_c10d, once the script has imported it."""
_known: Dict[int, KnownGroup] = {}
"""By id of the group. An entry is removed as soon as its group is freed."""


class KnownGroup:
    """What is kept about one group."""

    __slots__ = ("aside", "desc", "device", "id", "moved", "name", "reference", "ring")

    def __init__(self, group: Any, device: str = "") -> None:
        # The entry goes with the group, because a script may make thousands. C code alone: Python would print what a
        # signal handler raises in a callback of ours.
        self.reference = weakref.ref(group, functools.partial(_known.pop, id(group)))
        self.device = device
        """In ``aside``: the device whose backend has its own counter. Empty otherwise."""
        self.name = str(group.group_name) + (":gloo" if device else "")
        self.aside: Optional[KnownGroup] = KnownGroup(group, "cpu") if not device and _is_mixed(group) else None
        """The Gloo part of a group with Gloo and NCCL, kept like a group of its own. torch shows only NCCL's counter,
        which does not move with Gloo's calls."""
        self.desc = str(getattr(group, "group_desc", None) or "")
        """The description given at creation. A device mesh puts the name of its dimension here."""
        self.moved = 0
        """How much point-to-point calls have moved the backend's sequence number."""
        self.ring: Any = None
        self.id = 0
        """The interned name, in ``ring``."""


def known(group: Any) -> KnownGroup:
    """Return what is kept about a group."""
    found = _known.get(id(group))
    if found is None:
        found = _known[id(group)] = KnownGroup(group)
    return found


def _is_mixed(group: Any) -> bool:
    """Return whether a group uses Gloo for CPU tensors and NCCL for GPU tensors."""
    config = getattr(getattr(c10d, "_world", None), "pg_backend_config", {}).get(group)
    parts = str(config or "").split(",")
    return "cpu:gloo" in parts and any(part.partition(":")[2].startswith("nccl") for part in parts)


def begun_by(found: KnownGroup) -> int:
    """Return how many collectives a group, or its Gloo part, has begun, including those from C++; -1 if not known."""
    try:
        group: Any = found.reference()
        counter = group._get_backend(sys.modules["torch"].device(found.device)) if found.device else group
        return int(counter._get_sequence_number_for_group()) - found.moved
    except Exception as error:  # noqa: BLE001 - not every backend counts
        pass_on(error)
        return -1


def look_up(group: Any) -> Tuple[Any, Any, int]:
    """Return the group of a call, what is kept about it, and how many collectives it has begun (-1 if not known).

    None stands for the default group. The group returned is None if there is no default group, or if ``group`` is a
    number, which means that this rank is no member.
    """
    if group is None:
        group = default()
    found = _known.get(id(group))
    if found is None:
        if group is None or isinstance(group, int):
            return None, None, -1
        found = known(group)
    try:
        return group, found, group._get_sequence_number_for_group() - found.moved
    except Exception as error:  # noqa: BLE001 - not every backend counts
        pass_on(error)
        return group, found, -1


def name_id(ring: Any, found: KnownGroup) -> int:
    """Return the interned name of a group, or of its Gloo part."""
    if found.ring is not ring:
        found.id, found.ring = ring.intern(found.name), ring
    return found.id


def default() -> Any:
    """Return the default group, or None if torch.distributed is not initialized."""
    return None if c10d is None else c10d._world.default_pg


def backends_of(group: Any) -> str:
    """Return torch's text of which backend serves which device ("cuda:nccl"), even if the script named none."""
    return str(c10d._world.pg_backend_config.get(group) or c10d.get_backend(group))


def begun_in(group: Any) -> Tuple[int, int]:
    """Return a group's interned name, and how many collectives it has begun (-1 if not known).

    If ``group`` is None, the number is that of the default group, and the name is empty.
    """
    ring = here.ring
    _, found, begun = look_up(group)
    if ring is None or found is None:
        return 0, ring_layout.NO_SEQ
    return name_id(ring, found) if group is not None else 0, begun


def groups_now() -> Any:
    """Describe the groups of this process for the evidence."""
    if default() is None:
        return []
    world = c10d._world
    found = []
    for group, ranks in list(world.pg_group_ranks.items()):
        if isinstance(group, int):  # a number stands for a group that this rank is no member of
            continue
        own = known(group)
        entry = {
            "name": own.name,
            "desc": own.desc,
            "ranks": sorted(int(r) for r in ranks),
            "backend": str(world.pg_map[group][0]) if group in world.pg_map else "",
            "enqueued": begun_by(own),
            "timeout_s": _timeout_s(group),
        }
        found.append(entry)
        if own.aside is not None:
            found.append(dict(entry, name=own.aside.name, backend="gloo", enqueued=begun_by(own.aside)))
    return found


def _timeout_s(group: Any) -> Optional[float]:
    """Return the time limit of a group's calls, the longest of its backends', or None if no backend gives one."""
    found = []
    for device in getattr(group, "_device_types", ()):
        try:
            found.append(group._get_backend(device).options._timeout.total_seconds())
        except Exception as error:  # noqa: BLE001 - a device that this build of torch lacks, or no options
            pass_on(error)
    return max(found, default=None)


def init_timeout_s(backend: Any, timeout: Any) -> Optional[float]:
    """Return the time limit of ``init_process_group``: the script's, else torch's own for the backend."""
    nccl = getattr(c10d, "default_pg_nccl_timeout", None) if backend == "nccl" else None
    limit = timeout or nccl or getattr(c10d, "default_pg_timeout", None)
    seconds = getattr(limit, "total_seconds", None)
    return float(seconds()) if seconds is not None else None
