"""Grids of ranks by ranks: how many samples both get in an epoch, or have drawn in a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.sharing import count_both
from ddpdoctor.report.blocks import Grid, GridCell, Tone
from ddpdoctor.report.grids.build import MAX_COLUMNS, linear_level, not_shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.data import Drawn
    from ddpdoctor.model.sharing import Shares
    from ddpdoctor.report.blocks import Section

LEGEND = "The darker, the more of their samples two ranks have in common. On the diagonal: those of one rank."


def share_pictures(shares: Shares) -> tuple[Section, ...]:
    """Return the grid for the arithmetic of an epoch, or nothing if overlaps depend on the shuffle."""
    ranks = shares.ranks[:MAX_COLUMNS]
    if shares.unique is None or len(ranks) < 2:
        return ()
    both = tuple(tuple(count_both(shares.plan, one, other) for other in ranks) for one in ranks)
    grid = _grid("samples that two ranks both get in an epoch", [one.rank for one in ranks], both, len(shares.ranks))
    return ((grid,),)


def drawn_pictures(drawn: Drawn) -> tuple[Section, ...]:
    """Return a grid for each pass whose samples were compared. Reports of older versions lack the counts."""
    grids = []
    for one in drawn.passes:
        ranks = [row.rank for row in one.ranks[: len(one.overlaps)]]
        if len(ranks) > 1 and all(len(row) == len(ranks) for row in one.overlaps):
            title = f"samples that two ranks both drew in pass {one.number}"
            grids.append((_grid(title, ranks, one.overlaps, len(one.ranks)),))
    return tuple(grids)


def _grid(title: str, ranks: Sequence[int], both: Sequence[Sequence[int]], count: int) -> Grid:
    names = tuple(map(str, ranks))
    places = range(len(ranks))
    return Grid(
        title=title,
        rows=names,
        columns=names,
        cells=tuple(tuple(_cell(ranks, both, at, other) for other in places) for at in places),
        row_name="rank",
        column_name="rank",
        legend=(LEGEND, *not_shown(count - len(ranks), "rank")),
    )


def _cell(ranks: Sequence[int], both: Sequence[Sequence[int]], at: int, other: int) -> GridCell:
    shared = both[at][other]
    if at == other:
        return GridCell(text=str(shared), tone=Tone.STRONG, about=f"rank {ranks[at]}: {count_of(shared, 'sample')}")
    fewer = min(both[at][at], both[other][other])
    about = f"ranks {ranks[at]} and {ranks[other]}: {shared} of {count_of(fewer, 'sample')}"
    return GridCell(text=str(shared), about=about, level=linear_level(shared, fewer))
