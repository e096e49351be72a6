"""`check-data --dataset`: each rank builds the user's loader and draws from it, and rank 0 counts the draws of all.

Indices are drawn without loading data where the sampler allows it. Digests show whether ranks hold the same samples.
"""

from __future__ import annotations

import base64
import hashlib
import operator
import os
import random
import struct
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import isqrt
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.data import Drawn, EpochSeen, Indices, LoaderSeen, Pass, RankDraws, RankPass, SamplerSeen
from ddpdoctor.model.errors import UserError, first_line
from ddpdoctor.probes.loading import import_torch, leaves, load_callable, users_turn
from ddpdoctor.probes.ranks import meet_ranks, refuse_problems, unreachable
from ddpdoctor.recorder.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.ranks import Ranks

Plain = TypeVar("Plain", int, bool)
# Our choice: up to this size, ranks send which samples they drew, 2 MiB per pass. Above it, only sums and counts.
MOST_SAMPLES = 2**24
MOST_OVERLAPS = 64
# Our choice: the samples of each pair are counted for so many ranks, and fewer if ranks squared times samples exceeds
# this number. That takes a quarter of a second per pass.
OVERLAP_BITS = 2**31
# Part of torch's error if a function creates the process group that ddpdoctor has already created.
MADE_TWICE = "initialize the default process group twice"
NO_GROUP = "`ddpdoctor check-rendezvous`, started on all hosts, shows which connections fail."
# Our choice: how long a rank tries to reach the store. On a busy host, importing torch takes tens of seconds.
MEET_LIMIT_S = 60.0
GROUP_TIMEOUT_S = 600.0
LATE_S = 60.0  # our choice: how long rank 0 may take to judge and report after all ranks have answered
# Our choice: the time limit of one pass over data without indices, which must be loaded to be counted.
PASS_LIMIT_S = 30.0
DIGESTED_BATCHES = 8  # our choice: how many batches of such a pass get digests
DIGEST_BYTES = 12
# Our choice: samples loaded on every rank, spread over the dataset. Labels of few classes may be equal by chance.
SAMPLES = 8
MOST_LEAVES = 16
SEED = 20240229  # any number that is the same on all ranks, so that random augmentation is the same too
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDataOptions:
    """What the user asked for."""

    function: str  # ``package.module:function``
    epochs: int
    set_epoch: bool
    timeout_s: float  # how long to wait for the slowest rank


def run_rank(
    wanted: CheckDataOptions,
    launch: Launch,
    env: Mapping[str, str],
    report: Callable[[Drawn, tuple[RankDraws, ...]], int],
) -> int:
    """Take part and return the exit status, which is the same on all ranks.

    ``report`` judges and shows on rank 0 what was counted and what each rank drew. Raises ``UserError`` on rank 0 if
    the user's code failed on any rank, and on a rank that cannot reach the others.
    """
    try:
        with meet_ranks(launch, env, meet_limit_s=MEET_LIMIT_S, limit_s=wanted.timeout_s) as ranks:
            own, maps = _inspect(wanted, launch, ranks)
            everyone = ranks.gather("drawn", own)
            # For how many passes all ranks send which samples they drew
            count = min((len(draws.passes) if draws.compared else 0 for draws in everyone or ()), default=0)
            parts = [
                ranks.gather(f"map/{number}", Indices(bits=base64.b64encode(bits).decode()))
                for number, bits in enumerate(maps)
                if everyone is None or number < count
            ]

            def decide() -> int:
                draws = everyone or ()
                refuse_problems([(draw.rank, draw.problem, draw.help) for draw in draws], len(draws))
                return report(_count(wanted, draws, [part for part in parts if part]), draws)

            return ranks.end(decide, wanted.timeout_s + LATE_S)
    except StoreError as error:
        raise unreachable(launch, error) from error


def _inspect(wanted: CheckDataOptions, launch: Launch, ranks: Ranks) -> tuple[RankDraws, tuple[bytes, ...]]:
    try:
        with _process_group(ranks):
            function = load_callable(wanted.function, "--dataset")
            with users_turn(f"--dataset {wanted.function} failed"):
                made = function()
            draws, maps = draw_from(made, wanted.function, launch.rank, wanted.epochs, set_epoch=wanted.set_epoch)
    except UserError as error:
        advice = error.help
        if MADE_TWICE in error.message:
            advice += "\nThe process group already exists: call init_process_group only if not dist.is_initialized()."
        return RankDraws(rank=launch.rank, host=os.uname().nodename, problem=error.message, help=advice), ()
    fits = draws.samples is not None and draws.samples <= MOST_SAMPLES and len(maps) == wanted.epochs
    return replace(draws, compared=fits), maps if fits else ()


