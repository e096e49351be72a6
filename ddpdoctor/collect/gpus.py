"""Counts the GPUs that a job may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.nvml import read_uuids
from ddpdoctor.model.visible_devices import VARIABLE, read_visible

if TYPE_CHECKING:
    from collections.abc import Mapping


def count_gpus(env: Mapping[str, str]) -> int:
    """Count the NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` leaves; 0 on a machine without a driver."""
    return len(read_visible(env.get(VARIABLE), read_uuids()).devices)
