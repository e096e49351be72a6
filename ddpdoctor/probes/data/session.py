"""One rank of `check-data --dataset`: build the user's loader, draw from it, and send the draws to rank 0 to count."""

from __future__ import annotations

import base64
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.data import Drawn, Indices, Pass, RankDraws
from ddpdoctor.model.errors import UserError, first_line
from ddpdoctor.model.words import rank_list
from ddpdoctor.probes.data.loaders import draw_from
from ddpdoctor.probes.load_torch import import_torch
from ddpdoctor.probes.ranks import meet_ranks, unreachable
from ddpdoctor.probes.user_code import load_callable, users_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.ranks import Ranks

MOST_SAMPLES = 2**24
"""Our choice: up to this size, ranks send which samples they drew, 2 MiB per pass. Above it, only sums and counts."""
MOST_OVERLAPS = 64
OVERLAP_BITS = 2**31
"""Our choice: the samples of each pair are counted for so many ranks, and fewer if ranks squared times samples exceeds
this number. That takes a quarter of a second per pass."""
MADE_TWICE = "initialize the default process group twice"
"""Part of torch's error if a function creates the process group that ddpdoctor has already created."""
NO_GROUP = "`ddpdoctor check-rendezvous`, started on all hosts, says which connections fail."
MEET_LIMIT_S = 60.0
"""Our choice: how long a rank tries to reach the store. On a busy host, importing torch takes tens of seconds."""
GROUP_TIMEOUT_S = 600.0
LATE_S = 60.0
"""Our choice: how long rank 0 may take to judge and report after all ranks have answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDataOptions:
    """What the user asked for."""

    function: str
    """``package.module:function``."""
    epochs: int
    set_epoch: bool
    timeout_s: float
    """How long to wait for the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredDraws:
    """What rank 0 received from all ranks."""

    drawn: Drawn
    ranks: tuple[RankDraws, ...]


def run_rank(
    wanted: CheckDataOptions, launch: Launch, env: Mapping[str, str], report: Callable[[GatheredDraws], int]
) -> int:
    """Take part and return the exit status, which is the same on all ranks.

    ``report`` judges and shows the result on rank 0. Raises ``UserError`` on rank 0 if the user's code failed on any
    rank, and on a rank that cannot reach the others.
    """
    try:
        with meet_ranks(launch, env, meet_limit_s=MEET_LIMIT_S, limit_s=wanted.timeout_s) as ranks:
            return _take_part(wanted, launch, ranks, report)
    except StoreError as error:
        raise unreachable(launch, error) from error


def _take_part(wanted: CheckDataOptions, launch: Launch, ranks: Ranks, report: Callable[[GatheredDraws], int]) -> int:
    own, maps = _inspect(wanted, launch, ranks)
    everyone = ranks.gather("drawn", own)
    count = _least_compared(everyone or ())
    parts = [
        ranks.gather(f"map/{number}", Indices(bits=base64.b64encode(bits).decode()))
        for number, bits in enumerate(maps)
        if everyone is None or number < count
    ]
    return ranks.end(
        lambda: _decide(wanted, everyone or (), [part for part in parts if part], report),
        wanted.timeout_s + LATE_S,
    )


def _inspect(wanted: CheckDataOptions, launch: Launch, ranks: Ranks) -> tuple[RankDraws, tuple[bytes, ...]]:
    """Return what this rank reports, and the bitmaps of its passes if they are small enough."""
    try:
        with _process_group(ranks):
            function = load_callable(wanted.function, "--dataset")
            with users_turn(f"--dataset {wanted.function} failed"):
                made = function()
            draws, maps = draw_from(made, wanted.function, launch.rank, wanted.epochs, set_epoch=wanted.set_epoch)
    except UserError as error:
        host = os.uname().nodename
        return RankDraws(rank=launch.rank, host=host, problem=error.message, help=_advise(error)), ()
    fits = draws.samples is not None and draws.samples <= MOST_SAMPLES and len(maps) == wanted.epochs
    return replace(draws, compared=fits), maps if fits else ()


def _advise(error: UserError) -> str:
    if MADE_TWICE not in error.message:
        return error.help
    return (
        f"{error.help}\nThe process group is there already: call init_process_group only if not dist.is_initialized()."
    )


