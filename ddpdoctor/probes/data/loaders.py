"""Draws a few passes from the loader that the user's function returns, and describes it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.data import EpochSeen, LoaderSeen, RankDraws, RankPass, SamplerSeen
from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.data.contents import count_samples, digest_leaves, digest_samples
from ddpdoctor.probes.data.indices import NoIndices, draw_pass, find_base
from ddpdoctor.probes.user_code import users_turn

if TYPE_CHECKING:
    from ddpdoctor.probes.data.indices import Base, PassDrawn

PASS_LIMIT_S = 30.0
"""Our choice: the time limit of one pass over data without indices, which must be loaded to be counted."""
DIGESTED_BATCHES = 8
"""Our choice: how many batches of such a pass get digests."""


def draw_from(made: Any, name: str, rank: int, epochs: int, *, set_epoch: bool) -> tuple[RankDraws, tuple[bytes, ...]]:
    """Draw from what the user's function returned. Return the draws, and a bitmap of the samples drawn in each pass.

    Without indices there are no bitmaps.
    Raises ``UserError`` if it is not a loader, or if the user's code fails.
    """
    from torch.utils.data import DataLoader, Dataset

    if isinstance(made, DataLoader):
        return _inspect_loader(made, name, rank, epochs, set_epoch=set_epoch)
    if isinstance(made, Dataset):
        raise UserError(
            f"{name} returns a dataset ({_type_of(made)}), but loader and sampler decide how it is split",
            help="Return the DataLoader; or use the arithmetic alone: check-data --samples N --world-size N.",
        )
    if isinstance(made, tuple | list | dict) and any(
        isinstance(one, DataLoader) for one in (made.values() if isinstance(made, dict) else made)
    ):
        raise UserError(
            f"{name} returns a {type(made).__name__} with several loaders, but only one can be checked",
            help="Name a function that returns the DataLoader that training iterates.",
        )
    if not hasattr(made, "__iter__"):
        raise UserError(
            f"{name} returns {_type_of(made)}, not a loader", help="Return the DataLoader that training iterates."
        )
    return _look_at_batches(made, name, rank, epochs, set_epoch=set_epoch), ()


def _inspect_loader(
    loader: Any, name: str, rank: int, epochs: int, *, set_epoch: bool
) -> tuple[RankDraws, tuple[bytes, ...]]:
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return _look_at_batches(loader, name, rank, epochs, set_epoch=set_epoch), ()
    try:
        base = find_base(loader.dataset)
        drawn = _draw(loader, base, name, epochs, set_epoch=set_epoch)
    except NoIndices as error:
        draws = _look_at_batches(loader, name, rank, epochs, set_epoch=set_epoch)
        note = f"the indices of {_type_of(loader)} could not be followed: {error}"
        return replace(draws, notes=(note, *draws.notes)), ()
    digests, notes = _digest_samples(base, name)
    seen = tuple(one.epoch(digests) for one in drawn)
    draws = _describe(loader, base, seen, tuple(one.row(rank) for one in drawn), notes)
    return draws, tuple(bytes(one.bits) for one in drawn)


def _draw(loader: Any, base: Base, name: str, epochs: int, *, set_epoch: bool) -> tuple[PassDrawn, ...]:
    drawn: list[PassDrawn] = []
    refused: NoIndices | None = None
    with users_turn(f"{name}: drawing its indices failed"):
        try:
            for number in range(1, epochs + 1):
                epoch = _set_epoch(loader, number - 1) if set_epoch else _epoch_of(loader)
                drawn.append(draw_pass(loader, base, number, epoch))
        except NoIndices as error:
            # Kept out of users_turn, which would report it as a failure of the user's code.
            refused = error
    if refused is not None:
        raise refused
    return tuple(drawn)


def _look_at_batches(made: Any, name: str, rank: int, epochs: int, *, set_epoch: bool) -> RankDraws:
    """Iterate data that has no indices. It must be loaded to be counted."""
    seen, rows, stopped = [], [], False
    with users_turn(f"{name}: going over it failed"):
        for number in range(1, epochs + 1):
            epoch = _set_epoch(made, number - 1) if set_epoch else _epoch_of(made)
            row, digests = _count_pass(made, rank)
            rows.append(row)
            seen.append(_epoch_without_indices(row, digests, number, epoch))
            stopped |= not row.complete
    notes = (f"a pass was followed for {PASS_LIMIT_S:g} s, but not to its end",) if stopped else ()
    return _describe(made, None, tuple(seen), tuple(rows), notes)


def _count_pass(made: Any, rank: int) -> tuple[RankPass, tuple[str, ...]]:
    deadline = time.monotonic() + PASS_LIMIT_S
    drawn = batches = last = 0
    digests: list[str] = []
    complete = True
    for batch in made:
        last = count_samples(batch)
        drawn += last
        batches += 1
        if batches <= DIGESTED_BATCHES:
            digests += digest_leaves(batch)
        if time.monotonic() > deadline:
            complete = False
            break
    row = RankPass(rank=rank, drawn=drawn, repeated=None, batches=batches, last_batch=last, complete=complete)
    return row, tuple(digests)


def _epoch_without_indices(row: RankPass, digests: tuple[str, ...], number: int, epoch: int | None) -> EpochSeen:
    return EpochSeen(
        number=number,
        set_epoch=epoch,
        batches=row.batches,
        drawn=0,
        total=0,
        xor=0,
        order="",
        first="",
        complete=row.complete,
        trained=True,
        batch_digests=digests,
        backwards=row.batches,
    )


def _digest_samples(base: Base, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return digests of a few samples, or a note on why there are none. Counting works without them."""
    try:
        with users_turn(f"{name}: samples could not be loaded, so that equal indices are taken for equal samples"):
            return digest_samples(base.dataset, base.samples), ()
    except UserError as error:
        return (), (f"{error.message} {error.help}".strip(),)


