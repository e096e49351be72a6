"""What a rank records after each step, and which tensor of the ranks' records differs first.

``check_consistency`` compares replicas from the user's code, over the user's process group.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import (
    ConsistencyError,
    ConsistencyResult,
    Difference,
    Stream,
    StreamClock,
    TensorDifference,
    TensorRow,
    TensorSplit,
    Values,
    What,
)
from ddpdoctor.model.trial import Rerun
from ddpdoctor.model.words import group_alike
from ddpdoctor.probes.loading import leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup


MAX_SPLITS = 8  # our choice: how many differing tensors are named for one step
GROUP = "0"  # torch's name for the group of all ranks
DIGEST_DIGITS = 32  # hexadecimal digits of a fingerprint, which has 16 bytes
SETTING = "optimizer setting"
# Settings that choose how a step is computed, not its result.
_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Settings come first: they explain the rest, and there are many tensors.
_ORDER = (SETTING, *(what.value for what in (What.PARAMETER, What.BUFFER, What.GRADIENT, What.STATE)))


def compare_steps(steps: Sequence[Sequence[StepRecord]]) -> tuple[Stream, ...]:
    """Return the streams of a run: of its steps, and of its buffer syncs. ``steps`` is by step, then rank."""
    after = [(records[0].step, {record.values.rank: record.tensors for record in records}) for records in steps]
    synced = [
        (records[0].step, {record.values.rank: record.synced or () for record in records})
        for records in steps
        if all(record.synced is not None for record in records)
    ]
    values = tuple((records[0].step, tuple(record.values for record in records)) for records in steps)
    found = _stream(StreamClock.STEP, 1, after, values)
    return (found, _stream(StreamClock.SYNC, 0, synced, values)) if synced else (found,)


def split(tensors: Mapping[int, Sequence[TensorDigest]], whats: Iterable[What]) -> list[tuple[TensorSplit, ...]]:
    """Return for each kind the tensors that differ between ranks, in the order of the first ranks."""
    keyed = {rank: {(row.what, row.name, row.part): row for row in rows} for rank, rows in tensors.items()}
    order = dict.fromkeys(key for seen in keyed.values() for key in seen)
    found: dict[What, list[TensorSplit]] = {}
    for key in order:
        held = {rank: seen.get(key) for rank, seen in keyed.items()}
        values = {rank: (row.digest, row.shape, row.dtype) if row else ("", (), "") for rank, row in held.items()}
        if len(sides := group_alike(values)) > 1:
            row = next(row for row in held.values() if row is not None and row.digest)
            different = TensorSplit(
                row=TensorRow(what=row.what, name=row.name, part=row.part, shape=row.shape, dtype=row.dtype),
                sides=tuple(ranks for _, ranks in sides),
                absent_on=tuple(rank for rank, digest in sorted(held.items()) if digest is None or not digest.digest),
            )
            found.setdefault(row.what, []).append(different)
    return [tuple(found.get(what, ())) for what in whats]


def _stream(
    clock: StreamClock,
    optimizer: int,
    records: Sequence[tuple[int, Mapping[int, Sequence[TensorDigest]]]],
    values: tuple[tuple[int, tuple[Values, ...]], ...],
) -> Stream:
    ranks = tuple(sorted(records[0][1])) if records else ()
    found: dict[What, Difference] = {}
    last_equal: dict[What, int] = {}
    for number, tensors in records:
        first = next(iter(tensors.values()))
        for what, splits in zip(What, split(tensors, What), strict=True):
            if splits and what not in found:
                found[what] = Difference(
                    what=what, number=number, last_equal=last_equal.get(what), splits=splits[:MAX_SPLITS],
                    differing=len(splits), of=max(len(splits), sum(digest.what is what for digest in first)),
                )  # fmt: skip
            elif not splits and any(digest.what is what for digest in first):
                last_equal[what] = number
    parameters = [
        {rank: tuple(digest for digest in seen if digest.what is What.PARAMETER) for rank, seen in tensors.items()}
        for _, tensors in reversed(records)
    ]
    equal = (former == latter and any(latter.values()) for latter, former in pairwise(parameters))
    seen_kinds = {digest.what for _, tensors in records for seen in tensors.values() for digest in seen}
    return Stream(
        clock=clock, group=GROUP, model=1, optimizer=optimizer, ranks=ranks, compared=len(records),
        last_number=records[-1][0] if records else None, kinds=tuple(what for what in What if what in seen_kinds),
        differences=tuple(found.values()), values=values, unchanged=sum(takewhile(bool, equal)),
        same_random=sum(len({each.random for each in seen}) == 1 < len(seen) for _, seen in values),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One rank's record of one run."""

    built: tuple[TensorDigest, ...]  # parameters and buffers before the first step
    records: tuple[StepRecord, ...]


