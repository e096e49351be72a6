"""``ddpdoctor.check_consistency``: compares replicas from the user's code, over the user's process group."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import ConsistencyError, ConsistencyResult, TensorDifference, What
from ddpdoctor.model.words import group_alike
from ddpdoctor.probes.consistency.comparing import (
    TensorEntry,
    buffer_rows,
    digest_rows,
    gradient_rows,
    parameter_rows,
    read_settings,
    state_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed import ProcessGroup

SETTING = "optimizer setting"
_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose how a step is computed, not its result."""
_ORDER = (SETTING, *(what.value for what in (What.PARAMETER, What.BUFFER, What.GRADIENT, What.STATE)))
"""Settings come first: they explain the rest, and there are many tensors."""


def check_consistency(  # noqa: PLR0913 - what is compared is the caller's choice, each by a name of its own
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    group: ProcessGroup | None = None,
    allow: Sequence[str] = (),
    gradients: bool = True,
    buffers: bool | None = None,
    raise_on_difference: bool = True,
) -> ConsistencyResult:
    """Compare parameters, buffers, gradients, optimizer state and settings of all ranks, by name.

    This is a collective: all ranks of the group must call it at the same point of training. Without torch.distributed,
    or with one rank, it compares nothing and returns at once.

    Args:
        model: a module, in DistributedDataParallel or not.
        optimizer: one or several. Their state and settings are compared too.
        group: the ranks to compare. By default those of the model's DDP, else all.
        allow: patterns of names that may differ, such as ``"*.running_mean"``.
        gradients: compare gradients, for use after the reduction. Within ``no_sync()`` they are always left out.
        buffers: compare buffers. By default they are compared unless DDP broadcasts rank 0's at each forward: then each
            rank's own statistics in between, such as BatchNorm's, are not drift.
        raise_on_difference: raise ``ConsistencyError`` instead of returning a result that is not equal.

    Cost: every tensor is read once, at about half the speed of a copy, and 32 bytes per rank are gathered. If ranks
    differ, 16 bytes per tensor and the names are gathered too. No tensor leaves its device.

    Raises:
        ConsistencyError: on all ranks alike, with the names of tensors and ranks.
        ValueError: this rank is not in the group.
        TypeError: the model is not a module.
    """
    ddp, module = unwrap(model)
    if not hasattr(module, "named_parameters"):
        raise TypeError(f"check_consistency compares a torch.nn.Module, but got {type(module).__name__}")
    own = _Own(allow=tuple(allow))
    _add_tensors(own, ddp, module, gradients=gradients, buffers=buffers)
    optimizers = _listed(optimizer)
    for number, one in enumerate(optimizers, start=1):
        _add_optimizer(own, module, one, number if len(optimizers) > 1 else 0)
    chosen = group if group is not None else getattr(ddp, "process_group", None)
    result = _compare(own, chosen, next(module.parameters(), None))
    if not result.equal and raise_on_difference:
        raise ConsistencyError(result)
    return result


def unwrap(model: Any) -> tuple[Any, Any]:
    """Return the DDP object of a model (or None) and the user's module inside."""
    from torch.nn.parallel import DistributedDataParallel

    ddp = None
    while True:
        if isinstance(model, DistributedDataParallel):
            ddp, model = model, model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile's
            model = model._orig_mod  # noqa: SLF001 - there is no public way back
        else:
            return ddp, model


@dataclass(slots=True, kw_only=True)
class _Own:
    """What this rank compares: a text for each tensor or setting, keyed by kind, name and part."""

    allow: tuple[str, ...]
    values: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    """The text that is compared, and the text that is shown."""
    left_out: list[str] = field(default_factory=list)

    def add(self, rows: Iterable[TensorEntry]) -> None:
        """Add tensors, except those that may differ and those that one rank cannot read alone."""
        listed = [row for row in rows if not any(fnmatchcase(row.name, pattern) for pattern in self.allow)]
        seen = digest_rows(listed)
        for one in seen:
            shown = f"{one.dtype}{list(one.shape)}" if one.digest else "none"
            self.values[one.what.value, one.name, one.part] = (f"{one.digest} {shown}", shown)
        if missing := len(listed) - len(seen):
            noun = "tensor" if missing == 1 else "tensors"
            self.left_out.append(f"{missing} {noun} of which a rank has a shard or no data, or sparse and not added up")


