"""What was concluded from a measurement, read back from ``Report.data``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import (
    Advice,
    Change,
    Collective,
    Comparison,
    Curve,
    Fit,
    Mode,
    Reason,
    Reference,
    Standing,
)

if TYPE_CHECKING:
    from ddpdoctor.report.fields import Fields


def read_curve(curve: Fields) -> Curve:
    """Read a curve with its verdict."""
    return Curve(
        collective=curve.one_of("collective", Collective),
        dtype=curve.text("dtype"),
        redop=curve.optional_text("redop"),
        mode=curve.one_of("mode", Mode),
        in_place=curve.flag("in_place"),
        plateau_gb_s=curve.optional_real("plateau_gb_s"),
        plateau_spread=curve.optional_real("plateau_spread"),
        plateau_from_bytes=curve.optional_number("plateau_from_bytes"),
        latency_us=curve.optional_real("latency_us"),
        fit=_read_fit(fit) if (fit := curve.optional("fit")) else None,
        half_bytes=curve.optional_number("half_bytes"),
        standing=curve.one_of("standing", Standing),
        reference=_read_reference(reference) if (reference := curve.optional("reference")) else None,
        share=curve.optional_real("share"),
        verdict=curve.text("verdict"),
    )


def _read_fit(fit: Fields) -> Fit:
    return Fit(
        alpha_us=fit.real("alpha_us"),
        bandwidth_gb_s=fit.real("bandwidth_gb_s"),
        residual=fit.real("residual"),
        fits=fit.flag("fits"),
    )


def _read_reference(reference: Fields) -> Reference:
    return Reference(
        gb_s=reference.real("gb_s"),
        high_gb_s=reference.optional_real("high_gb_s"),
        text=reference.text("text"),
        source=reference.text("source"),
        min_size_bytes=reference.number("min_size_bytes"),
    )


def read_comparison(comparison: Fields) -> Comparison:
    """Read how a run compares with a saved one."""
    return Comparison(
        baseline=comparison.text("baseline"),
        differences=comparison.texts("differences"),
        changes=tuple(_read_change(change) for change in comparison.each("changes")),
        missing=comparison.number("missing"),
    )


def _read_change(change: Fields) -> Change:
    return Change(
        collective=change.one_of("collective", Collective),
        dtype=change.text("dtype"),
        redop=change.optional_text("redop"),
        mode=change.one_of("mode", Mode),
        in_place=change.flag("in_place"),
        size_bytes=change.number("size_bytes"),
        now_us=change.real("now_us"),
        then_us=change.real("then_us"),
        ratio=change.real("ratio"),
        ratio_low=change.real("ratio_low"),
        ratio_high=change.real("ratio_high"),
        below=change.flag("below"),
    )


def read_advice(advice: Fields) -> Advice:
    """Read what the curve means for DDP."""
    return Advice(
        model_bytes=advice.optional_number("model_bytes"),
        dtype=advice.text("dtype"),
        whole_ms=advice.optional_real("whole_ms"),
        bucket_mib=advice.real("bucket_mib"),
        bucket_share=advice.optional_real("bucket_share"),
        try_mib=advice.optional_number("try_mib"),
        gain_ms=advice.optional_real("gain_ms"),
        gain_low_ms=advice.optional_real("gain_low_ms"),
        gain_high_ms=advice.optional_real("gain_high_ms"),
        text=advice.texts("text"),
    )


def read_reason(reason: Fields) -> Reason:
    """Read what could explain a low number."""
    return Reason(
        text=reason.text("text"),
        source=reason.text("source"),
        hosts=reason.texts("hosts"),
        ranks=reason.numbers("ranks"),
        fix=reason.text("fix"),
    )
