"""What a rank records after each step, and which tensor of the ranks' records differs first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import Difference, Stream, StreamClock, TensorRow, TensorSplit, Values, What
from ddpdoctor.model.trial import Rerun
from ddpdoctor.model.words import group_alike, grouped
from ddpdoctor.probes.user_code import leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.consistency import Values

MAX_SPLITS = 8
"""Our choice: how many differing tensors are named for one step."""
GROUP = "0"
"""torch's name for the group of all ranks."""
DIGEST_DIGITS = 32
"""Hexadecimal digits of a fingerprint, which has 16 bytes."""


def compare_steps(steps: Sequence[Sequence[StepRecord]]) -> tuple[Stream, ...]:
    """Return the streams of a run: one of its steps, and one of its buffer syncs. ``steps`` is by step, then rank."""
    after = [(records[0].step, {one.values.rank: one.tensors for one in records}) for records in steps]
    synced = [
        (records[0].step, {one.values.rank: one.synced or () for one in records})
        for records in steps
        if all(one.synced is not None for one in records)
    ]
    values = tuple((records[0].step, tuple(one.values for one in records)) for records in steps)
    found = [_stream(StreamClock.STEP, 1, after, values)]
    if synced:
        found.append(_stream(StreamClock.SYNC, 0, synced, values))
    return tuple(found)


def split(tensors: Mapping[int, Sequence[TensorDigest]], whats: Iterable[What]) -> list[tuple[TensorSplit, ...]]:
    """Return for each kind the tensors that differ between ranks, in the order in which the first ranks list them."""
    keyed = {rank: {(one.what, one.name, one.part): one for one in seen} for rank, seen in tensors.items()}
    order = dict.fromkeys(key for seen in keyed.values() for key in seen)
    splits = ((key[0], _split({rank: seen.get(key) for rank, seen in keyed.items()})) for key in order)
    found = grouped((what, one) for what, one in splits if one is not None)
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
                    what=what,
                    number=number,
                    last_equal=last_equal.get(what),
                    splits=splits[:MAX_SPLITS],
                    differing=len(splits),
                    of=max(len(splits), sum(one.what is what for one in first)),
                )
            elif not splits and any(one.what is what for one in first):
                last_equal[what] = number
    return Stream(
        clock=clock,
        group=GROUP,
        model=1,
        optimizer=optimizer,
        ranks=ranks,
        compared=len(records),
        last_number=records[-1][0] if records else None,
        kinds=tuple(what for what in What if any(one.what is what for seen in _all_seen(records) for one in seen)),
        differences=tuple(found.values()),
        values=values,
        unchanged=_unchanged([seen for _, seen in records]),
        same_random=sum(len({each.random for each in one}) == 1 < len(one) for _, one in values),
    )


def _all_seen(records: Sequence[tuple[int, Mapping[int, Sequence[TensorDigest]]]]) -> Iterable[Sequence[TensorDigest]]:
    return (seen for _, tensors in records for seen in tensors.values())


def _split(seen: Mapping[int, TensorDigest | None]) -> TensorSplit | None:
    """Return how one tensor differs between ranks, or None if it does not."""
    sides = group_alike(
        {rank: ("", (), "") if one is None else (one.digest, one.shape, one.dtype) for rank, one in seen.items()}
    )
    if len(sides) == 1:
        return None
    row = next(one for one in seen.values() if one is not None and one.digest)
    return TensorSplit(
        row=TensorRow(what=row.what, name=row.name, part=row.part, shape=row.shape, dtype=row.dtype),
        sides=tuple(ranks for _, ranks in sides),
        absent_on=tuple(rank for rank, one in sorted(seen.items()) if one is None or not one.digest),
    )


