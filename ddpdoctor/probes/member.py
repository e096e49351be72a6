"""Reads what this rank runs on: its processor and GPU, and the versions of its software. Imports torch."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ddpdoctor
from ddpdoctor.collect.system import read_text
from ddpdoctor.model.bandwidth import Member
from ddpdoctor.model.launch import find_variable, select_variables
from ddpdoctor.probes.gpus import read_nccl_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.launch import Launch

BEARING = frozenset({"nccl", "torch", "gloo", "cuda", "openmp"})
"""Components whose environment variables affect a measurement."""
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def name_member(launch: Launch) -> Member:
    """Return who this rank is, without importing torch."""
    return Member(
        rank=launch.rank,
        local_rank=launch.local_rank or 0,
        host=os.uname().nodename,
        pid=os.getpid(),
        device="cpu",
        device_name=_processor(),
        cores=len(os.sched_getaffinity(0)),
        version=ddpdoctor.__version__,
        torch="",
    )


def read_member(launch: Launch, env: Mapping[str, str]) -> Member:
    """Return this rank with its versions, and the processor as its device."""
    import torch

    return replace(
        name_member(launch),
        torch=str(torch.__version__),
        nccl=read_nccl_version(),
        driver=read_text(DRIVER_VERSION).strip() or None,
        variables=_variables(env),
    )


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    listed, _ = select_variables(env)
    return {name: value for name, value in listed.items() if getattr(find_variable(name), "component", "") in BEARING}


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.machine()
