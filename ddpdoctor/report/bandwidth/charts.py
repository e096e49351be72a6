"""The charts of a page: time and bus bandwidth over the size, with an earlier run and references to compare with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.report.bandwidth.plotted import list_plotted, list_references
from ddpdoctor.report.blocks import ChartLine, Heading, Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.bandwidth import Reference
    from ddpdoctor.report.bandwidth.plotted import Plotted
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.blocks import Section


def chart_sections(bench: Bandwidth) -> tuple[Section, ...]:
    """Return the charts of all series, or nothing if nothing was measured."""
    plotted = list_plotted(bench)
    if not plotted:
        return ()
    sizes = [size for line in plotted for size in line.sizes_bytes]
    busbw = [_line(one, one.busbw_gb_s) for one in plotted]
    references = [_level(one, sizes) for one in list_references(bench)]
    charts = (
        Series(title="Bus bandwidth, GB/s", lines=(*(line for line in busbw if line.points), *references)),
        Series(title="Time of a call, us", lines=tuple(_line(one, one.time_us) for one in plotted)),
    )
    return ((Heading(text="Curves over size"), *(chart for chart in charts if chart.lines)),)


def _line(plotted: Plotted, values: Iterable[float | None]) -> ChartLine:
    points = zip(plotted.sizes_bytes, values, strict=True)
    known = tuple((size, value) for size, value in points if value and math.isfinite(value))
    return ChartLine(name=plotted.label, points=known, is_reference=plotted.baseline)


def _level(reference: Reference, sizes: Sequence[int]) -> ChartLine:
    """Return a reference as a level from the least size for which it holds."""
    since = max(reference.min_size_bytes, min(sizes))
    points = ((since, reference.gb_s), (max([since, *sizes]), reference.gb_s))
    return ChartLine(name=reference.text, points=points, is_reference=True)
