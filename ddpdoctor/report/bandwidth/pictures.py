"""What a document draws of `allreduce-bench`: curves over the size, and matrices of bandwidths."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.report.bandwidth.matrix import cell_key, describe_result
from ddpdoctor.report.bandwidth.numbers import NOT_DEFINED, format_gb_s
from ddpdoctor.report.bandwidth.plotted import list_plotted, list_references
from ddpdoctor.report.blocks import ChartLine, Grid, GridCell, Series, Tone
from ddpdoctor.report.grids.build import MARK, MAX_COLUMNS, log_level, not_shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.bandwidth import Reference
    from ddpdoctor.report.bandwidth.matrix import Matrix
    from ddpdoctor.report.bandwidth.plotted import Plotted
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.blocks import Section

PALER = "The paler, the slower."


def curve_pictures(bench: Bandwidth) -> tuple[Section, ...]:
    """Return busbw over the size, with each reference in a chart of its own, and the time of a call over the size."""
    plotted = list_plotted(bench)
    busbw = [line for one in plotted if (line := _line(one, one.busbw_gb_s)).points]
    time = [line for one in plotted if (line := _line(one, one.time_us)).points]
    references: list[ChartLine | None] = [*_reference_lines(list_references(bench), busbw)]
    charts = [
        Series(title="busbw in GB/s over size", lines=tuple(busbw), reference=reference)
        for reference in (references or [None])
        if busbw
    ]
    charts += [Series(title="time of a call in us over size (median)", lines=tuple(time))] if time else []
    return tuple((chart,) for chart in charts)


def _line(one: Plotted, values: Iterable[float | None]) -> ChartLine:
    points = zip(one.sizes_bytes, values, strict=True)
    return ChartLine(
        name=one.label,
        points=tuple((x, y) for x, y in points if x > 0 and y and y > 0 and math.isfinite(y)),
        is_reference=one.baseline,
    )


def _reference_lines(references: Sequence[Reference], lines: Sequence[ChartLine]) -> list[ChartLine]:
    """Return the level of each reference, from the size from which it applies to the largest."""
    sizes = [size for line in lines for size, _ in line.points]
    since = [(one, max(one.min_size_bytes, min(sizes, default=1))) for one in references if one.gb_s > 0]
    return [
        ChartLine(name=one.text, points=((first, one.gb_s), (max([first, *sizes]), one.gb_s)))
        for one, first in since
        if math.isfinite(one.gb_s)
    ]


def matrix_picture(matrix: Matrix) -> Section:
    """Return a matrix as a grid. Of many ends, those with the slowest pairs are shown."""
    shown, lowest = _choose_ends(matrix), matrix.lowest
    values = [value for value in matrix.between.values() if value > 0]
    high = max(values, default=0.0)
    # Similar bandwidths get similar shades, since a slow link is slower by factors.
    low = min(*values, high / 10) if values else 0.0
    grid = Grid(
        title=matrix.title,
        rows=tuple((MARK if at in matrix.blamed else "") + matrix.ends[at] for at in shown),
        columns=tuple(matrix.heads[at] for at in shown),
        cells=tuple(tuple(_cell(matrix, (row, at), lowest, (low, high)) for at in shown) for row in shown),
        row_name=matrix.noun,
        column_name=matrix.noun,
        legend=(
            PALER,
            *((f"{MARK}a {matrix.noun} that a finding names",) if matrix.blamed.intersection(shown) else ()),
            *not_shown(len(matrix.ends) - len(shown), matrix.noun),
        ),
    )
    return (grid,)


def _choose_ends(matrix: Matrix) -> list[int]:
    if len(matrix.ends) <= MAX_COLUMNS:
        return list(range(len(matrix.ends)))
    slowest: dict[int, float] = {}
    for pair, value in matrix.between.items():
        for at in pair:
            slowest[at] = min(value, slowest.get(at, math.inf))
    order = sorted(range(len(matrix.ends)), key=lambda at: slowest.get(at, math.inf))
    return sorted(order[:MAX_COLUMNS])


def _cell(
    matrix: Matrix, ends: tuple[int, int], lowest: tuple[int, int] | None, limits: tuple[float, float]
) -> GridCell:
    row, column = ends
    at = cell_key(row, column)
    if at not in matrix.cells:
        return GridCell(text="" if row == column else NOT_DEFINED)
    names = matrix.ends[row] if row == column else f"{matrix.ends[row]} - {matrix.ends[column]}"
    return GridCell(
        text=format_gb_s(matrix.cells[at]),
        tone=_tone(matrix, at) if at == lowest else Tone.PLAIN,
        about=f"{matrix.noun} {names}: {describe_result(matrix.results[at])}",
        level=None if row == column else log_level(matrix.cells[at], *limits),
    )


def _tone(matrix: Matrix, at: tuple[int, int]) -> Tone:
    """Return the tone of the slowest pair: a warning if a finding names one of its ends."""
    return Tone.WARNING if matrix.blamed.intersection(at) else Tone.STRONG
