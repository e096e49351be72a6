"""Grids of what each rank of a job took from the loaders that findings about data name."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.data import LoaderTaken
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.report.blocks import GridCell, Tone
from ddpdoctor.report.findings import TONES
from ddpdoctor.report.grids.build import MARK, MAX_ROWS, grid_by_member, not_shown
from ddpdoctor.report.grids.replica import letter
from ddpdoctor.report.names import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.data import RankTaken
    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.blocks import Section
    from ddpdoctor.report.grids.build import Row

FAMILY = "DD70"
"""The codes of findings about data begin with it."""
SAME_ORDER = "Equal letters of a loader: the same indices in the same order. The number: batches."
NAMED = f"{MARK}a rank that a finding about data names"


def loader_pictures(report: Report) -> tuple[Section, ...]:
    """Return the grid of passes by ranks. Nothing if no finding names a loader, or the report lacks them."""
    findings = [one for one in report.findings if one.code.startswith(FAMILY)]
    lines = {(place.file, place.line) for one in findings for place in one.where}
    loaders = [one for one in _read(report) if (one.file, one.line) in lines]
    rows = [row for one in loaders for row in _rows(one, _tone(one, findings))]
    if not rows:
        return ()
    shown = rows[:MAX_ROWS]
    blamed = {rank for one in findings for rank in one.ranks}
    ranks = sorted({rank for _, cells in shown for rank in cells})
    # Where all ranks are named, no rank needs a mark.
    marked = blamed if not blamed.issuperset(ranks) else set()

    def name(those: Sequence[int]) -> str:
        return (MARK if marked.intersection(those) else "") + format_ranks(those)

    grid = grid_by_member(
        "what ranks took from loaders",
        shown,
        ranks,
        name,
        axes=("pass", "rank"),
        legend=(
            SAME_ORDER,
            *((NAMED,) if marked.intersection(ranks) else ()),
            *not_shown(len(rows) - len(shown), "row"),
        ),
    )
    return ((grid,),)


def _read(report: Report) -> tuple[LoaderTaken, ...]:
    plain = report.data.get("loaders")
    try:
        return tuple(decode(LoaderTaken, one) for one in plain) if isinstance(plain, list) else ()
    except WrongValue:
        return ()


def _tone(loader: LoaderTaken, findings: Sequence[Finding]) -> Tone:
    """Return the tone of ranks that are alike where they should not be: that of the worst finding at this line."""
    here = (loader.file, loader.line)
    own = [one.severity for one in findings if any((place.file, place.line) == here for place in one.where)]
    return TONES[min(own, key=lambda one: one.order)] if own else Tone.PLAIN


def _rows(loader: LoaderTaken, tone: Tone) -> Iterator[Row]:
    """Yield a row for each pass. An order has one letter in all passes, so that repeated epochs are seen too."""
    orders = dict.fromkeys(row.order for one in loader.passes for row in one.ranks if row.order)
    letters = {order: letter(number) for number, order in enumerate(orders)}
    taken = Counter(row.order for one in loader.passes for row in one.ranks)
    for one in loader.passes:
        cells = {
            row.rank: _cell(row, letters.get(row.order, ""), tone if taken[row.order] > 1 else Tone.PLAIN)
            for row in one.ranks
        }
        yield f"{loader.file.rpartition('/')[2]}:{loader.line}, pass {one.number}", cells


def _cell(row: RankTaken, name: str, tone: Tone) -> GridCell:
    more = "" if row.complete else ", not to the end"
    drawn = "" if row.drawn is None else f", {count_of(row.drawn, 'index', 'indices')}"
    return GridCell(
        text=f"{name} {row.batches}".strip(),
        tone=tone if row.order else Tone.PLAIN,
        about=f"{count_of(row.batches, 'batch', 'batches')}{drawn}{more}",
    )