@contextmanager
def _process_group(ranks: Ranks) -> Iterator[None]:
    """Provide a default process group: samplers ask it for rank and world size, and the user's code may wait in it."""
    import_torch()
    from torch import distributed

    if not distributed.is_available() or distributed.is_initialized():
        yield
        return
    store, problem = None, None
    try:
        store = ranks.open_process_group("gloo", "cpu", MEET_LIMIT_S, GROUP_TIMEOUT_S)
    except RuntimeError as error:
        problem = error
    # init_process_group may return before the other ranks have connected. They fail if this rank leaves then.
    ranks.wait_for_all("group")
    if problem is not None:
        raise UserError(f"no process group could be created: {first_line(problem)}", help=NO_GROUP) from problem
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        del store


def _least_compared(everyone: Sequence[RankDraws]) -> int:
    """Return for how many passes all ranks send bitmaps."""
    return min((len(one.passes) if one.compared else 0 for one in everyone), default=0)


def _decide(
    wanted: CheckDataOptions,
    everyone: Sequence[RankDraws],
    parts: Sequence[Sequence[Indices]],
    report: Callable[[GatheredDraws], int],
) -> int:
    _raise_problems(everyone)
    return report(GatheredDraws(drawn=_count(wanted, everyone, parts), ranks=tuple(everyone)))


def _raise_problems(everyone: Sequence[RankDraws]) -> None:
    wrong = [one for one in everyone if one.problem]
    if not wrong:
        return
    alike = [one.rank for one in wrong if one.problem == wrong[0].problem]
    where = "" if len(alike) == len(everyone) else f"{rank_list(alike)}: "
    raise UserError(where + wrong[0].problem, help=wrong[0].help)


def _count(wanted: CheckDataOptions, everyone: Sequence[RankDraws], parts: Sequence[Sequence[Indices]]) -> Drawn:
    first = everyone[0]
    assert first.loader is not None
    notes = dict.fromkeys(note for one in everyone for note in one.notes)
    lengths = {one.samples for one in everyone}
    same_length = len(lengths) == 1 and first.samples is not None
    if not same_length and None not in lengths:
        notes["the datasets of the ranks have different lengths, so that their indices are not the same samples"] = None
    passes = tuple(
        _count_pass(number, everyone, parts[number] if same_length and number < len(parts) else (), first.samples)
        for number in range(min(len(one.passes) for one in everyone))
    )
    return Drawn(
        world_size=len(everyone),
        function=wanted.function,
        samples=first.samples if same_length else None,
        kind=first.kind,
        dataset=first.loader.dataset,
        sampler=first.loader.sampler.type if first.loader.sampler else "",
        batch_size=first.loader.batch_size,
        passes=passes,
        set_epoch=first.set_epoch,
        notes=tuple(notes),
    )


def _count_pass(number: int, everyone: Sequence[RankDraws], parts: Sequence[Indices], samples: int | None) -> Pass:
    rows = tuple(one.passes[number] for one in everyone)
    if not parts or samples is None:
        return Pass(number=number + 1, ranks=rows)
    once, twice = 0, 0
    same: dict[str, list[int]] = {}
    every = [int.from_bytes(base64.b64decode(part.bits), "little") for part in parts]
    for rank, (part, drawn) in enumerate(zip(parts, every, strict=True)):
        twice |= once & drawn
        once |= drawn
        same.setdefault(part.bits, []).append(rank)
    return Pass(
        number=number + 1,
        ranks=rows,
        unique=once.bit_count(),
        shared=twice.bit_count(),
        missed=samples - once.bit_count(),
        alike=tuple(tuple(ranks) for ranks in same.values() if len(ranks) > 1),
        overlaps=_overlaps(every[: min(MOST_OVERLAPS, isqrt(OVERLAP_BITS // max(samples, 1)))]),
    )


def _overlaps(every: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Count the samples that two ranks both drew, for all pairs."""
    half = [[(one & other).bit_count() for other in every[: at + 1]] for at, one in enumerate(every)]
    return tuple(tuple(half[max(a, b)][min(a, b)] for b in range(len(every))) for a in range(len(every)))