def _add_tensors(own: _Own, ddp: Any, module: Any, *, gradients: bool, buffers: bool | None) -> None:
    ignored = set(getattr(ddp, "parameters_to_ignore", None) or ())
    if ignored:
        own.left_out.append(f"{len(ignored)} names that DDP was set to ignore")
    own.add(row for row in parameter_rows(module) if row.name not in ignored)
    if buffers is None and getattr(ddp, "broadcast_buffers", False):
        count = sum(1 for _ in module.buffers())
        if count:
            own.left_out.append(f"{count} buffers, of which DDP sends rank 0's at each forward")
    elif buffers is not False:
        own.add(row for row in buffer_rows(module) if row.name not in ignored)
    if gradients and not getattr(ddp, "require_backward_grad_sync", True):
        own.left_out.append("gradients, which are each rank's own under no_sync()")
    elif gradients:
        own.add(row for row in gradient_rows(module) if row.name not in ignored)


def _add_optimizer(own: _Own, module: Any, optimizer: Any, number: int) -> None:
    """Add an optimizer. ``number`` counts from 1 if there are several, and is 0 for a single one."""
    mark = f" of optimizer {number}" if number else ""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        own.left_out.append(f"the state{mark}, of which ZeroRedundancyOptimizer gives each rank a part")
    else:
        own.add(TensorEntry(row.what, row.name, row.tensor, row.part + mark) for row in state_rows(module, optimizer))
    for name, value in read_settings(optimizer):
        group, dot, setting = name.rpartition(".")
        shown = f"group {group}: {setting}" if dot else name
        if setting not in _KERNELS and not any(fnmatchcase(shown, pattern) for pattern in own.allow):
            own.values[SETTING, shown, mark.strip()] = (value, value)


def _compare(own: _Own, group: Any, parameter: Any) -> ConsistencyResult:
    ranks = members(group)
    differences: tuple[TensorDifference, ...] = ()
    if len(ranks) > 1:
        table = [[*key, *value] for key, value in own.values.items()]
        # Sorted, because tensors are compared by name: their order on a rank does not matter.
        roots = gather_fixed(hashlib.sha256(json.dumps(sorted(table)).encode()).digest(), group, parameter)
        if len(set(roots)) > 1:
            packed = gather_bytes(zlib.compress(json.dumps(table).encode()), group, parameter)
            tables = [json.loads(zlib.decompress(one)) for one in packed]
            differences = find_differences(dict(zip(ranks, tables, strict=True)))
    return ConsistencyResult(
        equal=not differences,
        differences=differences,
        ranks=ranks,
        compared=len(own.values),
        left_out=tuple(own.left_out),
    )


def find_differences(tables: dict[int, list[list[str]]]) -> tuple[TensorDifference, ...]:
    """Return what differs between ranks. A table's row is: kind, name, part, text to compare, text to show."""
    by_rank = {rank: {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows} for rank, rows in tables.items()}
    keys = dict.fromkeys(key for rows in by_rank.values() for key in rows)
    found = []
    for key in keys:
        sides = group_alike({rank: rows.get(key, ("", "none")) for rank, rows in by_rank.items()})
        if len(sides) > 1:
            found.append(
                TensorDifference(
                    what=key[0],
                    name=key[1],
                    part=key[2],
                    sides=tuple(ranks for _, ranks in sides),
                    values=tuple(value[1] for value, _ in sides),
                )
            )
    return tuple(sorted(found, key=lambda one: _ORDER.index(one.what)))


def _listed(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)


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
