"""Reads torch's process groups: names, how many collectives each has begun, and flight recorders.

Only the flight recorders know what is pending on a device, and what DDP's C++ reducer started. The sampler asks them
last, because a query can hold the GIL or wait for a lock in CUDA.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import weakref
from typing import Any, Dict, List, Optional, Tuple

from .state import guarded, here, pass_on
from .step_clock import is_capturing
from .storage import flight

c10d: Any = None  # torch.distributed.distributed_c10d, once the script has imported it
_known: Dict[int, KnownGroup] = {}  # By id of the group. An entry is removed as soon as its group is freed.


class KnownGroup:
    """What is kept about one group."""

    __slots__ = ("aside", "desc", "device", "id", "moved", "name", "reference", "ring")

    def __init__(self, group: Any, device: str = "") -> None:
        # The entry goes with the group: there may be thousands. C alone: Python would print what a signal raises here.
        self.reference = weakref.ref(group, functools.partial(_known.pop, id(group)))
        self.device = device  # In ``aside``: the device whose backend has its own counter. Empty otherwise.
        self.name = str(group.group_name) + (":gloo" if device else "")
        # The Gloo part of a group with NCCL too, like a group of its own: torch shows NCCL's counter, which stays then.
        config = str(getattr(getattr(c10d, "_world", None), "pg_backend_config", {}).get(group) or "").split(",")
        is_mixed = "cpu:gloo" in config and any(part.partition(":")[2].startswith("nccl") for part in config)
        self.aside: Optional[KnownGroup] = KnownGroup(group, "cpu") if is_mixed and not device else None
        # The description given at creation. A device mesh puts the name of its dimension here.
        self.desc = str(getattr(group, "group_desc", None) or "")
        self.moved = 0  # how much point-to-point calls have moved the backend's sequence number
        self.ring: Any = None
        self.id = 0  # the interned name, in ``ring``


def known(group: Any) -> KnownGroup:
    found = _known.get(id(group))
    if found is None:
        found = _known[id(group)] = KnownGroup(group)
    return found


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

    ``group`` may be its name; None stands for the default group. The group returned is None without a default
    group, or if ``group`` is a number, which means that this rank is not a member.
    """
    if group is None:
        group = default()
    found = _known.get(id(group))
    if found is None:
        if group is None or isinstance(group, int):
            return None, None, -1
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)
        found = known(group)
    try:
        return group, found, group._get_sequence_number_for_group() - found.moved
    except Exception as error:  # noqa: BLE001 - not every backend counts
        pass_on(error)
        return group, found, -1


def name_id(ring: Any, found: KnownGroup) -> int:
    if found.ring is not ring:
        found.id, found.ring = ring.intern(found.name), ring
    return found.id


def default() -> Any:
    """Return the default group, or None if torch.distributed is not initialized."""
    return None if c10d is None else c10d._world.default_pg


def backends_of(group: Any) -> str:
    """Return torch's text of which backend serves which device ("cuda:nccl"), even if the script named none."""
    return str(c10d._world.pg_backend_config.get(group) or c10d.get_backend(group))


def groups_now() -> Any:
    if default() is None:
        return []
    world = c10d._world
    found = []
    for group, ranks in list(world.pg_group_ranks.items()):
        if isinstance(group, int):  # a number stands for a group that this rank is no member of
            continue
        own = known(group)
        limits = []
        for device in getattr(group, "_device_types", ()):
            try:
                limits.append(group._get_backend(device).options._timeout.total_seconds())
            except Exception as error:  # noqa: BLE001 - a device that this build of torch lacks, or no options
                pass_on(error)
        entry = {
            "name": own.name, "desc": own.desc, "ranks": sorted(int(r) for r in ranks),
            "backend": str(world.pg_map[group][0]) if group in world.pg_map else "",
            "enqueued": begun_by(own), "timeout_s": max(limits, default=None),
        }  # fmt: skip
        found.append(entry)
        if own.aside is not None:
            found.append(dict(entry, name=own.aside.name, backend="gloo", enqueued=begun_by(own.aside)))
    return found


