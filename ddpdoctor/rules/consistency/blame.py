"""Why replicas differ, and who is to blame: the minority, or all where there is no majority."""

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
"""So many sides are told apart in a sentence. Ours."""


class Ground(Enum):
    """On what a blame rests."""

    SEEN = "seen"
    """The ranks were seen to do what is wrong."""
    MAJORITY = "majority"
    """More than half of the ranks agree with each other, and not with these."""
    NONE = "none"
    """It cannot be told which of these ranks are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBlame:
    """Ranks to blame, and why these."""

    ranks: tuple[int, ...]
    ground: Ground

    @property
    def confidence(self) -> Confidence:
        """Return how sure it is whom to blame."""
        return Confidence.LOW if self.ground is Ground.NONE else Confidence.HIGH


def seen(values: Iterable[Values]) -> DriftBlame | None:
    """Return the blame of ranks that were seen to do what is wrong; None where there are none."""
    ranks = tuple(sorted(each.rank for each in values))
    return DriftBlame(ranks=ranks, ground=Ground.SEEN) if ranks else None


def outvoted(sides: Iterable[Sequence[int]]) -> DriftBlame:
    """Return the ranks outside of the side that more than half are on; all, where there is no such side."""
    ordered = sorted(sides, key=len, reverse=True)
    everybody = tuple(sorted(rank for side in ordered for rank in side))
    if 2 * len(ordered[0]) <= len(everybody):
        return DriftBlame(ranks=everybody, ground=Ground.NONE)
    majority = set(ordered[0])
    return DriftBlame(ranks=tuple(rank for rank in everybody if rank not in majority), ground=Ground.MAJORITY)


def blame_of(splits: Iterable[Split]) -> DriftBlame:
    """Return who is to blame for tensors that differ: whoever is outvoted at one of them."""
    each = [outvoted(split.sides) for split in splits]
    ranks = tuple(sorted({rank for blame in each for rank in blame.ranks}))
    told = all(blame.ground is Ground.MAJORITY for blame in each)
    return DriftBlame(ranks=ranks, ground=Ground.MAJORITY if told else Ground.NONE)


def sides_by(values: Iterable[Values], told: Callable[[Values], Told]) -> list[tuple[Told, tuple[int, ...]]]:
    """Return what ranks tell, and which of them do; the most ranks first, among equals the lowest rank."""
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
    """Findings of one code and one cause become one."""
    words: str
    """A clause that can follow a colon."""
    fix: str
    blame: DriftBlame | None = None
    """Whom the cause itself shows; None where only the tensors tell who differs."""
    unsynchronised: bool = False
    """Gradients were not reduced, which a script may want that averages parameters by itself."""
    at_the_step: bool = False
    """The fault stands at, or right before, the line that makes the step."""
    evidence: tuple[str, ...] = ()
