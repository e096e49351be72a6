"""Makes batches, the user's or random ones for the first layer, and joins the ranks' batches into a global one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.consistency.seeds import BATCH, set_seed
from ddpdoctor.probes.user_code import leaves, load_callable, users_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.trial import TrialSettings

SAMPLES, TOKENS, PIXELS = 8, 16, 32
"""Our choice: the shape of a made-up batch."""


class CannotJoin(Exception):  # noqa: N818 - says what it is
    """The ranks' batches cannot be joined into a global batch. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Where batches come from. ``make(rank, world_size, step)`` returns one, on any device."""

    make: Callable[[int, int, int], Any]
    words: str
    spec: str
    seed: int
    device: Any

    def get(self, rank: int, world_size: int, step: int) -> Any:
        """Return a batch on the device. Random numbers are seeded by rank and step. Raises ``UserError``."""
        set_seed(self.seed, BATCH, step=step, rank=rank)
        with users_turn(f"{self.spec} failed for rank {rank}, step {step}"):
            return map_tensors(self.make(rank, world_size, step), lambda tensor: tensor.to(self.device))


def choose_batches(settings: TrialSettings, module: Any, device: Any) -> Batches:
    """Return the user's batches, or random ones that fit the model's first layer. Raises ``UserError``."""
    if settings.batch:
        make = load_callable(settings.batch, "--batch")
        spec = f"--batch {settings.batch}"
        return Batches(make=make, words=settings.batch, spec=spec, seed=settings.seed, device=device)
    for name, layer in module.named_modules():
        guess = _guess(layer)
        if guess is not None:
            draw, words = guess
            said = f"{words}, made up for {name or 'the model'} ({type(layer).__name__})"
            return Batches(make=draw, words=said, spec="the made-up batch", seed=settings.seed, device=device)
    raise UserError(
        "cannot guess the model's input: it has no Linear, Conv2d or Embedding",
        help="Give --batch package.module:make_batch; make_batch(rank, world_size, step) returns a batch.",
    )


def map_tensors(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with ``change`` applied to every tensor in its mappings, lists and tuples."""
    import torch

    return _rebuild(batch, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def join(batches: Sequence[Any]) -> Any:
    """Join batches into one: concatenate tensors along their first dimension. Raises ``CannotJoin``."""
    rows = [list(leaves(batch)) for batch in batches]
    if len({tuple(place for place, _ in row) for row in rows}) > 1:
        raise CannotJoin("the batches of the ranks have different structures")
    joined = iter([_join_leaf(row[0][0], [leaf for _, leaf in row]) for row in zip(*rows, strict=True)])
    return _rebuild(batches[0], lambda _: next(joined))


def sample_counts(batches: Sequence[Any]) -> tuple[int, ...]:
    """Return how many samples each batch has: the length of its first tensor, or 0 if it has none."""
    return tuple(
        next((int(leaf.shape[0]) for _, leaf in leaves(one) if getattr(leaf, "ndim", 0)), 0) for one in batches
    )


def _rebuild(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with ``change`` applied to every leaf, in the order of ``leaves``."""
    if isinstance(batch, Mapping):
        return {key: _rebuild(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rebuild(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_rebuild(value, change) for value in batch)
    return change(batch)


def _join_leaf(place: str, parts: Sequence[Any]) -> Any:
    import torch

    if not all(isinstance(part, torch.Tensor) for part in parts):
        if any(part != parts[0] for part in parts):
            raise CannotJoin(f"{place} is not a tensor, and differs between ranks")
        return parts[0]
    if all(part.ndim == 0 for part in parts):
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise CannotJoin(f"{place} is one number, and differs between ranks")
        return parts[0]
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        shown = " and ".join(str(list(part.shape)) for part in parts[:2])
        raise CannotJoin(f"{place} has shapes that do not fit together ({shown}, ...): pad them to one")
    return torch.cat(list(parts))


def _guess(layer: Any) -> tuple[Callable[[int, int, int], Any], str] | None:
    import torch
    from torch import nn

    if isinstance(layer, nn.Linear):
        size: tuple[int, ...] = (SAMPLES, layer.in_features)
    elif isinstance(layer, nn.Conv2d):
        size = (SAMPLES, layer.in_channels, PIXELS, PIXELS)
    elif isinstance(layer, nn.Embedding):
        count, size = layer.num_embeddings, (SAMPLES, TOKENS)
        return lambda *_: torch.randint(0, count, size), f"int64{list(size)}"
    else:
        return None
    return lambda *_: torch.randn(size), f"float32{list(size)}"
