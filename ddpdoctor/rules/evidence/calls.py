"""Compares the calls that NCCL's logs show of several ranks: another operation at one number is a mismatch."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Called, Differ
from ddpdoctor.model.words import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpdoctor.model.evidence import Operation

_Call = tuple[str, int | None, str]


def compare_calls(facts: Iterable[object]) -> Iterator[Differ]:
    """Return the first call of each communicator in which ranks differ.

    Calls of one group call share a number, so all calls of a rank at a number are compared together. Sizes may differ
    by intent in none of these operations.
    """
    called = [fact for fact in facts if isinstance(fact, Called) and fact.who.rank is not None]
    for group, those in grouped((fact.operation.group, fact) for fact in called).items():
        if _is_several({fact.who.rank for fact in those}, group):
            continue
        by_number = grouped((fact.operation.seq or 0, fact) for fact in those)
        for number in sorted(by_number):
            found = _differ(by_number[number])
            if found is not None:
                yield found
                break


def _is_several(ranks: set[int | None], group: str) -> bool:
    """Return whether several communicators share this key: the log numbers them, and they have more ranks than one."""
    size = re.search(r" of (\d+) ranks$", group)
    return size is not None and len(ranks) > int(size[1])


def _differ(called: Sequence[Called]) -> Differ | None:
    by_rank = {
        rank: those for rank, those in grouped((fact.who.rank, fact) for fact in called).items() if rank is not None
    }
    shapes = {
        rank: tuple(sorted((_shape(fact.operation) for fact in those), key=str)) for rank, those in by_rank.items()
    }
    sides = grouped((shape, rank) for rank, shape in shapes.items())
    if len(sides) < 2 or len({len(shape) for shape in sides}) > 1:
        return None
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
    common = Counter(call for shape in sides for call in set(shape))
    shown = []
    for shape, ranks in ordered:
        own = next((call for call in shape if common[call] < len(sides)), shape[0])
        fact = next(fact for fact in by_rank[ranks[0]] if _shape(fact.operation) == own)
        shown.append((tuple(sorted(ranks)), fact))
    majority = shown[0][0] if 2 * len(shown[0][0]) > len(by_rank) else None
    odd = tuple(sorted(set(by_rank) - set(majority))) if majority else None
    last = shown[-1][1]
    ops = {fact.operation.op for _, fact in shown}
    shown_sides = tuple((ranks, fact.operation) for ranks, fact in shown)
    aspect = "operation" if len(ops) > 1 else "shape"
    return Differ(spot=last.spot, said=last.said, sides=shown_sides, odd=odd, aspect=aspect)


def _shape(operation: Operation) -> _Call:
    return (operation.op, operation.numel_in, operation.dtype)
