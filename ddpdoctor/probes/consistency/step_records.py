"""What one rank records after each step: a fingerprint of every tensor, and settings that explain differences."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import TensorRow, Values, What
from ddpdoctor.probes.user_code import leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIGEST_DIGITS = 32
"""Hexadecimal digits of a fingerprint, which has 16 bytes."""


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

    from ddpdoctor.recorder.replicas.fingerprint import fingerprints

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
