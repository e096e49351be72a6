"""Reads torch's flight recorders. Only they know what is pending on a device, and what DDP's C++ reducer started.

The sampler asks them only after the stacks are on disk, because a query can hold the GIL or wait for a lock in CUDA.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any, Callable, Iterator, List, Tuple

from .. import capture
from ..state import guarded, here, pass_on
from ..storage import flight_entries
from . import groups

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch's functions that dump its recorders: the one of Gloo and hooked backends, and ProcessGroupNCCL's."""
_TIMING = ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
"""With any of these on, ProcessGroupNCCL records when a kernel starts (ProcessGroupNCCL.cpp)."""
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""With one of these on, a call waits for its device, and no watchdog retires what is done. The next call uses its
events again, so that a call that is pending makes all before it look so."""
_ON = frozenset({"y", "yes", "1", "t", "true"})
"""What torch's getCvarBool accepts as on, in lower case (Utils.hpp)."""
_BEFORE_2_9 = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "",
}
"""Up to torch 2.6 the recorder and its dump are off by default. torch before 2.9 does not know the newer names."""
_SINCE_2_9 = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": ""}
"""The old names still work, but torch warns about them. The dump is on by default."""
_SAME = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""If the user has set the old name, the new one is not set, because it would win."""


@guarded("flight recorder")
def turn_on() -> None:
    """Make torch record collectives on devices, and dump the record to the run folder when it aborts the process.

    The user's own settings stay. torch reads these variables when it makes the first process group.
    """
    if not hasattr(_native(), "ProcessGroupNCCL"):
        return
    prefix = os.path.join(here.folder, "evidence", "%d-%d.flight" % (os.getpid(), here.ticks))
    for name, value in (_BEFORE_2_9 if _is_before_2_9() else _SINCE_2_9).items():
        given = os.environ.get(name) or os.environ.get(_SAME.get(name, name)) or ""
        if not given or given.startswith(here.folder + os.sep):  # a value inherited from a recorded parent
            os.environ[name] = value or prefix


def _native() -> Any:
    return sys.modules.get("torch._C._distributed_c10d")


def _is_before_2_9() -> bool:
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) < (2, 9)


def entries_now() -> Any:
    """Return what is pending on devices, from all recorders of this build, and the current time on both clocks.

    ``timed`` says whether torch knows when a kernel starts. If so, the last completed entries are included. ``idle`` is
    there if torch does not tell which calls have completed.
    """
    native = _native()
    if native is None or groups.default() is None:
        return {}
    names = [str(name) for name in groups.c10d._world.pg_names.values()]
    entries: List[Any] = []
    blocking = _is_on(_BLOCKING)
    for source, dump in _sources(native):
        try:
            entries += flight_entries.chosen(json.loads(dump()).get("entries"), names, newest=blocking)
        except Exception as error:  # noqa: BLE001 - the recorder's wall: what another recorder holds is not lost
            here.failed("flight recorder of " + source, error)
    found = {"wall_ns": time.time_ns(), "at": time.monotonic_ns(), "timed": int(is_timed()), "entries": entries}
    if any(map(flight_entries.is_untold, entries)):
        found["idle"] = _are_idle()
    return found


def _are_idle() -> Any:
    """Return whether this process's devices have done all that their default streams were given; None if unknown.

    Only devices with a context of this process are asked, because asking makes one, which takes memory.
    """
    cuda, native = sys.modules.get("torch.cuda"), sys.modules.get("torch._C")
    if cuda is None or native is None or not cuda.is_initialized() or capture.is_capturing():
        return None
    used = filter(native._cuda_hasPrimaryContext, range(cuda.device_count()))
    try:
        return int(all(cuda.default_stream(device).query() for device in used))
    except Exception as error:  # noqa: BLE001 - the device has failed, and the script gets its own error
        pass_on(error)
        return None


def is_timed() -> bool:
    """Return whether torch knows when a kernel starts and ends."""
    return _is_on(_TIMING)


def _is_on(names: Tuple[str, ...]) -> bool:
    return any(os.environ.get(name, "").lower() in _ON for name in names)


@guarded("device times")
def note_times() -> None:
    """Note how long the last collectives ran, if torch times them, because nobody asks a healthy job for evidence.

    The main thread may block here: it is about to destroy the groups, and would wait for its devices there anyway.
    """
    if here.ring is None or not is_timed():
        return
    rows = [
        [entry["process_group"][0], entry["collective_seq_id"], flight_entries.op_of(entry), entry["duration_ms"]]
        for entry in entries_now().get("entries", ())
        if entry["state"] == "completed"
    ]
    here.ring.note({"k": "device_times", "rows": rows, "at": time.monotonic_ns()})


def _sources(native: Any) -> Iterator[Tuple[str, Callable[[], bytes]]]:
    """Yield what each recorder of this build is for, and how to dump it.

    Completed entries are included, because only they show that a batch is done. Gloo's recorder is left out, because
    its entries never complete. Whether one function serves several recorders is read from its signature: torch 2.14
    has the hook, and keeps what it records with that of Gloo.
    """
    own = getattr(native, "_dump_nccl_trace_json", None)
    if own is not None:
        yield "nccl", own
    hooked = getattr(native, "_dump_fr_trace_json", None)
    if hooked is None or not hasattr(native, "FlightRecorderHook"):
        return
    if "backend:" not in (hooked.__doc__ or "").partition("->")[0]:
        yield " and ".join(flight_entries.HOOKED), hooked
        return
    for backend in flight_entries.HOOKED:
        yield backend, functools.partial(hooked, backend=backend)