@contextmanager
def _process_group(ranks: Ranks) -> Iterator[None]:
    """Provide a default process group: samplers ask it for rank and world size, and the user's code may wait in it."""
    import_torch()
    if not distributed.is_available() or distributed.is_initialized():
        yield
        return
    store, problem = None, None
    try:
        store = ranks.open_process_group("gloo", "cpu", MEET_LIMIT_S, GROUP_TIMEOUT_S)
    except RuntimeError as error:
        problem = error
    # init_process_group may return before the other ranks have connected. They fail if this rank leaves then.
    came = ranks.gather("group", ranks.rank)
    ranks.agree(int, "group/all", len(came) if came else None)
    if problem is not None:
        raise UserError(f"no process group could be created: {first_line(problem)}", help=NO_GROUP) from problem
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        del store


def _count(wanted: CheckDataOptions, everyone: Sequence[RankDraws], parts: Sequence[Sequence[Indices]]) -> Drawn:
    first = everyone[0]
    assert first.loader is not None
    notes = dict.fromkeys(note for draws in everyone for note in draws.notes)
    lengths = {draws.samples for draws in everyone}
    same_length = len(lengths) == 1 and first.samples is not None
    if not same_length and None not in lengths:
        notes["the datasets of the ranks have different lengths, so equal indices are not equal samples"] = None
    passes = tuple(
        _join_pass(number, everyone, parts[number] if same_length and number < len(parts) else (), first.samples)
        for number in range(min(len(draws.passes) for draws in everyone))
    )
    return Drawn(
        world_size=len(everyone), function=wanted.function, samples=first.samples if same_length else None,
        kind=first.kind, dataset=first.loader.dataset,
        sampler=first.loader.sampler.type if first.loader.sampler else "", batch_size=first.loader.batch_size,
        passes=passes, set_epoch=first.set_epoch, notes=tuple(notes),
    )  # fmt: skip


