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
    """How many NVIDIA GPUs a job may use."""

    count: int = 0
    unknown: str = ""
    """Why the GPUs could not be counted although there is a driver."""


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
