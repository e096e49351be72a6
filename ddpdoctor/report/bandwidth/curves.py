"""Describes a curve in words: how good it is, its plateau, its latency and its fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about, format_rate, format_size, format_time
from ddpdoctor.model.bandwidth import Assessment, Mode
from ddpdoctor.report.bandwidth.numbers import format_share
from ddpdoctor.report.blocks import FactEntry, FactList, Tone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Curve, Fit
    from ddpdoctor.report.bandwidth.results import MeasuredCase

TONES = {
    Assessment.HEALTHY: Tone.GOOD,
    Assessment.BELOW: Tone.ERROR,
    Assessment.NOISY: Tone.WARNING,
    Assessment.NOT_REACHED: Tone.STRONG,
    Assessment.NO_REFERENCE: Tone.STRONG,
    Assessment.NOT_DEFINED: Tone.STRONG,
}
MODE_WIDTH = max(len(mode.value) for mode in Mode)


def pick_curves(curves: Sequence[Curve], series: MeasuredCase) -> tuple[Curve, ...]:
    """Return the curves of a series, latency first."""
    own = [curve for curve in curves if _key(curve) == _key(series)]
    return tuple(sorted(own, key=lambda curve: list(Mode).index(curve.mode)))


def curve_facts(curves: Sequence[Curve]) -> FactList:
    """Return the verdict of each curve, followed by the figures behind it."""
    facts = tuple(
        FactEntry(label=one.mode.value, texts=(one.verdict, *describe_curve(one)), tone=TONES[one.assessment])
        for one in curves
    )
    return FactList(facts=facts, width=MODE_WIDTH + 2)


def describe_curve(curve: Curve) -> list[str]:
    """Describe the figures of a curve in one or two lines."""
    small = [] if curve.latency_us is None else [f"{format_time(curve.latency_us)} at small sizes"]
    lines = [*_plateau(curve), *small]
    return [text for text in ("; ".join(lines), _fit(curve.fit)) if text]


def _plateau(curve: Curve) -> list[str]:
    if curve.plateau_gb_s is None:
        return []
    since = "" if curve.plateau_from_bytes is None else f" from {format_size(curve.plateau_from_bytes)} on"
    spread = "" if curve.plateau_spread is None else f" (spread {format_share(curve.plateau_spread)})"
    half = [] if curve.half_bytes is None else [f"half of it at {format_about(curve.half_bytes)}"]
    return [f"plateau {format_rate(curve.plateau_gb_s)}{since}{spread}", *half]


def _fit(fit: Fit | None) -> str:
    if fit is None:
        return ""
    residual = format_share(fit.residual)
    if not fit.fits:
        return f"t = a + S/B does not fit: it is off by {residual}"
    return f"t = {format_time(fit.alpha_us)} + S / {format_rate(fit.bandwidth_gb_s)} fits within {residual}"


def _key(one: Curve | MeasuredCase) -> tuple[object, ...]:
    return one.collective, one.dtype, one.redop, one.in_place
