"""Why replicas differ, and who is to blame: the minority, or all ranks if there is no majority."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.model.consistency import Split, Values

Told = TypeVar("Told")

MAX_SIDES = 4
"""How many sides a sentence lists. Our choice."""


class Ground(Enum):
    """The reason to blame these ranks."""

    SEEN = "seen"
    """These ranks were seen to do something wrong."""
    MAJORITY = "majority"
    """More than half of the ranks agree with each other but not with these."""
    NONE = "none"
    """It is unknown which of these ranks are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBlame:
    """Ranks to blame, and why these."""

    ranks: tuple[int, ...]
    ground: Ground

    @property
    def confidence(self) -> Confidence:
        """Return how sure it is that these ranks are to blame."""
        return Confidence.LOW if self.ground is Ground.NONE else Confidence.HIGH


def seen(values: Iterable[Values]) -> DriftBlame | None:
    """Blame ranks that were seen to do something wrong. Return None if there are none."""
    ranks = tuple(sorted(each.rank for each in values))
    return DriftBlame(ranks=ranks, ground=Ground.SEEN) if ranks else None


def outvoted(sides: Iterable[Sequence[int]]) -> DriftBlame:
    """Blame the ranks outside the majority, or all ranks if no side has more than half."""
    ordered = sorted(sides, key=len, reverse=True)
    everybody = tuple(sorted(rank for side in ordered for rank in side))
    if 2 * len(ordered[0]) <= len(everybody):
        return DriftBlame(ranks=everybody, ground=Ground.NONE)
    majority = set(ordered[0])
    return DriftBlame(ranks=tuple(rank for rank in everybody if rank not in majority), ground=Ground.MAJORITY)


def blame_of(splits: Iterable[Split]) -> DriftBlame:
    """Blame the ranks that are outvoted on any of the tensors that differ."""
    each = [outvoted(split.sides) for split in splits]
    ranks = tuple(sorted({rank for blame in each for rank in blame.ranks}))
    told = all(blame.ground is Ground.MAJORITY for blame in each)
    return DriftBlame(ranks=ranks, ground=Ground.MAJORITY if told else Ground.NONE)


def sides_by(values: Iterable[Values], told: Callable[[Values], Told]) -> list[tuple[Told, tuple[int, ...]]]:
    """Group ranks by their value: the largest group first, or the one with the lowest rank among equals."""
    found: dict[Told, list[int]] = {}
    for each in sorted(values, key=lambda one: one.rank):
        found.setdefault(told(each), []).append(each.rank)
    return sorted(((what, tuple(ranks)) for what, ranks in found.items()), key=lambda side: -len(side[1]))


def sides_words(sides: Sequence[tuple[Told, Sequence[int]]], words: Callable[[Told], str] = str) -> str:
    """Return "0.1 on ranks 0 and 1, 0.01 on rank 2"."""
    told = [f"{words(what)} on {rank_list(ranks)}" for what, ranks in sides[:MAX_SIDES]]
    more = [f"others on {len(sides) - MAX_SIDES} more sides"] if len(sides) > MAX_SIDES else []
    return ", ".join([*told, *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCause:
    """Why replicas differ."""

    name: str
    """Findings with the same code and the same cause are merged into one."""
    words: str
    """A clause that can follow a colon."""
    fix: str
    blame: DriftBlame | None = None
    """The ranks that the cause itself shows, or None if only the tensors show who differs."""
    unsynchronised: bool = False
    """Gradients were not reduced. A script that averages parameters by itself may want that."""
    at_the_step: bool = False
    """The fault is at, or right before, the line that makes the step."""
    evidence: tuple[str, ...] = ()
