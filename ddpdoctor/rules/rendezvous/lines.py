"""Which nodes explain pairs that fail: a column of the matrix, a row, single pairs, or all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.words import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Pair = tuple[int, int]
"""Source and target, by node number."""


class PairSide(str, Enum):
    """Which pairs of a node fail."""

    INBOUND = "inbound"
    """No node reaches it: its column is bad."""
    OUTBOUND = "outbound"
    """It reaches no node: its row is bad."""
    CUT_OFF = "cut-off"
    """Both its column and its row are bad."""
    PAIR = "pair"
    """Only one pair of nodes fails, in one or both directions; both work with others."""
    ALL = "all"
    """No pair at all works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPairs:
    """Nodes that explain some bad pairs."""

    way: PairSide
    nodes: tuple[int, ...]
    """One node, the two nodes of a pair, or all nodes if nothing works."""
    pairs: tuple[Pair, ...]
    """The bad pairs that this explains."""
    alone: bool = False
    """Whether this rests on a single pair, so that the other end may be to blame as well."""


def explain(tried: Mapping[Pair, bool]) -> tuple[BadPairs, ...]:
    """Return the nodes that explain the bad pairs; ``tried`` says for each tested pair whether it is bad.

    Whole rows and columns come first, the one that explains the most before others. If equal, the column wins, because
    refused connections nearly always come from a filter of incoming traffic. The rest are pairs.
    """
    bad = {pair for pair, is_bad in tried.items() if is_bad}
    if not bad:
        return ()
    if len(bad) == len(tried) and len(bad) > 1:
        return (
            BadPairs(
                way=PairSide.ALL, nodes=tuple(sorted({node for pair in bad for node in pair})), pairs=tuple(sorted(bad))
            ),
        )
    found: list[BadPairs] = []
    left = set(bad)
    lines = _bad_lines(tried, bad)
    while left:
        best = max(lines, key=lambda line: len(left.intersection(line.pairs)), default=None)
        explained = left.intersection(best.pairs) if best is not None else None
        if best is None or not explained:
            break
        found.append(replace(best, pairs=tuple(sorted(explained))))
        left -= explained
    return (*_draw_cut_off(found), *_draw_pairs(left))


def _bad_lines(tried: Mapping[Pair, bool], bad: set[Pair]) -> list[BadPairs]:
    """Return all columns and then all rows in which every tested pair is bad.

    A row or column of one pair counts only if there are just two nodes.
    """
    columns: dict[int, set[Pair]] = {}
    rows: dict[int, set[Pair]] = {}
    for source, target in tried:
        columns.setdefault(target, set()).add((source, target))
        rows.setdefault(source, set()).add((source, target))
    least = 1 if len(columns.keys() | rows.keys()) == 2 else 2
    return [
        BadPairs(way=way, nodes=(node,), pairs=tuple(pairs), alone=len(pairs) == 1)
        for way, lines in ((PairSide.INBOUND, columns), (PairSide.OUTBOUND, rows))
        for node, pairs in sorted(lines.items())
        if len(pairs) >= least and pairs <= bad
    ]


def _draw_cut_off(found: Iterable[BadPairs]) -> tuple[BadPairs, ...]:
    """Merge the row and the column of one node."""
    by_node: dict[int, BadPairs] = {}
    for blame in found:
        (node,) = blame.nodes
        former = by_node.get(node)
        both = None if former is None else tuple(sorted({*former.pairs, *blame.pairs}))
        by_node[node] = blame if both is None else BadPairs(way=PairSide.CUT_OFF, nodes=(node,), pairs=both)
    return tuple(by_node[node] for node in sorted(by_node))


def _draw_pairs(left: Iterable[Pair]) -> tuple[BadPairs, ...]:
    """Return one entry for each two nodes, in whichever direction they fail."""
    between = grouped(((min(pair), max(pair)), pair) for pair in sorted(left))
    return tuple(BadPairs(way=PairSide.PAIR, nodes=nodes, pairs=tuple(pairs)) for nodes, pairs in between.items())