def _unchanged(records: Sequence[Mapping[int, Sequence[TensorDigest]]]) -> int:
    """Return how many of the last steps in a row left every parameter unchanged."""
    count = 0
    kept = [
        {rank: tuple(one for one in seen if one.what is What.PARAMETER) for rank, seen in tensors.items()}
        for tensors in records
    ]
    for former, latter in zip(reversed(kept[:-1]), reversed(kept[1:]), strict=True):
        if former != latter or not any(latter.values()):
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One rank's record of one run."""

    built: tuple[TensorDigest, ...]
    """Parameters and buffers before the first step."""
    records: tuple[StepRecord, ...]


def compare_runs(first: RunRecord, second: RunRecord, rank: int) -> Rerun:
    """Return where two runs of one rank first differ: in the built model, in a batch, or in a step."""
    steps = len(second.records)
    pairs = [(0, first.built, second.built)]
    for former, latter in zip(first.records, second.records, strict=False):
        if former.batch != latter.batch:
            return Rerun(steps=steps, step=former.step, name="the batch", ranks=(rank,))
        pairs.append((former.step, former.tensors, latter.tensors))
    for step, one, other in pairs:
        known = {(seen.what, seen.name, seen.part): seen for seen in one}
        differing = [seen for seen in other if known.get((seen.what, seen.name, seen.part)) != seen]
        if differing:
            what = differing[0]
            return Rerun(
                steps=steps,
                step=step,
                what=what.what,
                name=what.name,
                part=what.part,
                ranks=(rank,),
                differing=len(differing),
                of=len(other),
            )
    return Rerun(steps=steps)


def merge_reruns(reruns: Sequence[Rerun]) -> Rerun:
    """Return the earliest difference of all ranks, with all ranks that differ at that step."""
    different = [one for one in reruns if one.step is not None]
    if not different:
        return reruns[0]
    first = min(different, key=lambda one: one.step or 0)
    return replace(first, ranks=tuple(n for one in different if one.step == first.step for n in one.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest(TensorRow):
    """A tensor and its fingerprint."""

    digest: str = ""
    """The fingerprint in hexadecimal, or "" if there is no tensor (a gradient of None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank: gradients right before the optimizer's step, everything else right after it."""

    step: int
    tensors: tuple[TensorDigest, ...]
    synced: tuple[TensorDigest, ...] | None
    """Buffers right after DDP broadcast rank 0's, or None if it did not in this step."""
    values: Values
    loss: float | None
    batch: str = ""
    """A digest of the batch's tensors."""


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
    return tuple(_digest_of(row, digest) for row, digest in zip(listed, cut, strict=True) if digest != unread)


def gradient_rows(module: Any) -> Iterator[TensorEntry]:
    """Yield the gradients of the trainable parameters."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield TensorEntry(What.GRADIENT, name, parameter.grad)


def parameter_rows(module: Any) -> Iterator[TensorEntry]:
    """Yield the parameters."""
    return (TensorEntry(What.PARAMETER, name, parameter) for name, parameter in module.named_parameters())


def buffer_rows(module: Any) -> Iterator[TensorEntry]:
    """Yield the buffers."""
    return (TensorEntry(What.BUFFER, name, buffer) for name, buffer in module.named_buffers())


def state_rows(module: Any, optimizer: Any) -> Iterator[TensorEntry]:
    """Yield the tensors and numbers of an optimizer's state, under the names of their parameters."""
    import torch

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for place, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
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
    """Return a digest of a batch's tensors and their places in it."""
    import torch

    rows = [TensorEntry(What.BUFFER, place, leaf) for place, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    return hashlib.sha256(repr(digest_rows(rows)).encode()).hexdigest()[:32]


def random_digest(device: Any) -> str:
    """Return a digest of torch's random state on this rank."""
    import torch

    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return hashlib.sha256(b"".join(bytes(state.tolist()) for state in states)).hexdigest()[:16]


def _digest_of(row: TensorEntry, digest: str) -> TensorDigest:
    if row.tensor is None:
        return TensorDigest(what=row.what, name=row.name, part=row.part)
    return TensorDigest(
        what=row.what,
        name=row.name,
        part=row.part,
        shape=tuple(row.tensor.shape),
        dtype=str(row.tensor.dtype).removeprefix("torch."),
        digest=digest,
    )
