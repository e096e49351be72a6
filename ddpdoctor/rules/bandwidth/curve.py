"""The curves of a bench: plateau, latency, fit, and how each compares with its reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Assessment, Curve
from ddpdoctor.model.words import format_rate, format_size
from ddpdoctor.rules.bandwidth.references import EXPECT, find_yardstick
from ddpdoctor.rules.bandwidth.shape import describe_end, find_latency, find_plateau, fit_line, fit_of, levels_of
from ddpdoctor.rules.bandwidth.sweeps import range_words, share_words, size_at, sort_sweeps, time_bounds

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench, Comparison, Reason, Reference
    from ddpdoctor.rules.bandwidth.references import Yardstick
    from ddpdoctor.rules.bandwidth.shape import Level, Plateau
    from ddpdoctor.rules.bandwidth.sweeps import Sweep

FAR = 4.0
"""Without a plateau, a curve is too low only if even this many times the bandwidth of its last step in size is too low.
Our choice: a disturbed step may have half of the bandwidth it should have."""
MOST_GB_S = 100.0
"""If larger sizes use the same path (Gloo, through the kernel's TCP), they do not get faster than this either. Our
choice: the fastest network card carries 800 Gbit/s, and processors copy less over loopback."""
LEAST_SHARE = 0.01
"""The smallest share of a reference that is shown; a smaller one would read as "100% below"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A bench with its curves.

    A check without an answer is skipped if the user did not ask for it, and inconclusive if the user did.
    """

    bench: Bench
    curves: tuple[Curve, ...] = ()
    comparison: Comparison | None = None
    reasons: tuple[Reason, ...] = ()
    """What could explain a low number."""
    expect_gb_s: float | None = None
    """--expect: the bus bandwidth that the user demands at the plateau."""
    fail_below: float | None = None
    """--fail-below as a share (0.9): every size must reach it against the baseline. None if not required."""


def build_curves(bench: Bench, expect_gb_s: float | None, *, use_reference: bool) -> tuple[Curve, ...]:
    """Return a curve for each collective, dtype, operator, mode and place that was measured."""
    all_sweeps = sort_sweeps(bench.results)
    return tuple(
        _curve(sweep, find_yardstick(bench, sweep, all_sweeps, expect_gb_s, use_reference=use_reference))
        for sweep in all_sweeps
    )


def _curve(sweep: Sweep, yardstick: Yardstick) -> Curve:
    plateau = find_plateau(sweep)
    verdict = judge(sweep, plateau, yardstick)
    return Curve(
        collective=sweep.first.collective,
        dtype=sweep.first.dtype,
        redop=sweep.first.redop,
        mode=sweep.first.mode,
        in_place=sweep.first.in_place,
        plateau_gb_s=plateau.gb_s if plateau else None,
        plateau_spread=plateau.spread if plateau else None,
        plateau_from_bytes=plateau.from_bytes if plateau else None,
        latency_us=find_latency(sweep),
        fit=fit_of(fit_line(sweep)),
        half_bytes=size_at(sweep, plateau.gb_s / 2) if plateau else None,
        assessment=verdict.assessment,
        reference=yardstick.reference,
        share=verdict.share,
        verdict=verdict.text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveVerdict:
    """The assessment of a curve, its share of the reference, and one sentence."""

    assessment: Assessment
    share: float | None
    text: str


def judge(sweep: Sweep, plateau: Plateau | None, yardstick: Yardstick) -> CurveVerdict:
    """Compare a curve with its reference."""
    levels = levels_of(sweep)
    if not levels:
        return CurveVerdict(
            assessment=Assessment.NOT_DEFINED, share=None, text="n/a: with one rank, no data crosses a link."
        )
    reference = yardstick.reference
    if reference is None:
        return CurveVerdict(
            assessment=Assessment.NO_REFERENCE, share=None, text=f"{_seen(sweep, plateau)}; {yardstick.note}."
        )
    if plateau is None or plateau.to_bytes < reference.min_size_bytes:
        return _judge_short(sweep, levels, plateau, yardstick, reference)
    return _judge_plateau(plateau, yardstick, reference)


def _judge_plateau(plateau: Plateau, yardstick: Yardstick, reference: Reference) -> CurveVerdict:
    share = plateau.gb_s / reference.gb_s
    seen = f"{format_rate(plateau.gb_s)} from {format_size(plateau.from_bytes)} on"
    if plateau.high_gb_s < yardstick.least_gb_s:
        return CurveVerdict(
            assessment=Assessment.BELOW, share=share, text=f"{seen}: {_below(share, yardstick, reference)}."
        )
    if plateau.low_gb_s >= yardstick.least_gb_s:
        return CurveVerdict(
            assessment=Assessment.HEALTHY, share=share, text=f"{seen}: healthy, {_of(share, reference)}."
        )
    interval = range_words(plateau.low_gb_s, plateau.high_gb_s)
    text = (
        f"Too noisy to judge: {interval} from {format_size(plateau.from_bytes)} on, compared with {_least(yardstick)}."
    )
    return CurveVerdict(assessment=Assessment.NOISY, share=share, text=text)


def _judge_short(
    sweep: Sweep, levels: tuple[Level, ...], plateau: Plateau | None, yardstick: Yardstick, reference: Reference
) -> CurveVerdict:
    """Judge a sweep that ends below the sizes for which the reference holds. It may be fast enough already."""
    last = levels[-1]
    share = last.gb_s / reference.gb_s
    seen = f"{format_rate(last.gb_s)} at {format_size(last.size_bytes)}"
    if last.low >= yardstick.least_gb_s:
        return CurveVerdict(
            assessment=Assessment.HEALTHY, share=share, text=f"{seen}: healthy, {_of(share, reference)}."
        )
    reachable = _ceiling(sweep) if yardstick.steady else math.inf
    if max(reachable, *(level.high for level in levels)) < yardstick.least_gb_s:
        return CurveVerdict(
            assessment=Assessment.BELOW, share=share, text=f"{seen}: {_below(share, yardstick, reference)}."
        )
    why = describe_end(sweep)
    if plateau is not None:
        why = f"the reference applies from {format_size(reference.min_size_bytes)} on"
    return CurveVerdict(assessment=Assessment.NOT_REACHED, share=None, text=f"No plateau reached: {seen}, and {why}.")


def _ceiling(sweep: Sweep) -> float:
    """Return the most that larger sizes can reach, in GB/s, from the bandwidth of the last step in size.

    That is the limit of t = alpha + S/B. If the two times overlap, they give no limit.
    """
    before, last = sweep.points[-2:] if len(sweep.points) > 1 else (None, sweep.points[-1])
    if before is None or last.busbw_gb_s is None:
        return MOST_GB_S
    step_us = time_bounds(last)[0] - time_bounds(before)[1]
    if step_us <= 0:
        return MOST_GB_S
    factor = last.busbw_gb_s * last.p50_us / last.size_bytes
    return min(MOST_GB_S, FAR * factor * (last.size_bytes - before.size_bytes) / step_us)


def _seen(sweep: Sweep, plateau: Plateau | None) -> str:
    if plateau is not None:
        return f"{format_rate(plateau.gb_s)} from {format_size(plateau.from_bytes)} on"
    last = levels_of(sweep)[-1]
    return f"{format_rate(last.gb_s)} at {format_size(last.size_bytes)}, no plateau ({describe_end(sweep)})"


def _of(share: float, reference: Reference) -> str:
    return f"{share_words(share)} {_name(reference)}"


def _below(share: float, yardstick: Yardstick, reference: Reference) -> str:
    source = "" if reference.source == EXPECT else f" [{reference.source}]"
    note = f"; {yardstick.note}" if yardstick.note else ""
    how_far = f"{1 - share:.0%} below" if share >= LEAST_SHARE else f"less than {LEAST_SHARE:.0%} of"
    return f"{how_far} {_name(reference)}{source}{note}"


def _name(reference: Reference) -> str:
    figure = range_words(reference.gb_s, reference.high_gb_s)
    return f"{EXPECT} {figure}" if reference.source == EXPECT else f"the reference ({reference.text}: {figure})"


def _least(yardstick: Yardstick) -> str:
    assert yardstick.reference is not None
    if yardstick.margin == 0:
        return _name(yardstick.reference)
    return f"{format_rate(yardstick.least_gb_s)}, {yardstick.margin:.0%} below {_name(yardstick.reference)}"