def _set_epoch(loader: Any, epoch: int) -> int | None:
    """Call the first ``set_epoch`` found, as training loops do, and return the epoch. Return None if there is none."""
    for owner in _epoch_owners(loader):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
            return epoch
    return None


def _epoch_of(loader: Any) -> int | None:
    found = (getattr(owner, "epoch", None) for owner in _epoch_owners(loader))
    return next((epoch for epoch in found if isinstance(epoch, int)), None)


def _epoch_owners(loader: Any) -> tuple[Any, ...]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))


def _describe(
    made: Any, base: Base | None, seen: tuple[EpochSeen, ...], passes: tuple[RankPass, ...], notes: tuple[str, ...]
) -> RankDraws:
    """Return the draws from a loader. ``base`` is None if it has no indices."""
    dataset = getattr(made, "dataset", made) if base is None else base.dataset
    batch_size = getattr(made, "batch_size", None) or getattr(getattr(made, "batch_sampler", None), "batch_size", None)
    samples = None if base is None else base.samples
    loader = LoaderSeen(
        number=1,
        site=None,
        dataset=_type_of(dataset),
        dataset_digest="",
        samples=samples,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        drop_last=getattr(made, "drop_last", None),
        iterable=base is None,
        workers=getattr(made, "num_workers", 0),
        indices_seen=base is not None,
        sampler=None if base is None else _describe_sampler(made),
        epochs=seen,
        passes=len(seen),
    )
    return RankDraws(
        rank=passes[0].rank,
        host=os.uname().nodename,
        loader=loader,
        kind=_type_of(made),
        samples=samples,
        set_epoch=any(one.set_epoch is not None for one in seen),
        passes=passes,
        notes=notes,
    )


def _describe_sampler(loader: Any) -> SamplerSeen:
    """Describe what divides the samples among ranks: the sampler, or the user's own batch sampler if there is one."""
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    batch_sampler = loader.batch_sampler
    is_own = batch_sampler is not None and type(batch_sampler) is not BatchSampler
    sampler = batch_sampler if is_own else loader.sampler
    return SamplerSeen(
        type=_type_of(sampler),
        replicas=_number(sampler, "num_replicas"),
        rank=_number(sampler, "rank"),
        seed=_number(sampler, "seed"),
        shuffle=_flag(sampler, "shuffle"),
        drop_last=_flag(sampler, "drop_last"),
        standard=type(sampler).__iter__ is DistributedSampler.__iter__,
    )


def _number(sampler: Any, name: str) -> int | None:
    value = getattr(sampler, name, None)
    return value if type(value) is int else None


def _flag(sampler: Any, name: str) -> bool | None:
    value = getattr(sampler, name, None)
    return value if type(value) is bool else None


def _type_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
