"""Makes NCCL write its warnings to the run folder if it would otherwise write nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.machine.nccl_conf import read_conf_files
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.run.nccl_warnings import FOLDER
from ddpdoctor.collect.system import System
from ddpdoctor.recorder.storage.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""The drivers of NVIDIA and of AMD, whose RCCL reads the same variables."""


def has_gpu_driver(system: System) -> bool:
    """Return whether this host has a GPU driver, so that a job may use NCCL."""
    return any(system.exists(driver) for driver in GPU_DRIVERS)


def nccl_log_environment(env: Mapping[str, str], folder: Path, system: System | None = None) -> dict[str, str]:
    """Return the variables that make NCCL log its warnings to the run folder.

    Empty if there is no GPU, or if the user has configured NCCL's log in the environment or in one of NCCL's files.
    This adds nothing to the job's output: without NCCL_DEBUG, NCCL writes nothing, and torch's errors repeat its last
    warning anyway.
    """
    system = system or System(env=env)
    if not has_gpu_driver(system) or any(env.get(name) for name in NAMES):
        return {}
    files = read_conf_files(system, ReadingPlan(sections=frozenset()))
    if any(name in file.variables for file in files for name in NAMES):
        return {}
    target = folder / FOLDER
    make_folder(target)
    return {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{str(target).replace('%', '%%')}/%h.%p.log"}