# torch's functions that dump its recorders: the one of Gloo and hooked backends, and ProcessGroupNCCL's.
FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
# With any of these on, ProcessGroupNCCL records when a kernel starts (ProcessGroupNCCL.cpp).
_TIMING = ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
# With one of these on, a call waits for its device, and no watchdog retires what is done. The next call uses its events
# again, so that a call that is pending makes all before it look so.
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_ON = frozenset({"y", "yes", "1", "t", "true"})  # what torch's getCvarBool accepts as on, in lower case (Utils.hpp)
# The name before torch 2.9, which does not know the newer one, then that, and the value; "" for the path of the dump.
# Up to 2.6 the recorder and its dump are off by default. Since 2.9 the dump is on, and torch warns about old names. If
# the user has set one, the new one is not set, because it would win.
_FLIGHT_VARIABLES = (
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "2000"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "", "1"),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", ""),
)


@guarded("flight recorder")
def turn_on_flight_recorders() -> None:
    """Make torch record collectives on devices, before it makes the first group. The user's own settings stay."""
    if not hasattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroupNCCL"):
        return
    prefix = os.path.join(here.folder, "evidence", "%d-%d.flight" % (os.getpid(), here.ticks))
    major, minor, *_ = (str(getattr(sys.modules.get("torch"), "__version__", "")) + "..").split(".")
    is_old = major.isdigit() and minor.isdigit() and (int(major), int(minor)) < (2, 9)
    for old, new, value in _FLIGHT_VARIABLES:
        name = old if is_old else new
        given = os.environ.get(name) or os.environ.get(old) or ""
        if name and (not given or given.startswith(here.folder + os.sep)):  # a value inherited from a recorded parent
            os.environ[name] = value or prefix


def flight_entries_now() -> Any:
    """Return what is pending on devices, with both clocks; ``timed``: the last completed too, ``idle``: if untold."""
    native = sys.modules.get("torch._C._distributed_c10d")
    if native is None or default() is None:
        return {}
    names = [str(name) for name in c10d._world.pg_names.values()]
    entries: List[Any] = []
    blocking = _is_on(_BLOCKING)
    # For each recorder of this build what it is for, and how to dump it. Completed entries are included, because only
    # they show that a batch is done. Gloo's is left out, because its entries never complete. Whether a function serves
    # several is read from its signature: torch 2.14 has the hook, and keeps what it records with that of Gloo.
    own, hooked = getattr(native, "_dump_nccl_trace_json", None), getattr(native, "_dump_fr_trace_json", None)
    dumps: List[Tuple[str, Any]] = [("nccl", own)] if own is not None else []
    if hooked is not None and hasattr(native, "FlightRecorderHook"):
        if "backend:" in (hooked.__doc__ or "").partition("->")[0]:
            dumps += [(backend, functools.partial(hooked, backend=backend)) for backend in flight.HOOKED]
        else:
            dumps.append((" and ".join(flight.HOOKED), hooked))
    for source, dump in dumps:
        try:
            entries += flight.chosen(json.loads(dump()).get("entries"), names, newest=blocking)
        except Exception as error:  # noqa: BLE001 - the recorder's wall: what another recorder holds is not lost
            here.failed("flight recorder of " + source, error)
    found = {"wall_ns": time.time_ns(), "at": time.monotonic_ns(), "timed": int(is_timed()), "entries": entries}
    if any(map(flight.is_untold, entries)):
        found["idle"] = None  # whether this process's devices are done
        cuda, torch_c = sys.modules.get("torch.cuda"), sys.modules.get("torch._C")
        if cuda is not None and torch_c is not None and cuda.is_initialized() and not is_capturing():
            used = filter(torch_c._cuda_hasPrimaryContext, range(cuda.device_count()))  # asking others makes a context
            try:
                found["idle"] = int(all(cuda.default_stream(device).query() for device in used))
            except Exception as error:  # noqa: BLE001 - the device has failed, and the script gets its own error
                pass_on(error)
    return found


def is_timed() -> bool:
    return _is_on(_TIMING)


def _is_on(names: Tuple[str, ...]) -> bool:
    return any(os.environ.get(name, "").lower() in _ON for name in names)


@guarded("device times")
def note_device_times() -> None:
    """Note how long the last collectives ran, if torch times them. It may block, as destroying the groups would too."""
    if here.ring is None or not is_timed():
        return
    rows = [
        [entry["process_group"][0], entry["collective_seq_id"], flight.op_of(entry), entry["duration_ms"]]
        for entry in flight_entries_now().get("entries", ()) if entry["state"] == "completed"
    ]  # fmt: skip
    here.note("device_times", rows=rows)
