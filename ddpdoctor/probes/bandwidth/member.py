"""Reads what this rank runs on: its processor and GPU, and the versions of its software. Imports torch."""

from __future__ import annotations

import os
import platform
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.model.bandwidth import Member
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.variables import find_variable, select_variables
from ddpdoctor.probes.bandwidth.gpu_sharing import Gpu, lets_share, nccl_host
from ddpdoctor.probes.bandwidth.lifeline import ended_after
from ddpdoctor.probes.bandwidth.nccl_watchdog import hold_watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpdoctor.model.launch import Launch

BEARING = frozenset({"nccl", "torch", "gloo", "cuda", "openmp"})
"""Components whose environment variables affect a measurement."""
CUDA_LIMIT_S = 60.0
"""Our choice: without a persistence daemon, CUDA takes some seconds to start each GPU."""
CUDA_HANGS = (
    f"ddpdoctor: CUDA did not answer within {CUDA_LIMIT_S:g} s on {os.uname().nodename}: the NVIDIA driver or a GPU "
    "hangs.\n"
    "  See `sudo dmesg | grep -E 'NVRM|Xid'`; `ddpdoctor check-env` asks each GPU in a process of its own. Reboot if "
    "`nvidia-smi` hangs too.\n"
    "  Where it stood:"
)
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def load_torch() -> None:
    """Import torch on a rank of the bench. Raises ``UserError`` if that fails."""
    hold_watchdog(os.environ)
    # torch reads this on import. Its C++ would only log peers that leave and names that do not resolve.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        import torch  # noqa: F401 - loaded for what follows
    except (ImportError, OSError) as error:
        raise UserError(
            f"torch cannot be imported: {error}", help="`ddpdoctor check-env` says what is wrong with it."
        ) from error


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
        nccl=_nccl_version(torch),
        driver=_driver(),
        variables=_variables(env),
    )


def read_gpu(local_rank: int, env: Mapping[str, str]) -> Gpu | None:
    """Return the GPU that this rank would use with NCCL, or None if it has none."""
    with _asking_cuda() as possible:
        return _ask_for_gpu(local_rank, env) if possible else None


@contextmanager
def _asking_cuda() -> Iterator[bool]:
    """Yield whether NCCL could run here. If torch has NCCL, this asks the driver, which may hang."""
    import torch

    if not torch.distributed.is_nccl_available():
        yield False
        return
    with ended_after(CUDA_LIMIT_S, CUDA_HANGS):
        yield torch.cuda.is_available()


def _ask_for_gpu(local_rank: int, env: Mapping[str, str]) -> Gpu | None:
    import torch

    count = torch.cuda.device_count()
    # Some launchers show each task only its own GPU, which then has index 0 on every rank.
    index = 0 if count == 1 else local_rank
    if index >= count:
        return None
    properties, host = torch.cuda.get_device_properties(index), os.uname().nodename
    return Gpu(
        index=index,
        name=str(properties.name),
        uuid=str(getattr(properties, "uuid", f"{host}:{index}")),
        nccl_host=nccl_host(env, host),
        may_share=lets_share(env, torch.cuda.nccl.version()[:3]),
    )


def _nccl_version(torch: Any) -> str | None:
    with _asking_cuda() as possible:
        return ".".join(str(part) for part in torch.cuda.nccl.version()[:3]) if possible else None


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    listed, _ = select_variables(env)
    return {name: value for name, value in listed.items() if getattr(find_variable(name), "component", "") in BEARING}


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _driver() -> str | None:
    try:
        return DRIVER_VERSION.read_text().strip() or None
    except OSError:
        return None