def _join_pass(number: int, everyone: Sequence[RankDraws], parts: Sequence[Indices], samples: int | None) -> Pass:
    rows = tuple(draws.passes[number] for draws in everyone)
    if not parts or samples is None:
        return Pass(number=number + 1, ranks=rows)
    once = twice = 0
    same: dict[str, list[int]] = {}
    every = [int.from_bytes(base64.b64decode(part.bits), "little") for part in parts]
    for rank, (part, drawn) in enumerate(zip(parts, every, strict=True)):
        twice |= once & drawn
        once |= drawn
        same.setdefault(part.bits, []).append(rank)
    # How many samples two ranks both drew, for all pairs of the first ranks
    paired = every[: min(MOST_OVERLAPS, isqrt(OVERLAP_BITS // max(samples, 1)))]
    half = [[(bits & other).bit_count() for other in paired[: at + 1]] for at, bits in enumerate(paired)]
    places = range(len(paired))
    return Pass(
        number=number + 1, ranks=rows, unique=once.bit_count(), shared=twice.bit_count(),
        missed=samples - once.bit_count(), alike=tuple(tuple(ranks) for ranks in same.values() if len(ranks) > 1),
        overlaps=tuple(tuple(half[max(a, b)][min(a, b)] for b in places) for a in places),
    )  # fmt: skip


def draw_from(made: Any, name: str, rank: int, epochs: int, *, set_epoch: bool) -> tuple[RankDraws, tuple[bytes, ...]]:
    """Draw from what the user's function returned, by indices with a bitmap a pass. Raises ``UserError``."""
    is_loader = isinstance(made, DataLoader)
    if isinstance(made, Dataset) and not is_loader:
        raise UserError(
            f"{name} returns a dataset ({_type_of(made)}), but loader and sampler decide how it is split",
            help="Return the DataLoader; or use the arithmetic alone: check-data --samples N --world-size N.",
        )
    several = made.values() if isinstance(made, dict) else made if isinstance(made, tuple | list) else ()
    if not is_loader and any(isinstance(loader, DataLoader) for loader in several):
        raise UserError(
            f"{name} returns a {type(made).__name__} with several loaders, but only one can be checked",
            help="Name a function that returns the DataLoader that training iterates.",
        )
    if not is_loader and not hasattr(made, "__iter__"):
        advice = "Return the DataLoader that training iterates."
        raise UserError(f"{name} returns {_type_of(made)}, not a loader", help=advice)
    if not is_loader or isinstance(made.dataset, IterableDataset):
        return _look_at_batches(made, name, rank, epochs, set_epoch=set_epoch), ()
    try:
        base = find_base(made.dataset)
        with users_turn(f"{name}: drawing its indices failed"):
            drawn = [_draw_pass(made, base, rank, number, set_epoch=set_epoch) for number in range(1, epochs + 1)]
    except NoIndices as error:
        draws = _look_at_batches(made, name, rank, epochs, set_epoch=set_epoch)
        note = f"the indices of {_type_of(made)} could not be traced: {error.message}"
        return replace(draws, notes=(note, *draws.notes)), ()
    digests, notes = _digest_samples(base, name)
    seen = tuple(replace(epoch, sample_digests=digests) for epoch, _, _ in drawn)
    return _rank_draws(made, base, seen, tuple(row for _, row, _ in drawn), notes), tuple(bits for _, _, bits in drawn)


def _draw_pass(made: Any, base: Base, rank: int, number: int, *, set_epoch: bool) -> tuple[EpochSeen, RankPass, bytes]:
    """Draw the indices that a DataLoader would request from its workers in one pass.

    Return the pass for the data rules, the same for the report, and the bitmap of the samples drawn: bit i % 8 of byte
    i // 8 is set for sample i. Raises ``NoIndices``; errors of the user's sampler propagate.
    """
    epoch = _begin_pass(made, number, set_epoch=set_epoch)
    bits, order, first = bytearray(-(-base.samples // 8)), hashlib.blake2b(digest_size=DIGEST_BYTES), ""
    drawn = batches = last = total = xor = 0
    batch_sampler = made.batch_sampler
    for batch in batch_sampler if batch_sampler is not None else ([index] for index in made.sampler):
        indices = [base.trace(index) for index in batch]
        order.update(struct.pack(f"<{len(indices)}q", *indices))
        first = first or order.hexdigest()
        last = len(indices)
        drawn, batches, total = drawn + last, batches + 1, total + sum(indices)
        for index in indices:
            xor ^= index
            bits[index >> 3] |= 1 << (index & 7)
    repeats = drawn - int.from_bytes(bits, "little").bit_count()
    seen = EpochSeen(
        number=number, set_epoch=epoch, batches=batches, drawn=drawn, total=total, xor=xor, order=order.hexdigest(),
        first=first, complete=True, trained=True, backwards=batches, repeats=repeats,
    )  # fmt: skip
    row = RankPass(rank=rank, drawn=drawn, repeated=repeats, batches=batches, last_batch=last, complete=True)
    return seen, row, bytes(bits)


def _look_at_batches(made: Any, name: str, rank: int, epochs: int, *, set_epoch: bool) -> RankDraws:
    with users_turn(f"{name}: iterating over it failed"):
        passes = [_load_pass(made, rank, number, set_epoch=set_epoch) for number in range(1, epochs + 1)]
    stopped = not all(row.complete for _, row in passes)
    notes = (f"a pass was followed for {PASS_LIMIT_S:g} s, and stopped before its end",) if stopped else ()
    return _rank_draws(made, None, tuple(seen for seen, _ in passes), tuple(row for _, row in passes), notes)


def _load_pass(made: Any, rank: int, number: int, *, set_epoch: bool) -> tuple[EpochSeen, RankPass]:
    """Load the batches of one pass. Their samples are the first dimension of the first tensor, else one."""
    epoch = _begin_pass(made, number, set_epoch=set_epoch)
    deadline = time.monotonic() + PASS_LIMIT_S
    drawn = batches = last = 0
    digests: list[str] = []
    complete = True
    for batch in made:
        sizes = (len(leaf) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
        last = next(sizes, len(batch) if isinstance(batch, list) else 1)
        drawn, batches = drawn + last, batches + 1
        if batches <= DIGESTED_BATCHES:
            digests += digest_leaves(batch)
        if time.monotonic() > deadline:
            complete = False
            break
    seen = EpochSeen(
        number=number, set_epoch=epoch, batches=batches, drawn=0, total=0, xor=0, order="", first="", complete=complete,
        trained=True, batch_digests=tuple(digests), backwards=batches,
    )  # fmt: skip
    return seen, RankPass(rank=rank, drawn=drawn, repeated=None, batches=batches, last_batch=last, complete=complete)


def _begin_pass(loader: Any, number: int, *, set_epoch: bool) -> int | None:
    """Return a pass's epoch, or None if the loader has none. If asked to, set it first, as training loops do."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners: tuple[Any, ...] = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    if not set_epoch:
        found = (getattr(owner, "epoch", None) for owner in owners)
        return next((epoch for epoch in found if isinstance(epoch, int)), None)
    for owner in owners:
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(number - 1)
            return number - 1
    return None


def _rank_draws(
    made: Any, base: Base | None, seen: tuple[EpochSeen, ...], passes: tuple[RankPass, ...], notes: tuple[str, ...]
) -> RankDraws:
    dataset = getattr(made, "dataset", made) if base is None else base.dataset
    batch_size = getattr(made, "batch_size", None) or getattr(getattr(made, "batch_sampler", None), "batch_size", None)
    samples, divider = None, None
    if base is not None:  # what divides the samples among ranks: the sampler, or the user's own batch sampler
        batches, samples = made.batch_sampler, base.samples
        sampler = batches if batches is not None and type(batches) is not BatchSampler else made.sampler
        divider = SamplerSeen(
            type=_type_of(sampler), replicas=_plain(sampler, "num_replicas", int), rank=_plain(sampler, "rank", int),
            seed=_plain(sampler, "seed", int), shuffle=_plain(sampler, "shuffle", bool),
            drop_last=_plain(sampler, "drop_last", bool),
            standard=type(sampler).__iter__ is DistributedSampler.__iter__,
        )  # fmt: skip
    loader = LoaderSeen(
        number=1, site=None, dataset=_type_of(dataset), dataset_digest="", samples=samples,
        batch_size=batch_size if isinstance(batch_size, int) else None, drop_last=getattr(made, "drop_last", None),
        iterable=base is None, workers=getattr(made, "num_workers", 0), indices_seen=base is not None,
        sampler=divider, epochs=seen, passes=len(seen),
    )  # fmt: skip
    return RankDraws(
        rank=passes[0].rank, host=os.uname().nodename, loader=loader, kind=_type_of(made), samples=samples,
        set_epoch=any(epoch.set_epoch is not None for epoch in seen), passes=passes, notes=notes,
    )  # fmt: skip


def _plain(sampler: Any, name: str, kind: type[Plain]) -> Plain | None:
    value = getattr(sampler, name, None)
    return value if type(value) is kind else None


def _type_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


class NoIndices(UserError):  # noqa: N818 - says what it is
    """The sampler yields something other than sample indices, or the dataset has no length: not a user's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The dataset inside all of torch's ``Subset`` wrappers."""

    dataset: Any
    samples: int
    maps: tuple[Sequence[int], ...] = ()  # the indices of the subsets, outermost first

    def trace(self, index: Any) -> int:
        """Return the sample that an index of the loader means. Raises ``NoIndices``."""
        try:
            found = operator.index(index)
            for chosen in self.maps:
                found = operator.index(chosen[found])
        except (TypeError, IndexError) as error:
            raise NoIndices(f"{type(index).__name__} is not an index") from error
        if not -self.samples <= found < self.samples:
            raise NoIndices(f"no such sample: {found}")
        return found % self.samples


def find_base(dataset: Any) -> Base:
    """Return the dataset inside all subsets, of which equal indices need not be equal samples. Raises ``NoIndices``."""
    maps = []
    while type(dataset) is Subset:
        maps.append(dataset.indices)
        dataset = dataset.dataset
    try:
        return Base(dataset=dataset, samples=len(dataset), maps=tuple(maps))
    except (TypeError, NotImplementedError) as error:
        raise NoIndices("the dataset has no length") from error


def _digest_samples(base: Base, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return digests of a few samples, or a note on why there are none."""
    # The random state is the same on all ranks meanwhile, and restored afterwards.
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    found = []
    try:
        with (
            users_turn(f"{name}: samples could not be loaded, so equal indices are assumed to be equal samples"),
            torch.random.fork_rng(devices=[]),
        ):
            for index in sorted({place * base.samples // SAMPLES for place in range(SAMPLES)}):
                torch.random.default_generator.manual_seed(SEED + index)
                random.seed(SEED + index)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(SEED + index)
                found += [f"{index}:{leaf}" for leaf in digest_leaves(base.dataset[index])]
    except UserError as error:
        return (), (f"{error.message} {error.help}".strip(),)
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
    return tuple(found), ()


def digest_leaves(data: Any) -> tuple[str, ...]:
    """Return "leaf:digest" for a batch or a sample. Leaves with only one value say nothing and are left out."""
    found = ((number, _digest(leaf)) for number, (_, leaf) in enumerate(islice(leaves(data), MOST_LEAVES)))
    return tuple(f"{number}:{digest}" for number, digest in found if digest)


def _digest(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        is_constant = bool(leaf.numel() > 1 and (leaf == leaf.flatten()[0]).all())
        return "" if is_constant else _keyed_digest(fingerprints([leaf]), f"{leaf.dtype} {tuple(leaf.shape)}")
    if isinstance(leaf, bytes | str | int | float | bool):
        return _keyed_digest(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), type(leaf).__name__)
    as_bytes = getattr(leaf, "tobytes", None)  # NumPy arrays and images have it
    return _keyed_digest(as_bytes(), type(leaf).__name__) if callable(as_bytes) else ""


def _keyed_digest(content: bytes, kind: str) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=kind.encode()[:64]).hexdigest()
