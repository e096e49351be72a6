"""Finds out which ranks are in one process group, from pairs of global ranks and group ranks that were seen."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import MOST_RANKS
from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def split_group(places: Mapping[int, int], ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each group among groups that have one name.

    Two ranks with one group rank are in different groups. They are told apart only if a plain layout fits: the ranks of
    a group are consecutive, or a constant stride apart.

    Args:
        places: Group ranks by global ranks, as far as they are known.
        ranks: All ranks that named the group.
    """
    every = tuple(sorted(ranks))
    if len(set(places.values())) == len(places):
        return [every]
    layouts = [_clusters(places, stride) for stride in range(1, max(places) + 1)]
    fitting = [tuple(clusters.values()) for clusters in layouts if min(clusters) >= 0]
    if not fitting:
        return []
    fewest = min(len(clusters) for clusters in fitting)
    best = {clusters for clusters in fitting if len(clusters) == fewest}
    return list(best.pop()) if len(best) == 1 else []


def members_of(places: Mapping[int, int], listed: Sequence[int] | None, size: int | None) -> tuple[int, ...]:
    """Return the global ranks of a group, in the order of their group ranks, or as many as can be told.

    Args:
        places: Group ranks by global ranks, as far as they are known.
        listed: The members, if a source lists them.
        size: The number of members, if it is known.
    """
    if listed is not None:
        return tuple(listed)
    size = min(size, MOST_RANKS) if size is not None else None
    stride = _stride(places)
    if stride is None:
        return ()
    rank, place = next(iter(places.items()))
    count = size if size is not None else min(max(places.values()) + 1, MOST_RANKS)
    return tuple(found for number in range(count) if (found := rank + (number - place) * stride) >= 0)


def _stride(places: Mapping[int, int]) -> int | None:
    """Return how far apart the ranks of neighbors in a group are, or None if that is not plain."""
    pairs = sorted((place, rank) for rank, place in places.items())
    steps = {(rank - former) / (place - other) for (other, former), (place, rank) in pairwise(pairs) if place != other}
    step = steps.pop() if len(steps) == 1 else 0.0
    return int(step) if step >= 1 and step == int(step) else None


def _clusters(places: Mapping[int, int], stride: int) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each group by its first rank, if neighbors in a group are so far apart."""
    found = grouped((rank - place * stride, rank) for rank, place in sorted(places.items()))
    return {first: tuple(ranks) for first, ranks in sorted(found.items())}
