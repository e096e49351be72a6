"""Reads NVIDIA GPUs from the PCI bus and the driver's files, to compare with NVML's list."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.gpus import GpuOnBus

if TYPE_CHECKING:
    from ddpdoctor.collect.system import System

DEVICES = "/sys/bus/pci/devices"
NVIDIA = 0x10DE
DISPLAY = frozenset({0x0300, 0x0302})
"""VGA controllers and 3D controllers."""


def read_on_bus(system: System) -> tuple[GpuOnBus, ...]:
    """Return the NVIDIA GPUs on the PCI bus, or () without sysfs."""
    return tuple(_read(system, name) for name in system.names(DEVICES) if _is_gpu(system, name))


def _is_gpu(system: System, name: str) -> bool:
    device_class = system.number_or_none(f"{DEVICES}/{name}/class")
    return (
        device_class is not None
        and device_class >> 8 in DISPLAY
        and system.number_or_none(f"{DEVICES}/{name}/vendor") == NVIDIA
    )


def _read(system: System, name: str) -> GpuOnBus:
    try:
        driver = system.path(f"{DEVICES}/{name}/driver").readlink().name
    except OSError:
        driver = None
    return GpuOnBus(bus_id=name, device=system.number_or_none(f"{DEVICES}/{name}/device"), driver=driver)


def try_unlisted(system: System, on_bus: tuple[GpuOnBus, ...], listed: set[str]) -> tuple[GpuOnBus, ...]:
    """Open the device file of every GPU that the NVIDIA driver has but NVML does not list.

    If a container or batch system withholds a GPU from this process, its file is missing or access is denied. That
    distinguishes it from a broken GPU.
    """
    return tuple(
        replace(gpu, open_error=_open_error(system, gpu.bus_id))
        if gpu.driver == "nvidia" and gpu.bus_id not in listed
        else gpu
        for gpu in on_bus
    )


def _open_error(system: System, bus_id: str) -> str | None:
    text = system.text_or(f"/proc/driver/nvidia/gpus/{bus_id}/information")
    minor = re.search(r"Device Minor:\s*(\d+)", text)
    if minor is None:
        return None
    try:
        os.close(os.open(system.path(f"/dev/nvidia{minor.group(1)}"), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "ok"
