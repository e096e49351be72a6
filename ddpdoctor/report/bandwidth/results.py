"""The table of measurements: one row per size, with latency and throughput side by side."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.bandwidth import Measurement, Mode
from ddpdoctor.report.bandwidth.numbers import NOT_DEFINED, format_gb_s, format_share, format_us
from ddpdoctor.report.blocks import Column, Records, Table, Tone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.model.bandwidth import Change, Collective, Curve

MISSING = "-"
"""Shown if this size was not measured in this mode."""
RECORDED = (
    "collective",
    "dtype",
    "redop",
    "mode",
    "in_place",
    "size_bytes",
    "count",
    "iterations",
    "first_us",
    "min_us",
    "p50_us",
    "p95_us",
    "cv",
    "algbw_gb_s",
    "busbw_gb_s",
    "wrong",
)
"""Fields for programs. Their names and order never change. New fields are added at the end."""


def make_records(results: Iterable[Measurement]) -> Records:
    """Return each measurement with all its fields."""
    names = (*RECORDED, *(field.name for field in fields(Measurement) if field.name not in RECORDED))
    return Records(names=names, rows=tuple(tuple(getattr(one, name) for name in names) for one in results))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """One collective, dtype and place (in or out), over all its sizes and measured modes."""

    collective: Collective
    dtype: str
    redop: str | None
    in_place: bool
    rows: tuple[dict[Mode, Measurement], ...]
    """By size, the smallest first."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes measured, latency first."""
        return tuple(mode for mode in Mode if any(mode in row for row in self.rows))


def sort_series(results: Iterable[Measurement]) -> tuple[MeasuredCase, ...]:
    """Group measurements into series, in the order of measurement."""
    series: dict[tuple[Collective, str, str | None, bool], dict[int, dict[Mode, Measurement]]] = {}
    for one in results:
        sizes = series.setdefault((one.collective, one.dtype, one.redop, one.in_place), {})
        sizes.setdefault(one.size_bytes, {})[one.mode] = one
    return tuple(
        MeasuredCase(
            collective=collective,
            dtype=dtype,
            redop=redop,
            in_place=in_place,
            rows=tuple(sizes[size] for size in sorted(sizes)),
        )
        for (collective, dtype, redop, in_place), sizes in series.items()
    )


def name_series(one: Measurement | Curve | Change | MeasuredCase) -> str:
    """Name a series without its mode: "all_reduce float32 sum"."""
    return " ".join(part for part in (one.collective.value, one.dtype, one.redop) if part)


def series_table(series: MeasuredCase) -> Table:
    """Return the table of a series. Rows with wrong results are highlighted."""
    wrong = [number for number, row in enumerate(series.rows) if any(one.wrong for one in row.values())]
    return Table(columns=list_columns(series), tones=dict.fromkeys(wrong, Tone.ERROR))


def list_columns(series: MeasuredCase) -> tuple[Column, ...]:
    """List all columns of a series. Their weights decide which are dropped if not all fit."""
    measured = [next(iter(row.values())) for row in series.rows]
    sizes = Column(name="size", cells=tuple(format_size(one.size_bytes) for one in measured), weight=100)
    counts = Column(name="count", unit="elements", cells=tuple(str(one.count) for one in measured), weight=5)
    wrong = Column(name="wrong", cells=tuple(_format_wrong(row.values()) for row in series.rows), weight=90)
    both = len(series.modes) > 1
    timed = [
        column
        for mode in series.modes
        for column in _list_timed(series.rows, mode, beside=both and mode is Mode.LATENCY)
    ]
    return (sizes, counts, *timed, wrong)


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str
    unit: str
    write: Callable[[Measurement], str]
    weight: int
    weight_beside: int
    """The weight of a latency column if throughput is shown too. Throughput's bandwidths matter more."""


_QUANTITIES = (
    _Quantity("calls", "", lambda one: str(one.iterations), 20, 20),
    _Quantity("first", "us", lambda one: format_us(one.first_us), 6, 15),
    _Quantity("min", "us", lambda one: format_us(one.min_us), 11, 60),
    _Quantity("p50", "us", lambda one: format_us(one.p50_us), 95, 95),
    _Quantity("p95", "us", lambda one: format_us(one.p95_us), 11, 60),
    _Quantity("cv", "", lambda one: format_share(one.cv), 50, 55),
    _Quantity("algbw", "GB/s", lambda one: format_gb_s(one.algbw_gb_s), 70, 2),
    _Quantity("busbw", "GB/s", lambda one: format_gb_s(one.busbw_gb_s), 92, 3),
)


def _list_timed(rows: Sequence[dict[Mode, Measurement]], mode: Mode, *, beside: bool) -> list[Column]:
    return [
        Column(
            group=mode.value,
            name=quantity.name,
            unit=quantity.unit,
            cells=tuple(quantity.write(row[mode]) if mode in row else MISSING for row in rows),
            weight=quantity.weight_beside if beside else quantity.weight,
        )
        for quantity in _QUANTITIES
    ]


def _format_wrong(row: Iterable[Measurement]) -> str:
    """Return the number of wrong elements, or "n/a" if unchecked. Both modes share one correctness pass."""
    known = [one.wrong for one in row if one.wrong is not None]
    return str(max(known)) if known else NOT_DEFINED
