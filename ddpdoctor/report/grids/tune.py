"""Grids of `tune`: what each setting makes of a step, and the factors of the scaling efficiency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import Grid, GridCell, Tone
from ddpdoctor.report.grids.build import linear_level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.scaling import ScalingRow
    from ddpdoctor.model.tuning import RatioRange, TriedSetting
    from ddpdoctor.report.blocks import Section


def tune_pictures(rows: Sequence[TriedSetting]) -> tuple[Section, ...]:
    """Return the grid of settings by predicted and measured change, or nothing if nothing was tried."""
    spans = [span for row in rows for span in (row.predicted, row.measured) if span is not None]
    if not spans:
        return ()
    most = max(abs(span.ratio - 1) for span in spans)
    grid = Grid(
        title="change of the step by setting (minus: shorter)",
        rows=tuple(row.title for row in rows),
        columns=("predicted", "measured"),
        cells=tuple((_change(row.predicted, "", most), _change(row.measured, row.reason, most)) for row in rows),
        row_name="setting",
        column_name="change",
        legend=("The darker, the larger the change.",),
    )
    return ((grid,),)


def _change(span: RatioRange | None, reason: str, most: float) -> GridCell:
    if span is None:
        return GridCell(text="-", tone=Tone.SKIPPED, about=reason)
    tone = Tone.GOOD if span.high < 1 else Tone.WARNING if span.low > 1 else Tone.PLAIN
    return GridCell(
        text=f"{span.ratio - 1:+.0%}",
        tone=tone,
        about=f"{span.low - 1:+.1%} to {span.high - 1:+.1%}",
        level=linear_level(abs(span.ratio - 1), most),
    )


def scaling_pictures(rows: Sequence[ScalingRow]) -> tuple[Section, ...]:
    """Return the grid of efficiencies and their factors by number of ranks."""
    heads = ("efficiency", "threads", "contention", "communication")
    grid = Grid(
        title="scaling efficiency and its factors",
        rows=tuple(str(row.ranks) for row in rows),
        columns=heads,
        cells=tuple(
            tuple(
                GridCell(text=f"{value:.2f}", about=f"{value:.1%}", level=linear_level(value, 1.0)) for value in values
            )
            for values in ((row.efficiency, row.threads, row.contention, row.communication) for row in rows)
        ),
        row_name="ranks",
        column_name="factor",
        legend=("The paler, the more is lost.",),
    )
    return ((grid,),)
