"""DD406: the figures vary too much to answer the user's question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Assessment
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

from .compare import cannot_tell
from .words import name_case

if TYPE_CHECKING:
    from .measured import Measured

FIX = (
    "Measure longer (--budget 5m), with nothing else on the machines, fewer ranks than processors, and a fixed clock "
    "(cpupower frequency-set -g performance; nvidia-smi -lgc)."
)


@rule("DD406", "too-noisy", Severity.INFO, "The figures vary too much to be held to a reference or a saved run")
def check_noise(measured: Measured) -> Answer:
    """Report figures that vary too much to answer the question that the user asked.

    ## What it means

    It is unknown whether the bandwidth is as it should be, because the limit is inside the median's interval. This is
    not a fault of the network, and never a verdict. If a limit was required (`--expect`, `--fail-below`), the exit
    status is 4.

    ## How it is recognised

    Every case is timed many times. The interval of its median follows from the order of the times, whatever their
    distribution. The plateau's interval comes from those of its sizes, and the interval of a ratio to a saved run uses
    both runs. An interval from fewer than five calls is not trusted.

    ## What else looks like it

    A network that is shared with other jobs: the noise itself is then the finding.

    ## What to do

    Measure longer (`--budget 5m`), with nothing else running on the machines. With more ranks than processors, you
    measure the scheduler. Lock the clocks.
    """
    doubts = [
        f"{name_case(curve)} in {curve.mode.value} mode: {curve.verdict}"
        for curve in measured.curves
        if curve.standing is Assessment.NOISY
    ]
    if measured.comparison is not None and measured.fail_below is not None:
        noisy = sum(cannot_tell(change, measured.fail_below) for change in measured.comparison.changes)
        if noisy:
            doubts.append(f"{noisy} of {len(measured.comparison.changes)} sizes against {measured.comparison.baseline}")
    if not doubts:
        held = measured.comparison is not None or any(curve.reference is not None for curve in measured.curves)
        return judged((), "noise leaves no doubt") if held else skipped("the figures are held to nothing")
    return judged(
        [Problem(summary=f"Too noisy to say: {doubts[0]}", evidence=tuple(doubts), fix=FIX)], "; ".join(doubts)
    )
