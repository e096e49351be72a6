"""The curves of a bench: plateau, latency, fit, and how each stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Curve

from .fit import fit_line, fit_of
from .plateau import find_latency, find_plateau
from .references import find_yardstick
from .series import size_at, sort_series
from .standing import judge

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench

    from .references import Yardstick
    from .series import Series


def build_curves(bench: Bench, expect_gb_s: float | None, *, use_reference: bool) -> tuple[Curve, ...]:
    """Return a curve for each collective, dtype, operator, mode and place that was measured."""
    all_series = sort_series(bench.results)
    return tuple(
        _curve(series, find_yardstick(bench, series, all_series, expect_gb_s, use_reference=use_reference))
        for series in all_series
    )


def _curve(series: Series, yardstick: Yardstick) -> Curve:
    plateau = find_plateau(series)
    verdict = judge(series, plateau, yardstick)
    return Curve(
        collective=series.collective,
        dtype=series.dtype,
        redop=series.redop,
        mode=series.mode,
        in_place=series.in_place,
        plateau_gb_s=plateau.gb_s if plateau else None,
        plateau_spread=plateau.spread if plateau else None,
        plateau_from_bytes=plateau.from_bytes if plateau else None,
        latency_us=find_latency(series),
        fit=fit_of(fit_line(series)),
        half_bytes=size_at(series, plateau.gb_s / 2) if plateau else None,
        standing=verdict.standing,
        reference=yardstick.reference,
        share=verdict.share,
        verdict=verdict.text,
    )
