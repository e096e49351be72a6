"""Finds ranks that share a GPU, and whether NCCL allows it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST_ID = "NCCL_HOSTID"
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARES_SINCE = (2, 30, 3)
"""The first NCCL that reads the variable. 2.30.7 compares the UUIDs of GPUs, earlier versions their PCI addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
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
    """Return the name by which NCCL tells hosts apart."""
    return env.get(HOST_ID, host)


def lets_share(env: Mapping[str, str], version: tuple[int, ...]) -> bool:
    """Return whether this NCCL version reads the variable, and the variable holds a number other than 0."""
    number = re.match(r"\s*[+-]?(0x[0-9a-fA-F]+|\d+)", env.get(SHARE, ""))
    return version >= SHARES_SINCE and number is not None and int(number[1], 16) != 0


def count_sharers(gpus: Mapping[int, Gpu | None]) -> dict[int, int]:
    """Return for each rank how many ranks use its GPU, 0 for a rank without a GPU."""
    users = Counter(gpu.uuid for gpu in gpus.values() if gpu is not None)
    return {rank: 0 if gpu is None else users[gpu.uuid] for rank, gpu in gpus.items()}


def check_backend(gpus: Mapping[int, Gpu | None]) -> None:
    """Raise ``UserError`` if NCCL cannot run on these GPUs, which are keyed by rank."""
    lacking = [rank for rank, gpu in gpus.items() if gpu is None]
    if lacking:
        raise UserError(
            "--backend nccl needs a GPU of its own for every rank; "
            f"{rank_list(lacking)} {'has' if len(lacking) == 1 else 'have'} none",
            help="Start as many ranks as there are GPUs (--nproc-per-node), or use --backend gloo.",
        )
    sharing = _refused(gpus)
    if sharing:
        raise UserError(
            f"--backend nccl needs a GPU of its own for every rank; {rank_list(sharing)} share one",
            help="Start as many ranks as there are GPUs (--nproc-per-node), or use --backend gloo. To run NCCL on a "
            f"shared GPU all the same, set another {HOST_ID} for each rank, or {SHARE}=1 on all ranks with NCCL "
            f"{'.'.join(map(str, SHARES_SINCE))} or newer.",
        )


def _refused(gpus: Mapping[int, Gpu | None]) -> list[int]:
    """Return the ranks that NCCL does not let share. Each rank checks all pairs, so all ranks need the variable."""
    known = {rank: gpu for rank, gpu in gpus.items() if gpu is not None}
    if all(gpu.may_share for gpu in known.values()):
        return []
    users = Counter((gpu.uuid, gpu.nccl_host) for gpu in known.values())
    return [rank for rank, gpu in known.items() if users[gpu.uuid, gpu.nccl_host] > 1]
