"""Draws a matrix in a plot: numbers on shades of gray, with a frame around the slowest pair."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_rate
from ddpdoctor.report.lines import clean, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddpdoctor.report.bandwidth.matrix import Matrix

MAX_NUMBERS = 20
"""With more ends than this, numbers would overlap. Then only shades and the frame are drawn."""
TITLE_CHARACTERS = 62


def draw_matrix_panel(axes: Axes, matrix: Matrix) -> None:
    """Draw a matrix: the darker, the slower. Shades are logarithmic, because slow links are slower by factors."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    values = _fill(matrix)
    known = [value for row in values for value in row if math.isfinite(value)]
    axes.set_title("\n".join(wrap(matrix.title, TITLE_CHARACTERS)), fontsize=10)
    axes.grid(visible=False)
    if not known:
        return
    low, high = min(known), max(known)
    # With these limits, similar numbers get a similar light shade.
    norm = LogNorm(vmin=min(low, high / 10), vmax=high * 2)
    axes.imshow(values, cmap="Greys_r", norm=norm)
    count = len(matrix.ends)
    if count <= MAX_NUMBERS:
        _write_numbers(axes, values, norm)
    axes.set_xlabel("\n".join(wrap(_describe(matrix), TITLE_CHARACTERS)))
    for one, other in (matrix.lowest, matrix.lowest[::-1]) if matrix.lowest else ():
        axes.add_patch(Rectangle((one - 0.5, other - 0.5), 1, 1, fill=False, linewidth=2.5, edgecolor="#D55E00"))
    _name_ends(axes, matrix)


def _describe(matrix: Matrix) -> str:
    named = "; >: named by a finding" if matrix.blamed else ""
    if matrix.lowest is None:
        return f"the darker, the slower{named}"
    one, other = (clean(matrix.ends[at]) for at in matrix.lowest)
    return f"the darker, the slower; framed: {one} - {other}, {format_rate(matrix.cells[matrix.lowest])}{named}"


def _name_ends(axes: Axes, matrix: Matrix) -> None:
    """Label as many ends as fit."""
    step = math.ceil(len(matrix.ends) / MAX_NUMBERS)
    shown = range(0, len(matrix.ends), step)
    axes.set_yticks(shown, [f"{'> ' if at in matrix.blamed else ''}{clean(matrix.ends[at])}" for at in shown])
    axes.set_xticks(shown, [clean(matrix.heads[at]) for at in shown], rotation=0 if step == 1 else 90)


def _fill(matrix: Matrix) -> list[list[float]]:
    places = range(len(matrix.ends))
    return [[matrix.cells.get((min(row, at), max(row, at)), math.nan) for at in places] for row in places]


def _write_numbers(axes: Axes, values: list[list[float]], norm: object) -> None:
    size = 9 if len(values) <= 8 else 6.5 if len(values) <= 16 else 5.5
    for row, line in enumerate(values):
        for at, value in enumerate(line):
            if math.isfinite(value):
                dark = norm(value) < 0.5  # type: ignore[operator]
                color = "white" if dark else "black"
                axes.text(at, row, f"{value:.3g}", ha="center", va="center", color=color, fontsize=size)
