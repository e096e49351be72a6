"""Folds who waits for whom by class, so that it can be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.diagnose.pictures.classes import place_words
from ddpdoctor.model.pictures import RankWaits, WaitingRanks
from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from ddpdoctor.model.findings import RankRow

MOST_CLASSES = 40
"""Our choice: a graph with more nodes cannot be read. Ranks are then folded even if they wait for different ranks."""


def fold_waits(
    targets: Mapping[int, frozenset[int]], rows: Mapping[int, RankRow], blamed: frozenset[int]
) -> RankWaits | None:
    """Return the waits of all ranks by class, or None if nobody waits for anybody.

    Ranks of one class are in the same state at the same line and wait for the same ranks, so that a circle stays one.
    """
    if not targets:
        return None
    taking_part = sorted({*targets}.union(*set(targets.values())))
    ids = {whom: number for number, whom in enumerate(dict.fromkeys(targets.values()))}

    def looks(rank: int) -> Hashable:
        row = rows.get(rank)
        return (row.state if row else "", place_words(row.where) if row else "", rank in blamed)

    classes = _classes(taking_part, lambda rank: (looks(rank), ids.get(targets.get(rank, frozenset()))))
    if len(classes) > MOST_CLASSES:
        classes = _classes(taking_part, looks)
    return _build(classes[:MOST_CLASSES], targets, rows, blamed)


def _classes(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    return list(grouped((key(rank), rank) for rank in ranks).values())


def _build(
    classes: list[list[int]], targets: Mapping[int, frozenset[int]], rows: Mapping[int, RankRow], blamed: frozenset[int]
) -> RankWaits:
    number_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    pairs = {(number_of[rank], whom) for rank, whom in targets.items() if rank in number_of}
    links = {(number, number_of[one]) for number, whom in pairs for one in whom if one in number_of}
    return RankWaits(
        classes=tuple(_class_of(ranks, rows.get(ranks[0]), blamed) for ranks in classes),
        links=tuple(sorted(links)),
    )


def _class_of(ranks: list[int], row: RankRow | None, blamed: frozenset[int]) -> WaitingRanks:
    return WaitingRanks(
        ranks=tuple(ranks),
        state=row.state if row is not None else "never started",
        place=place_words(row.where) if row is not None else "",
        blamed=ranks[0] in blamed,
    )
