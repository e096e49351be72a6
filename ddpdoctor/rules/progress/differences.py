"""Compares the models that the ranks of one group gave to DDP, and finds the first parameter that differs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.words import group_alike, outvoted

from ddpdoctor.rules.progress.groups import Group, find_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.facts import ModelSeen, Rank, TensorSeen

    _Place = tuple[bool, int]

NOWHERE = (True, -1)
"""The place of a difference that is not among the tensors that fit in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDifference:
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


def find_difference(
    ranks: Sequence[Rank], table: Mapping[tuple[int, str], Group], world: int
) -> ModelDifference | None:
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


def _difference(group: Group, number: int, models: Mapping[int, ModelSeen]) -> ModelDifference:
    most, odd, *others = (ranks for _, ranks in group_alike({rank: model.digest for rank, model in models.items()}))
    mine, usual = _rows(models[odd[0]]), _rows(models[most[0]])
    place = min((at for at in mine.keys() | usual.keys() if mine.get(at) != usual.get(at)), default=NOWHERE)
    return ModelDifference(
        group=group,
        number=number,
        models=models,
        blamed=outvoted((most, odd, *others)),
        tensor=_name(mine, usual, place),
        rows={n: _rows(model).get(place) for n, model in models.items()},
    )


def _rows(model: ModelSeen) -> dict[_Place, TensorSeen]:
    """Return a model's tensors by place: parameters come before buffers, each in their order."""
    kinds = {kind: [tensor for tensor in model.tensors if tensor.is_buffer is kind] for kind in (False, True)}
    return {(kind, number): tensor for kind, rows in kinds.items() for number, tensor in enumerate(rows)}


def _name(mine: Mapping[_Place, TensorSeen], usual: Mapping[_Place, TensorSeen], place: _Place) -> str | None:
    """Return the name of what differs; if only one side has the parameter, that side's name."""
    own, others = mine.get(place), usual.get(place)
    if own is not None and own.name not in {tensor.name for tensor in usual.values()}:
        return own.name
    known = others or own
    return known.name if known is not None else None