def compare_runs(first: RunRecord, second: RunRecord, rank: int) -> Rerun:
    """Return where two runs of one rank first differ: in the model as built, in a batch, or in a step."""
    steps = len(second.records)
    pairs = [(0, first.built, second.built)]
    for former, latter in zip(first.records, second.records, strict=False):
        if former.batch != latter.batch:
            return Rerun(steps=steps, step=former.step, name="the batch", ranks=(rank,))
        pairs.append((former.step, former.tensors, latter.tensors))
    for step, digests, other in pairs:
        known = {(seen.what, seen.name, seen.part): seen for seen in digests}
        differing = [seen for seen in other if known.get((seen.what, seen.name, seen.part)) != seen]
        if differing:
            what = differing[0]
            return Rerun(
                steps=steps, step=step, what=what.what, name=what.name, part=what.part, ranks=(rank,),
                differing=len(differing), of=len(other),
            )  # fmt: skip
    return Rerun(steps=steps)


def merge_reruns(reruns: Sequence[Rerun]) -> Rerun:
    different = [rerun for rerun in reruns if rerun.step is not None]
    if not different:
        return reruns[0]
    first = min(different, key=lambda rerun: rerun.step or 0)
    return replace(first, ranks=tuple(n for rerun in different if rerun.step == first.step for n in rerun.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest(TensorRow):
    """A tensor and its fingerprint."""

    digest: str = ""  # the fingerprint in hexadecimal, or "" if there is no tensor (a gradient of None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank: gradients right before the optimizer's step, everything else right after it."""

    step: int
    tensors: tuple[TensorDigest, ...]
    # Buffers right after DDP broadcast rank 0's, or None if it did not in this step.
    synced: tuple[TensorDigest, ...] | None
    values: Values
    loss: float | None
    batch: str = ""  # a digest of the batch's tensors


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to fingerprint; ``tensor`` is None if there is none."""

    what: What
    name: str
    tensor: Any
    part: str = ""


def digest_rows(rows: Iterable[TensorEntry]) -> tuple[TensorDigest, ...]:
    """Return the fingerprints of rows. Tensors without values yet, or of which a rank has a shard, are left out."""
    import torch

    from ddpdoctor.recorder.fingerprint import fingerprints

    listed = list(rows)
    unread = fingerprints([torch.empty(1, device="meta")]).hex()
    text = fingerprints([row.tensor for row in listed]).hex()
    cut = [text[at : at + DIGEST_DIGITS] for at in range(0, len(text), DIGEST_DIGITS)]
    found = []
    for row, digest in zip(listed, cut, strict=True):
        if digest == unread:
            continue
        seen: dict[str, Any] = {}
        if row.tensor is not None:
            dtype = str(row.tensor.dtype).removeprefix("torch.")
            seen = {"shape": tuple(row.tensor.shape), "dtype": dtype, "digest": digest}
        found.append(TensorDigest(what=row.what, name=row.name, part=row.part, **seen))
    return tuple(found)


def model_rows(module: Any, *whats: What) -> Iterator[TensorEntry]:
    """Yield a module's parameters, its buffers, or the gradients of its trainable parameters."""
    for what in whats:
        for name, tensor in module.named_buffers() if what is What.BUFFER else module.named_parameters():
            if what is not What.GRADIENT:
                yield TensorEntry(what, name, tensor)
            elif tensor.requires_grad:
                yield TensorEntry(what, name, tensor.grad)


def state_rows(module: Any, optimizer: Any) -> Iterator[TensorEntry]:
    """Yield the tensors and numbers of an optimizer's state, under the names of their parameters."""
    import torch

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for place, parameter in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        name = names.get(id(parameter), f"parameter {place} of the optimizer")
        for part, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, torch.Tensor):
                yield TensorEntry(What.STATE, name, value, str(part))
            elif isinstance(value, (int, float)):
                yield TensorEntry(What.STATE, name, torch.tensor(float(value), dtype=torch.float64), str(part))


def read_settings(optimizer: Any) -> tuple[tuple[str, str], ...]:
    """Return the settings of an optimizer's groups: ("lr", "0.1"), ("1.lr", "0.01")."""
    return tuple(
        (f"{number}.{name}" if number else str(name), f"{value:g}" if isinstance(value, float) else str(value))
        for number, group in enumerate(optimizer.param_groups)
        for name, value in sorted(group.items())
        if name != "params" and isinstance(value, (bool, int, float, str, tuple))
    )


def batch_digest(batch: Any) -> str:
    import torch

    rows = [TensorEntry(What.BUFFER, place, leaf) for place, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    return hashlib.sha256(repr(digest_rows(rows)).encode()).hexdigest()[:32]


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
    or with one rank, it compares nothing and returns immediately.

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
    several = isinstance(optimizer, (list, tuple))
    optimizers = () if optimizer is None else tuple(optimizer) if several else (optimizer,)
    for number, optim in enumerate(optimizers, start=1):
        _add_optimizer(own, module, optim, number if len(optimizers) > 1 else 0)
    chosen = group if group is not None else getattr(ddp, "process_group", None)
    result = _compare_ranks(own, chosen, next(module.parameters(), None))
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
    """What this rank compares: by kind, name and part a text to compare and one to show."""

    allow: tuple[str, ...]
    values: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, rows: Iterable[TensorEntry]) -> None:
        listed = [row for row in rows if not any(fnmatchcase(row.name, pattern) for pattern in self.allow)]
        seen = digest_rows(listed)
        for digest in seen:
            shown = f"{digest.dtype}{list(digest.shape)}" if digest.digest else "none"
            self.values[digest.what.value, digest.name, digest.part] = (f"{digest.digest} {shown}", shown)
        if missing := len(listed) - len(seen):
            noun = "tensor" if missing == 1 else "tensors"
            self.left_out.append(f"{missing} {noun} with only a shard or no data on a rank, or sparse and uncoalesced")


def _add_tensors(own: _Own, ddp: Any, module: Any, *, gradients: bool, buffers: bool | None) -> None:
    ignored = set(getattr(ddp, "parameters_to_ignore", None) or ())
    if ignored:
        own.left_out.append(f"{len(ignored)} names that DDP was set to ignore")

    def add(what: What) -> None:
        own.add(row for row in model_rows(module, what) if row.name not in ignored)

    add(What.PARAMETER)
    if buffers is None and getattr(ddp, "broadcast_buffers", False):
        count = sum(1 for _ in module.buffers())
        if count:
            own.left_out.append(f"{count} buffers that DDP broadcasts from rank 0 at each forward")
    elif buffers is not False:
        add(What.BUFFER)
    if gradients and not getattr(ddp, "require_backward_grad_sync", True):
        own.left_out.append("gradients, which are each rank's own under no_sync()")
    elif gradients:
        add(What.GRADIENT)


def _add_optimizer(own: _Own, module: Any, optimizer: Any, number: int) -> None:
    mark = f" of optimizer {number}" if number else ""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        own.left_out.append(f"the state{mark}, which ZeroRedundancyOptimizer shards across ranks")
    else:
        own.add(TensorEntry(row.what, row.name, row.tensor, row.part + mark) for row in state_rows(module, optimizer))
    for name, value in read_settings(optimizer):
        group, dot, setting = name.rpartition(".")
        shown = f"group {group}: {setting}" if dot else name
        if setting not in _KERNELS and not any(fnmatchcase(shown, pattern) for pattern in own.allow):
            own.values[SETTING, shown, mark.strip()] = (value, value)


def _compare_ranks(own: _Own, group: Any, parameter: Any) -> ConsistencyResult:
    ranks = members(group)
    differences: tuple[TensorDifference, ...] = ()
    if len(ranks) > 1:
        table = [[*key, *value] for key, value in own.values.items()]
        # Sorted, because tensors are compared by name: their order on a rank does not matter.
        roots = gather_fixed(hashlib.sha256(json.dumps(sorted(table)).encode()).digest(), group, parameter)
        if len(set(roots)) > 1:
            own_bytes = zlib.compress(json.dumps(table).encode())
            lengths = gather_fixed(len(own_bytes).to_bytes(8, "little"), group, parameter)
            sizes = [int.from_bytes(length, "little") for length in lengths]
            padded = gather_fixed(own_bytes.ljust(max(sizes), b"\0"), group, parameter)
            tables = [json.loads(zlib.decompress(packed[:size])) for packed, size in zip(padded, sizes, strict=True)]
            differences = find_differences(dict(zip(ranks, tables, strict=True)))
    return ConsistencyResult(
        equal=not differences, differences=differences, ranks=ranks, compared=len(own.values),
        left_out=tuple(own.left_out),
    )  # fmt: skip


def find_differences(tables: dict[int, list[list[str]]]) -> tuple[TensorDifference, ...]:
    """Return what differs between ranks. A table's row is: kind, name, part, text to compare, text to show."""
    by_rank = {rank: {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows} for rank, rows in tables.items()}
    found = []
    for what, name, part in dict.fromkeys(key for rows in by_rank.values() for key in rows):
        sides = group_alike({rank: rows.get((what, name, part), ("", "none")) for rank, rows in by_rank.items()})
        if len(sides) > 1:
            ranks, values = tuple(ranks for _, ranks in sides), tuple(value[1] for value, _ in sides)
            found.append(TensorDifference(what=what, name=name, part=part, sides=ranks, values=values))
    return tuple(sorted(found, key=lambda difference: _ORDER.index(difference.what)))


def members(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group (None: all), or (0,) without torch.distributed. Raises ``ValueError``."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return (0,)
    if group is None:
        return tuple(range(distributed.get_world_size()))
    if distributed.get_rank(group) < 0:
        raise ValueError(f"rank {distributed.get_rank()} is not in the group whose replicas are to be compared")
    return tuple(distributed.get_process_group_ranks(group))


def gather_fixed(data: bytes, group: Any, parameter: Any) -> list[bytes]:
    """Return the ranks' bytes, as many of each, in group order. ``parameter`` has the device for unknown backends."""
    import torch
    from torch import distributed

    backend = str(distributed.get_backend(group)).lower()
    if "gloo" in backend or "mpi" in backend or parameter is None:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else parameter.device
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in members(group)]
    distributed.all_gather(gathered, own, group=group)
    return [bytes(tensor.cpu().tolist()) for tensor in gathered]
