"""Asks NVML, in a child process: a GPU that died leaves its caller in a sleep that nothing ends.

The only file that imports pynvml. What NVML answers becomes facts in ``gpu_facts``, which is handed pynvml or a
recording of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.child import Ended, run_child
from ddpdoctor.collect.gpu_facts import read_gpu_facts
from ddpdoctor.collect.nvml_calls import Nvml, NvmlError
from ddpdoctor.collect.system import System
from ddpdoctor.model.gpus import Gpu, GpuOnBus, GpuPair, GpuProcess, Gpus, NvLink
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from ddpdoctor.collect.node import Plan

CHILD_LIMIT_S = 40.0
"""Ours: without a persistence daemon the first call wakes every GPU, which takes some seconds for each."""
NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
LIBRARY = "libnvidia-ml.so.1"
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
)
"""Where distributions, WSL, Google's Kubernetes and NixOS put the driver's libraries."""
DRIVER_TRACES = ("/proc/driver/nvidia", "/dev/nvidiactl")


def is_nvidia_here(system: System) -> bool:
    """Say whether anything of NVIDIA's driver shows, without loading any of it."""
    if any(system.exists(path) for path in DRIVER_TRACES):
        return True
    folders = (*LIBRARY_FOLDERS, *system.env.get("LD_LIBRARY_PATH", "").split(":"))
    return any(system.exists(f"{folder}/{LIBRARY}") for folder in folders if folder.startswith("/"))


def read_gpus(system: System, plan: Plan) -> Gpus:  # noqa: ARG001 - every collector is called so
    """Return what NVML says; raises ``NotRead`` where there is no driver, or where it did not answer at all."""
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    if not system.live:
        raise NotRead(Unread(why=Why.ABSENT, reason="a recorded machine has no NVML"))
    return gpus_of(run_child("ddpdoctor.collect.nvml", (), system.env, CHILD_LIMIT_S), CHILD_LIMIT_S)


def gpus_of(ended: Ended, limit_s: float) -> Gpus:
    """Turn the lines of the child into facts: each is all that it knew by then, and the last one counts."""
    lines = [line for line in ended.out.splitlines() if line.startswith("{") and line.endswith("}")]
    if lines:
        return _decode(json.loads(lines[-1]))
    if ended.status is None:
        reason = f"NVML did not answer within {limit_s:.0f} s: the NVIDIA driver or a GPU hangs"
        raise NotRead(Unread(why=Why.TIMEOUT, reason=reason))
    raise NotRead(Unread(why=Why.ERROR, reason=f"NVML could not be asked: {ended.last_error}"))


def _decode(said: dict[str, Any]) -> Gpus:
    if "absent" in said:
        raise NotRead(Unread(why=Why.ABSENT, reason=said["absent"]))
    devices = tuple(_decode_gpu(gpu) for gpu in said.pop("devices"))
    pairs = tuple(GpuPair(**pair) for pair in said.pop("pairs"))
    on_bus = tuple(GpuOnBus(**gpu) for gpu in said.pop("on_bus"))
    return Gpus(devices=devices, pairs=pairs, on_bus=on_bus, **said)


def _decode_gpu(said: dict[str, Any]) -> Gpu:
    processes, links = said.pop("processes"), said.pop("nvlinks")
    return Gpu(
        processes=None if processes is None else tuple(GpuProcess(**process) for process in processes),
        nvlinks=None if links is None else tuple(NvLink(**link) for link in links),
        **said,
    )


def read_uuids() -> tuple[str, ...]:
    """Return the UUIDs of all GPUs, in NVML's order; none on a machine without a driver."""
    try:
        import pynvml
    except ImportError:
        return ()
    nvml = Nvml(pynvml)
    try:
        nvml.call("nvmlInit")
    except NvmlError:
        return ()
    try:
        handles = [nvml.call("nvmlDeviceGetHandleByIndex", index) for index in range(nvml.call("nvmlDeviceGetCount"))]
        return tuple(str(nvml.call("nvmlDeviceGetUUID", handle)) for handle in handles)
    except NvmlError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def main() -> None:
    """Write, a line at a time, all that is known so far: a device that hangs costs what comes after it."""
    try:
        import pynvml
    except ImportError as error:
        sys.exit(f"the package nvidia-ml-py cannot be imported: {error}")
    try:
        for gpus in read_gpu_facts(Nvml(pynvml), System()):
            print(json.dumps(asdict(gpus)), flush=True)  # noqa: T201 - what the parent reads
    except NotRead as missing:
        print(json.dumps({"absent": missing.unread.reason}), flush=True)  # noqa: T201 - what the parent reads


if __name__ == "__main__":
    main()
