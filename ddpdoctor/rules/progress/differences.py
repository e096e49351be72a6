"""Compares the models that the ranks of one group gave to DDP, and finds the first parameter that differs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from .groups import Group, find_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.facts import ModelSeen, Rank, TensorSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Models that differ in the same construction of DDP."""

    group: Group
    number: int
    """Which model of the group this is, counted from 1."""
    models: Mapping[int, ModelSeen]
    """By rank of the group that has come to this construction."""
    blamed: tuple[int, ...]
    """The minority, or all ranks if there is no majority."""
    tensor: str | None
    """The first parameter or buffer that differs, or None if it is not among those that fit in the record."""
    rows: Mapping[int, TensorSeen | None]
    """By rank: what its model has at the position of the first difference."""


def find_difference(ranks: Sequence[Rank], table: Mapping[tuple[int, str], Group], world: int) -> Difference | None:
    """Return the first model of a group that differs between its ranks. The cost grows with the size of all models."""
    found: dict[tuple[Group, int], dict[int, ModelSeen]] = defaultdict(dict)
    for rank in ranks:
        counts: dict[str, int] = defaultdict(int)
        for model in rank.models:
            counts[model.group] += 1
            found[find_group(table, rank, model.group, world), counts[model.group]][rank.rank] = model
    for (group, number), models in sorted(found.items(), key=lambda item: item[0][1]):
        if len({model.digest for model in models.values()}) > 1:
            return _difference(group, number, models)
    return None


def _difference(group: Group, number: int, models: Mapping[int, ModelSeen]) -> Difference:
    classes: dict[str, list[int]] = defaultdict(list)
    for rank, model in sorted(models.items()):
        classes[model.digest].append(rank)
    ordered = sorted(classes.values(), key=len, reverse=True)
    most = ordered[0]
    majority = 2 * len(most) > len(models) and len(most) > 1
    usual, odd = models[most[0]], models[ordered[1][0]]
    place = _first_difference(usual, odd)
    return Difference(
        group=group,
        number=number,
        models=models,
        blamed=tuple(n for n in sorted(models) if not majority or n not in set(most)),
        tensor=_name(usual, odd, place),
        rows={n: _row(model, place) for n, model in models.items()},
    )


@dataclass(frozen=True, slots=True)
class _Place:
    buffers: bool
    number: int


def _rows(model: ModelSeen, *, buffers: bool) -> tuple[TensorSeen, ...]:
    return tuple(tensor for tensor in model.tensors if tensor.is_buffer is buffers)


def _row(model: ModelSeen, place: _Place) -> TensorSeen | None:
    rows = _rows(model, buffers=place.buffers)
    return rows[place.number] if place.number < len(rows) else None


def _first_difference(usual: ModelSeen, odd: ModelSeen) -> _Place:
    """Return the position of the first parameter that differs between two models, or else of the first buffer."""
    for buffers in (False, True):
        pairs = zip_longest(_rows(usual, buffers=buffers), _rows(odd, buffers=buffers))
        number = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if number is not None:
            return _Place(buffers, number)
    return _Place(buffers=True, number=len(usual.tensors))


def _name(usual: ModelSeen, odd: ModelSeen, place: _Place) -> str | None:
    """Return the name of what differs; if only one side has the parameter, that side's name."""
    mine, others = _row(odd, place), _row(usual, place)
    if mine is not None and mine.name not in {tensor.name for tensor in usual.tensors}:
        return mine.name
    known = others or mine
    return known.name if known is not None else None
