"""Asks NVML in a child process, because a dead GPU can leave the caller in a sleep that never ends.

Only this file imports pynvml. ``facts.py`` turns the answers of pynvml, or of a recording, into facts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.child import ChildEnd, run_child
from ddpdoctor.collect.gpu.facts import read_gpu_facts
from ddpdoctor.collect.gpu.nvml_calls import Nvml, NvmlError
from ddpdoctor.collect.machine.software import LIBRARY_FOLDERS
from ddpdoctor.collect.system import System
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.gpus import Gpus
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.model.visible_devices import VARIABLE, read_visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.node import ReadingPlan

CHILD_LIMIT_S = 40.0
"""Our choice: without a persistence daemon, the first call wakes every GPU, which takes a few seconds for each."""
COUNT_LIMIT_S = 20.0
"""Our choice: shorter, because a user waits for the commands that only count GPUs."""
WITHOUT_LIMIT_S = 1.0
"""Our choice: the child must end this long before its section's limit, so that its answer still counts."""
UUIDS = "uuids"
"""With this argument, the child prints only the GPUs' UUIDs."""
HANGS = "the NVIDIA driver or a GPU hangs. See `sudo dmesg | grep -E 'NVRM|Xid'`; reboot if `nvidia-smi` hangs too"
NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
NO_DRIVER_ERRORS = {"DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND"}
MODULE = "ddpdoctor.collect.gpu.nvml"
LIBRARY = "libnvidia-ml.so.1"
DRIVER_TRACES = ("/proc/driver/nvidia", "/dev/nvidiactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCount:
    """How many NVIDIA GPUs a job may use."""

    count: int = 0
    unknown: str = ""
    """Why the GPUs could not be counted although there is a driver."""


def is_nvidia_here(system: System) -> bool:
    """Return whether there is any trace of NVIDIA's driver, without loading it."""
    if any(system.exists(path) for path in DRIVER_TRACES):
        return True
    folders = (*LIBRARY_FOLDERS, *system.env.get("LD_LIBRARY_PATH", "").split(":"))
    return any(system.exists(f"{folder}/{LIBRARY}") for folder in folders if folder.startswith("/"))


def read_gpus(system: System, plan: ReadingPlan) -> Gpus:
    """Return NVML's facts; raises ``NotRead`` if there is no driver or no answer at all."""
    limit_s = CHILD_LIMIT_S if plan.limit_s is None else min(CHILD_LIMIT_S, plan.limit_s - WITHOUT_LIMIT_S)
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    if not system.live:
        raise NotRead(Unread(why=Why.ABSENT, reason="a recorded machine has no NVML"))
    return gpus_of(run_child(MODULE, (), system.env, limit_s), limit_s)


def read_uuids(system: System, limit_s: float = COUNT_LIMIT_S) -> tuple[str, ...]:
    """Return the UUIDs of all GPUs in NVML's order; raises ``NotRead`` if there is no driver or no answer."""
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    said = _last_words(run_child(MODULE, (UUIDS,), system.env, limit_s), limit_s)
    return tuple(said[UUIDS])


def count_gpus(env: Mapping[str, str]) -> GpuCount:
    """Count the GPUs that ``CUDA_VISIBLE_DEVICES`` allows; a child asks NVML, because a dead GPU never answers."""
    visible = env.get(VARIABLE)
    if read_visible(visible, ()).on_purpose:
        return GpuCount()
    try:
        return GpuCount(count=len(read_visible(visible, read_uuids(System(env=env))).devices))
    except NotRead as missing:
        absent = missing.unread.why is Why.ABSENT
        return GpuCount(unknown="" if absent else missing.unread.reason)


def gpus_of(ended: ChildEnd, limit_s: float) -> Gpus:
    """Turn the child's output into facts: each line holds all facts so far, and the last line counts."""
    return decode(Gpus, _last_words(ended, limit_s))


def _last_words(ended: ChildEnd, limit_s: float) -> dict[str, Any]:
    if ended.records:
        said = ended.records[-1]
        if "absent" in said:
            raise NotRead(Unread(why=Why.ABSENT, reason=said["absent"]))
        return said
    if ended.status is None:
        reason = f"NVML did not answer within {limit_s:.0f} s: {HANGS}"
        raise NotRead(Unread(why=Why.TIMEOUT, reason=reason))
    raise NotRead(Unread(why=Why.ERROR, reason=f"NVML gave no answer: {ended.last_error}"))


def _list_uuids(nvml: Nvml) -> list[str]:
    """Return the UUIDs, or "GPU 3" for a GPU whose UUID cannot be read; raises ``NotRead``."""
    try:
        nvml.call("nvmlInit")
        count = nvml.call("nvmlDeviceGetCount")
    except NvmlError as error:
        if error.name in NO_DRIVER_ERRORS:
            raise NotRead(NO_DRIVER) from error
        sys.exit(f"it says {error.name}")
    return [_uuid(nvml, index) for index in range(count)]


def _uuid(nvml: Nvml, index: int) -> str:
    try:
        return str(nvml.call("nvmlDeviceGetUUID", nvml.call("nvmlDeviceGetHandleByIndex", index)))
    except NvmlError:
        return f"GPU {index}"


def main(arguments: list[str]) -> None:
    """Print all facts so far again and again, one line each time, so that a hanging device costs only later facts."""
    try:
        import pynvml
    except ImportError as error:
        sys.exit(f"the package nvidia-ml-py cannot be imported: {error}")
    try:
        if arguments == [UUIDS]:
            _say({UUIDS: _list_uuids(Nvml(pynvml))})
            return
        for gpus in read_gpu_facts(Nvml(pynvml), System()):
            _say(encode(gpus))
    except NotRead as missing:
        _say({"absent": missing.unread.reason})


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main(sys.argv[1:])
