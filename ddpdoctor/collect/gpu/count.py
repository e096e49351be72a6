"""Counts the GPUs that a job may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.gpu.nvml import read_uuids
from ddpdoctor.collect.system import System
from ddpdoctor.model.reading import NotRead, Why
from ddpdoctor.model.visible_devices import VARIABLE, read_visible

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCount:
    """How many NVIDIA GPUs there are for a job."""

    count: int = 0
    unknown: str = ""
    """Why they could not be counted, although there is a driver."""


def count_gpus(env: Mapping[str, str]) -> GpuCount:
    """Count what ``CUDA_VISIBLE_DEVICES`` leaves. NVML is asked in a child, since it never returns from a dead GPU."""
    visible = env.get(VARIABLE)
    if read_visible(visible, ()).on_purpose:
        return GpuCount()
    try:
        return GpuCount(count=len(read_visible(visible, read_uuids(System(env=env))).devices))
    except NotRead as missing:
        absent = missing.unread.why is Why.ABSENT
        return GpuCount(unknown="" if absent else missing.unread.reason)
