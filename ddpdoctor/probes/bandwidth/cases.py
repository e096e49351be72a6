"""Lists the cases of a bench: sizes, rounding, dtypes and operators, by nccl-tests' conventions. No torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Case, Collective, LeftOut
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.bandwidth import BenchSettings

DTYPES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element, by torch's name. Gloo and NCCL can both send and reduce these, in torch 2.6 and 2.13. They cannot
do so for int16, float8 and wider unsigned types. Sums of bool and of complex numbers are a different operation."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
EXACT_REDOPS = ("sum", "prod", "min", "max")
REDOPS = (*EXACT_REDOPS, "avg")
BACKENDS = ("gloo", "nccl")
GLOO_AVERAGES_SINCE = (2, 8)
"""https://github.com/pytorch/pytorch/pull/149781; torch 2.6 says "Cannot use ReduceOp.AVG with Gloo"."""
ALIGNMENT_BYTES = 16
"""Each rank's share of a buffer is a multiple of this, as in nccl-tests (its ``-(16/eltSize)`` masks)."""

SHARED = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL})
"""Collectives whose buffer is divided among the ranks."""
ALWAYS_IN_PLACE = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE})
"""torch.distributed uses one buffer for these, as input and output."""
NEVER_IN_PLACE = frozenset({Collective.ALL_TO_ALL, Collective.SEND_RECV})
"""nccl-tests does not check these in place either: it prints N/A."""


def list_cases(settings: BenchSettings, world_size: int) -> tuple[Case, ...]:
    """Return the cases to measure, small sizes first, and for each size one collective and dtype after the other.

    Sizes are rounded so that they can be divided among the ranks. Equal results are merged. The settings must satisfy
    0 < ``min_size_bytes`` <= ``max_size_bytes`` and have a factor above 1.
    """
    sizes = list_sizes(settings.min_size_bytes, settings.max_size_bytes, settings.factor)
    wanted = product(sizes, settings.collectives, settings.dtypes, settings.modes)
    cases = (
        Case(
            collective=collective,
            dtype=dtype,
            redop=settings.redop if collective.reduces else None,
            mode=mode,
            in_place=is_in_place(collective, asked=settings.in_place),
            size_bytes=(rounded := round_size(collective, size, DTYPES[dtype], world_size)),
            count=rounded // DTYPES[dtype],
        )
        for size, collective, dtype, mode in wanted
        if _has_partner(collective, world_size)
    )
    return tuple(dict.fromkeys(cases))


def list_impossible(settings: BenchSettings, world_size: int) -> tuple[LeftOut, ...]:
    """Return the cases that are impossible with ``world_size`` ranks, and why."""
    sizes = tuple(list_sizes(settings.min_size_bytes, settings.max_size_bytes, settings.factor))
    return tuple(
        LeftOut(
            collective=one, dtype=dtype, mode=None, sizes_bytes=sizes, reason="it needs two ranks, but there is one"
        )
        for one, dtype in product(settings.collectives, settings.dtypes)
        if not _has_partner(one, world_size)
    )


def _has_partner(collective: Collective, world_size: int) -> bool:
    # Gloo refuses to send to its own rank.
    return collective is not Collective.SEND_RECV or world_size > 1


def list_sizes(min_bytes: int, max_bytes: int, factor: int) -> Iterator[int]:
    """Yield ``min_bytes``, ``factor`` times that, and so on, and always ``max_bytes``."""
    size = min_bytes
    while size < max_bytes:
        yield size
        size *= factor
    yield max_bytes


def round_size(collective: Collective, size_bytes: int, element_bytes: int, world_size: int) -> int:
    """Return the size really used, rounded down to whole elements or equal aligned shares, but never to 0."""
    if collective not in SHARED:
        return max(element_bytes, size_bytes - size_bytes % element_bytes)
    share = size_bytes // world_size
    return max(ALIGNMENT_BYTES, share - share % ALIGNMENT_BYTES) * world_size


def is_in_place(collective: Collective, *, asked: bool) -> bool:
    """Return whether input and output share memory. torch.distributed has only one form of some collectives."""
    if collective in ALWAYS_IN_PLACE:
        return True
    return asked and collective not in NEVER_IN_PLACE


def check_possible(settings: BenchSettings) -> None:
    """Raise ``UserError`` if the backend cannot reduce a dtype with the operator."""
    if not any(collective.reduces for collective in settings.collectives):
        return
    for dtype in settings.dtypes:
        if not reducible(settings.backend, dtype, settings.redop):
            raise UserError(
                f"{settings.backend} cannot reduce {dtype} with {settings.redop}", help=possible(settings.backend)
            )


def reducible(backend: str, dtype: str, redop: str, torch: str | None = None) -> bool:
    """Return whether the backend can reduce this. ``torch`` is torch's version, None for the installed one.

    Whole numbers cannot be averaged: Gloo refuses, and NCCL cuts off the fraction.
    """
    known = backend in BACKENDS and dtype in DTYPES and redop in REDOPS
    return known and (redop != "avg" or (dtype in FLOATS and _averages(backend, torch)))


def possible(backend: str, torch: str | None = None) -> str:
    """Return a sentence about what a backend can reduce."""
    if backend not in BACKENDS:
        return f"Backends are {_listed(BACKENDS)}."
    text = f"{backend} can reduce {_listed(tuple(DTYPES))} by {_listed(EXACT_REDOPS)}"
    if _averages(backend, torch):
        return f"{text}, and {_listed(FLOATS)} by avg."
    return f"{text}; by avg from torch {GLOO_AVERAGES_SINCE[0]}.{GLOO_AVERAGES_SINCE[1]} on."


def _averages(backend: str, torch: str | None) -> bool:
    if backend != "gloo":
        return True
    found = re.match(r"(\d+)\.(\d+)", torch or _installed())
    return found is None or (int(found[1]), int(found[2])) >= GLOO_AVERAGES_SINCE


def _installed() -> str:
    """Return torch's version without importing it, which would take seconds; "" if it is unknown."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
