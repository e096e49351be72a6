"""The measurements of `allreduce-bench` as formats use them: decoded, grouped into series, and written as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import (
    Advice,
    Arrival,
    BenchSettings,
    Comparison,
    Curve,
    Ending,
    LeftOut,
    Measurement,
    Member,
    Mode,
    NcclLog,
    NodeResult,
    Pair,
    Reason,
    Stop,
)
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.bandwidth import Change, Collective
    from ddpdoctor.model.findings import Report

VERB = "allreduce-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The data of a report of this command that the formats use."""

    settings: BenchSettings
    members: tuple[Member, ...]
    results: tuple[Measurement, ...]
    curves: tuple[Curve, ...]
    arrivals: tuple[Arrival, ...]
    pairs: tuple[Pair, ...]
    nodes: tuple[NodeResult, ...]
    left_out: tuple[LeftOut, ...]
    nccl_logs: tuple[NcclLog, ...]
    comparison: Comparison | None
    advice: Advice | None
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    stop: Stop | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, sorted by lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    @property
    def ending(self) -> Ending:
        """How the bench ended."""
        return Ending.FINISHED if self.stop is None else self.stop.ending


def read_bandwidth(report: Report) -> Bandwidth:
    """Decode the data of a report. Raises ``UserError`` if it is damaged or of another command."""
    if "results" not in report.data:
        raise UserError(f"this is not a report of `ddpdoctor {VERB}`", help="Only its runs have measured bandwidths.")
    try:
        return decode(Bandwidth, report.data)
    except WrongValue as error:
        raise UserError(
            f"the report cannot be read: data.{error}", help="The file is damaged: measure again."
        ) from error


NOT_DEFINED = "n/a"


def format_us(time_us: float) -> str:
    """Write microseconds as nccl-tests does: two decimals below 100, one below 10000, then none."""
    if not math.isfinite(time_us):
        return NOT_DEFINED
    return f"{time_us:.{2 if time_us < 100 else 1 if time_us < 10000 else 0}f}"


def format_gb_s(gb_s: float | None) -> str:
    """Write a bandwidth with two decimals as nccl-tests does, or four below 1. "n/a" means that there is none."""
    if gb_s is None or not math.isfinite(gb_s):
        return NOT_DEFINED
    return f"{gb_s:.{2 if gb_s >= 1 else 4}f}"


def format_share(share: float) -> str:
    """Write a share as a percentage: "3%", "0.4%"."""
    if not math.isfinite(share):
        return NOT_DEFINED
    percent = share * 100
    return f"{percent:.1f}%" if 0 < abs(percent) < 1 else f"{percent:.0f}%"


# Fields for programs. Their names and order never change. New fields are added at the end.
_RECORDED = (
    "collective", "dtype", "redop", "mode", "in_place", "size_bytes", "count", "iterations", "first_us", "min_us",
    "p50_us", "p95_us", "cv", "algbw_gb_s", "busbw_gb_s", "wrong",
)  # fmt: skip
RECORDED = (*_RECORDED, *(field.name for field in fields(Measurement) if field.name not in _RECORDED))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """One collective, dtype and place (in or out), over all its sizes and measured modes."""

    collective: Collective
    dtype: str
    redop: str | None
    in_place: bool
    rows: tuple[dict[Mode, Measurement], ...]  # by size, the smallest first

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
