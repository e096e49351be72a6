"""Gathers bytes from all ranks of a process group onto each, through the device that the group's backend needs."""

from __future__ import annotations

from typing import Any


def members(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group (None: all ranks), or (0,) without torch.distributed.

    Raises ``ValueError`` if this rank is not in the group.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return (0,)
    if group is None:
        return tuple(range(distributed.get_world_size()))
    if distributed.get_rank(group) < 0:
        raise ValueError(f"rank {distributed.get_rank()} is not in the group whose replicas are to be compared")
    return tuple(distributed.get_process_group_ranks(group))


def gather_fixed(data: bytes, group: Any, parameter: Any) -> list[bytes]:
    """Return the ranks' bytes in group order. All ranks must give the same number of bytes, at least one.

    ``parameter`` is a tensor on the device that training uses. It decides the device for unknown backends.
    """
    import torch
    from torch import distributed

    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device(group, parameter))
    gathered = [torch.empty_like(own) for _ in members(group)]
    distributed.all_gather(gathered, own, group=group)
    return [bytes(one.cpu().tolist()) for one in gathered]


def gather_bytes(data: bytes, group: Any, parameter: Any) -> list[bytes]:
    """Return the ranks' bytes, which may have different lengths."""
    lengths = [int.from_bytes(one, "little") for one in gather_fixed(len(data).to_bytes(8, "little"), group, parameter)]
    padded = data.ljust(max(lengths), b"\0")
    return [one[:length] for one, length in zip(gather_fixed(padded, group, parameter), lengths, strict=True)]


def _device(group: Any, parameter: Any) -> Any:
    import torch
    from torch import distributed

    backend = str(distributed.get_backend(group)).lower()
    if "gloo" in backend or "mpi" in backend or parameter is None:
        return torch.device("cpu")
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device
