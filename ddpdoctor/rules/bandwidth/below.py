"""DD405 and DD406: a bandwidth below what is required or normal, and figures that are too noisy to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Assessment, describe_shared_gpus
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.words import format_size, format_time
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.bandwidth.compare import cannot_tell
from ddpdoctor.rules.bandwidth.references import EXPECT
from ddpdoctor.rules.bandwidth.sweeps import name_case
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Change, Comparison, Curve
    from ddpdoctor.rules.bandwidth.curve import Measured

SHOWN = 6
"""How many sizes are named as evidence; the table has them all."""
MEASURE_MORE = "Measure more: --pairs and --by-node find a slow rank, link or host."
UNDECIDED = {Assessment.NOISY, Assessment.NOT_REACHED, Assessment.NOT_DEFINED}
FIX = (
    "Measure longer (--budget 5m), with no other jobs on the machines, fewer ranks than CPUs, and a fixed clock "
    "(cpupower frequency-set -g performance; nvidia-smi -lgc)."
)


@rule("DD405", "below-reference", Severity.WARNING, "The bandwidth is below the expected or usual value")
def check_below(measured: Measured) -> Answer:
    """Report a bandwidth below --expect, below a saved run, or below what the same hardware gives elsewhere."""
    problems = [_against_number(measured, curve) for curve in measured.curves if curve.assessment is Assessment.BELOW]
    comparison = measured.comparison
    if comparison is not None and measured.fail_below is not None:
        problems += _against_baseline(measured, comparison, measured.fail_below)
    doubts = [*_doubts_of_number(measured), *_doubts_of_baseline(measured)]
    if doubts and all(problem.severity is not Severity.ERROR for problem in problems):
        # The user's own requirement stays open, whatever else is found.
        return Answer(outcome=Outcome.INCONCLUSIVE, seen="; ".join(doubts), problems=tuple(problems))
    return (
        judged(problems, "; ".join(problem.summary for problem in problems)) if problems else _answer_healthy(measured)
    )


def _against_number(measured: Measured, curve: Curve) -> Problem:
    demanded = curve.reference is not None and curve.reference.source == EXPECT
    spread = (
        f"the sizes of the plateau differ by {curve.plateau_spread:.0%}" if curve.plateau_spread is not None else None
    )
    return Problem(
        summary=f"{name_case(curve)}: {curve.verdict}",
        evidence=tuple(one for one in (spread, *_reasons(measured)) if one),
        fix=_fix(measured),
        severity=Severity.ERROR if demanded else Severity.WARNING,
        confidence=_confidence(measured, curve),
    )


def _confidence(measured: Measured, curve: Curve) -> Confidence:
    """Return how sure it is that the figure is too low: the table does not know the network between hosts."""
    assert curve.reference is not None
    if curve.reference.source == EXPECT:
        return Confidence.HIGH
    one_host = len({member.host for member in measured.bench.members}) == 1
    return Confidence.HIGH if one_host and curve.reference.source.startswith("http") else Confidence.MEDIUM


def _against_baseline(measured: Measured, comparison: Comparison, fail_below: float) -> list[Problem]:
    below = [change for change in comparison.changes if change.below]
    if not below:
        return []
    worst = min(below, key=lambda change: change.ratio)
    more = f" {len(below) - 1} more of {len(comparison.changes)} sizes are below it." if len(below) > 1 else ""
    shown = [_change(change) for change in sorted(below, key=lambda change: change.ratio)[:SHOWN]]
    return [
        Problem(
            summary=f"{_change(worst)}: below --fail-below {fail_below:.0%} of {comparison.baseline}.{more}",
            evidence=(*shown, *comparison.differences, *_reasons(measured)),
            fix=_fix(measured),
            severity=Severity.ERROR,
        )
    ]


def _change(change: Change) -> str:
    return (
        f"{name_case(change)} {change.mode.value} of {format_size(change.size_bytes)} reaches {change.ratio:.0%} "
        f"({change.ratio_low:.0%}-{change.ratio_high:.0%}) of its earlier speed: {format_time(change.then_us)} then, "
        f"{format_time(change.now_us)} now"
    )


def _doubts_of_number(measured: Measured) -> list[str]:
    """Return why it is unknown whether a curve meets --expect."""
    if measured.expect_gb_s is None:
        return []
    if not measured.curves:
        return ["no measurement can be compared with --expect"]
    if shared := describe_shared_gpus(measured.bench.members):
        return [shared]
    held = [curve for curve in measured.curves if curve.assessment is not Assessment.NO_REFERENCE]
    return [f"{name_case(curve)}: {curve.verdict}" for curve in held if curve.assessment in UNDECIDED]


def _doubts_of_baseline(measured: Measured) -> list[str]:
    if measured.fail_below is None:
        return []
    comparison = measured.comparison
    if comparison is None or not comparison.changes:
        differences = "" if comparison is None else "".join(f" ({one})" for one in comparison.differences[:1])
        return [f"the baseline has no case in common with this run{differences}"]
    noisy = [change for change in comparison.changes if cannot_tell(change, measured.fail_below)]
    if not noisy:
        return []
    return [f"too noisy to judge {len(noisy)} of {len(comparison.changes)} sizes: {_change(noisy[-1])}"]


def _answer_healthy(measured: Measured) -> Answer:
    if measured.comparison is not None and measured.fail_below is not None:
        return judged(
            (), f"none of {len(measured.comparison.changes)} sizes is below {measured.fail_below:.0%} of the baseline"
        )
    healthy = [curve for curve in measured.curves if curve.assessment is Assessment.HEALTHY]
    if healthy:
        return judged((), "; ".join(f"{name_case(curve)}: {curve.verdict}" for curve in healthy))
    verdicts = dict.fromkeys(curve.verdict for curve in measured.curves)
    return skipped("; ".join(verdicts) or "nothing was measured")


def _reasons(measured: Measured) -> tuple[str, ...]:
    return tuple(f"{reason.text} [{reason.source}]" for reason in measured.reasons)


def _fix(measured: Measured) -> str:
    fixes = [reason.fix for reason in measured.reasons if reason.fix]
    return fixes[0] if fixes else MEASURE_MORE


@rule("DD406", "too-noisy", Severity.INFO, "The results vary too much to compare with a reference or a saved run")
def check_noise(measured: Measured) -> Answer:
    """Report figures that vary too much to answer the question that the user asked."""
    doubts = [
        f"{name_case(curve)} in {curve.mode.value} mode: {curve.verdict}"
        for curve in measured.curves
        if curve.assessment is Assessment.NOISY
    ]
    if measured.comparison is not None and measured.fail_below is not None:
        noisy = sum(cannot_tell(change, measured.fail_below) for change in measured.comparison.changes)
        if noisy:
            doubts.append(f"{noisy} of {len(measured.comparison.changes)} sizes against {measured.comparison.baseline}")
    if not doubts:
        held = measured.comparison is not None or any(curve.reference is not None for curve in measured.curves)
        return judged((), "the noise is low enough") if held else skipped("there is nothing to compare with")
    return judged(
        [Problem(summary=f"Too noisy to judge: {doubts[0]}", evidence=tuple(doubts), fix=FIX)], "; ".join(doubts)
    )
