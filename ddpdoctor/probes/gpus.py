"""Chooses a backend and a device for each rank: which GPU it would use, who shares it, and whether NCCL allows that."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import rank_list
from ddpdoctor.probes.lifeline import ended_after

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpdoctor.model.bandwidth import Member

AUTO = "auto"
"""The backend if the user chose none."""
CUDA_LIMIT_S = 60.0
"""Our choice: without a persistence daemon, CUDA takes some seconds to start each GPU."""
CUDA_HANGS = (
    f"ddpdoctor: CUDA did not answer within {CUDA_LIMIT_S:g} s on {os.uname().nodename}: the NVIDIA driver or a GPU "
    "hangs.\n"
    "  See `sudo dmesg | grep -E 'NVRM|Xid'`; `ddpdoctor check-env` asks each GPU in a process of its own. Reboot if "
    "`nvidia-smi` hangs too.\n"
    "  Where it stood:"
)
HOST_ID = "NCCL_HOSTID"
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARES_SINCE = (2, 30, 3)
"""The first NCCL that reads the variable. 2.30.7 compares the UUIDs of GPUs, earlier versions their PCI addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGpu:
    """The GPU that a rank would use."""

    index: int
    """Its index among the GPUs that the process sees."""
    name: str
    uuid: str
    """Two ranks with the same UUID share the GPU. If torch knows no UUID, this is the host and the index."""
    nccl_host: str
    """The host on which NCCL believes this rank is. NCCL lets ranks of different hosts use one GPU."""
    may_share: bool = False
    """Whether NCCL lets several ranks of one host use a GPU: it is new enough, and the variable is set."""


def nccl_host(env: Mapping[str, str], host: str) -> str:
    """Return the name by which NCCL distinguishes hosts."""
    return env.get(HOST_ID, host)


def lets_share(env: Mapping[str, str], version: tuple[int, ...]) -> bool:
    """Return whether this NCCL version reads the variable, and the variable holds a number other than 0."""
    number = re.match(r"\s*[+-]?(0x[0-9a-fA-F]+|\d+)", env.get(SHARE, ""))
    return version >= SHARES_SINCE and number is not None and int(number[1], 16) != 0


def read_gpu(local_rank: int, env: Mapping[str, str]) -> RankGpu | None:
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


def _ask_for_gpu(local_rank: int, env: Mapping[str, str]) -> RankGpu | None:
    import torch

    count = torch.cuda.device_count()
    # Some launchers show each task only its own GPU, which then has index 0 on every rank.
    index = 0 if count == 1 else local_rank
    if index >= count:
        return None
    properties, host = torch.cuda.get_device_properties(index), os.uname().nodename
    return RankGpu(
        index=index,
        name=str(properties.name),
        uuid=str(getattr(properties, "uuid", f"{host}:{index}")),
        nccl_host=nccl_host(env, host),
        may_share=lets_share(env, torch.cuda.nccl.version()[:3]),
    )


def read_nccl_version() -> str | None:
    """Return "2.27.3", or None if NCCL cannot run here."""
    import torch

    with _asking_cuda() as possible:
        return ".".join(str(part) for part in torch.cuda.nccl.version()[:3]) if possible else None


def choose_backend(asked: str, gpus: Mapping[int, RankGpu | None]) -> str:
    """Return the user's choice, else NCCL if every rank has its own GPU, else Gloo. Raises ``UserError``."""
    if asked == AUTO:
        alone = all(count == 1 for count in count_sharers(gpus).values())
        return "nccl" if alone else "gloo"
    if asked == "nccl":
        check_nccl(gpus)
    return asked


def choose_devices(members: Sequence[Member], gpus: Mapping[int, RankGpu | None], backend: str) -> tuple[Member, ...]:
    """Return the members with the devices that they use."""
    sharers = count_sharers(gpus)
    return tuple(
        replace(one, device=f"cuda:{gpu.index}", device_name=gpu.name, gpu_ranks=sharers[one.rank])
        if backend == "nccl" and (gpu := gpus[one.rank]) is not None
        else one
        for one in members
    )


def count_sharers(gpus: Mapping[int, RankGpu | None]) -> dict[int, int]:
    """Return for each rank how many ranks use its GPU, 0 for a rank without a GPU."""
    users = Counter(gpu.uuid for gpu in gpus.values() if gpu is not None)
    return {rank: 0 if gpu is None else users[gpu.uuid] for rank, gpu in gpus.items()}


def check_nccl(gpus: Mapping[int, RankGpu | None]) -> None:
    """Raise ``UserError`` if NCCL cannot run on these GPUs, which are keyed by rank."""
    lacking = [rank for rank, gpu in gpus.items() if gpu is None]
    if lacking:
        raise UserError(
            "--backend nccl needs its own GPU for every rank; "
            f"{rank_list(lacking)} {'has' if len(lacking) == 1 else 'have'} none",
            help="Start as many ranks as there are GPUs (--nproc-per-node), or use --backend gloo.",
        )
    sharing = _refused(gpus)
    if sharing:
        raise UserError(
            f"--backend nccl needs its own GPU for every rank; {rank_list(sharing)} share one",
            help="Start as many ranks as there are GPUs (--nproc-per-node), or use --backend gloo. To run NCCL on a "
            f"shared GPU all the same, set another {HOST_ID} for each rank, or {SHARE}=1 on all ranks with NCCL "
            f"{'.'.join(map(str, SHARES_SINCE))} or newer.",
        )


def _refused(gpus: Mapping[int, RankGpu | None]) -> list[int]:
    """Return the ranks that NCCL does not let share. Each rank checks all pairs, so all ranks need the variable."""
    known = {rank: gpu for rank, gpu in gpus.items() if gpu is not None}
    if all(gpu.may_share for gpu in known.values()):
        return []
    users = Counter((gpu.uuid, gpu.nccl_host) for gpu in known.values())
    return [rank for rank, gpu in known.items() if users[gpu.uuid, gpu.nccl_host] > 1]
