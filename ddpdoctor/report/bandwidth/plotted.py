"""The data of a plot as plain numbers: lines over the size, with a reference and a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.report.bandwidth.results import sort_series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Change, Measurement, Mode, Reference
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.bandwidth.results import MeasuredCase

MAX_BOTH_MODES = 3
"""With more series than this, only one mode is drawn, because both would clutter the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plotted:
    """A line of a plot: times and bandwidths over sizes. A bandwidth may be None."""

    label: str
    mode: Mode
    baseline: bool
    sizes_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    low_us: tuple[float, ...]
    """The fastest call of each size; empty for a baseline."""
    high_us: tuple[float, ...]
    """The 95th percentile of each size; empty for a baseline."""
    busbw_gb_s: tuple[float | None, ...]


def list_plotted(bench: Bandwidth) -> tuple[Plotted, ...]:
    """List the lines of each series, throughput first. A baseline follows its line."""
    every = sort_series(bench.results)
    lines = [
        (series, mode)
        for series in every
        for mode in reversed(series.modes if len(every) <= MAX_BOTH_MODES else series.modes[-1:])
    ]
    names = _name_apart([(series.collective.value, series.dtype, mode.value) for series, mode in lines])
    return tuple(
        line
        for (series, mode), name in zip(lines, names, strict=True)
        for line in _list_lines(bench, series, mode, name)
    )


def _name_apart(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Name each line by the parts in which lines differ. A single line is named by its mode."""
    differing = [at for at, values in enumerate(zip(*lines, strict=True)) if len(set(values)) > 1] or [-1]
    return [" ".join(parts[at] for at in differing) for parts in lines]


def list_references(bench: Bandwidth) -> tuple[Reference, ...]:
    """List the references of the curves, each once."""
    return tuple(dict.fromkeys(curve.reference for curve in bench.curves if curve.reference is not None))


def _list_lines(bench: Bandwidth, series: MeasuredCase, mode: Mode, name: str) -> list[Plotted]:
    rows = [row[mode] for row in series.rows if mode in row]
    line = Plotted(
        label=name,
        mode=mode,
        baseline=False,
        sizes_bytes=tuple(row.size_bytes for row in rows),
        time_us=tuple(row.p50_us for row in rows),
        low_us=tuple(row.min_us for row in rows),
        high_us=tuple(row.p95_us for row in rows),
        busbw_gb_s=tuple(row.busbw_gb_s for row in rows),
    )
    changes = bench.comparison.changes if bench.comparison else ()
    then = _match(rows, changes)
    return [line, _make_baseline(name, mode, then)] if then else [line]


def _match(rows: Sequence[Measurement], changes: Sequence[Change]) -> list[tuple[Measurement, Change]]:
    known = {_key(change): change for change in changes}
    return [(row, known[_key(row)]) for row in rows if _key(row) in known]


def _make_baseline(name: str, mode: Mode, then: list[tuple[Measurement, Change]]) -> Plotted:
    """Make a baseline's line. For the same size and collective, bandwidth is proportional to 1 / time."""
    return Plotted(
        label=f"{name}, baseline",
        mode=mode,
        baseline=True,
        sizes_bytes=tuple(row.size_bytes for row, _ in then),
        time_us=tuple(change.then_us for _, change in then),
        low_us=(),
        high_us=(),
        busbw_gb_s=tuple(
            None if row.busbw_gb_s is None else row.busbw_gb_s * row.p50_us / change.then_us for row, change in then
        ),
    )


def _key(one: Measurement | Change) -> tuple[object, ...]:
    return one.collective, one.dtype, one.redop, one.mode, one.in_place, one.size_bytes
