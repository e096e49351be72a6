"""The last line on the screen: how it ended, and the one thing to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Ending, Mode, Standing
from ddpdoctor.model.findings import Outcome
from ddpdoctor.report.bandwidth.words import name_series
from ddpdoctor.report.findings import count_findings
from ddpdoctor.report.page import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.model.bandwidth import Curve
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.reading import Bandwidth

WORDS = {
    Standing.BELOW: "below the reference",
    Standing.NOISY: "too noisy to say",
    Standing.HEALTHY: "healthy",
    Standing.NO_REFERENCE: "without a reference",
    Standing.NOT_REACHED: "short of the plateau",
    Standing.NOT_DEFINED: "n/a",
}
"""In the order in which they are counted."""


def closing_line(report: Report, bench: Bandwidth, run_dir: Path | None) -> str:
    """Write the line: "ddpdoctor: 8 ranks: 1 warning: SUMMARY; report in DIR"."""
    where = "" if run_dir is None else f"; report in {run_dir}"
    return f"ddpdoctor: {plural(len(bench.members), 'rank')}, {headline(report, bench)}{where}"


def headline(report: Report, bench: Bandwidth) -> str:
    """Say how it ended, then the verdict; without one, how good the curves are."""
    ended = [] if bench.ending is Ending.FINISHED else [f"{bench.ending.value}, results partial"]
    if report.verdict is not None:
        found = count_findings(report.findings)
        return ", ".join([*ended, found]) + f": {_sentence(report.verdict.summary)}"
    if not bench.results:
        return ", ".join([*ended, "nothing was measured"])
    notes = [found] if (found := count_findings(report.findings)) else []
    return ", ".join([*ended, _nothing_found(report, bench), *notes]) + describe_standing(bench.curves)


def _nothing_found(report: Report, bench: Bandwidth) -> str:
    """Say that there is no verdict; what could not be told must not read like "no problem found"."""
    if bench.ending is not Ending.FINISHED:
        return "no cause found"
    untold = [check.id for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    return f"could not tell about {', '.join(untold)}" if untold else "no problem found"


def describe_standing(curves: Sequence[Curve]) -> str:
    """Say how good the curves are: the verdict of the only one, or a count."""
    chosen = _choose(curves)
    if not chosen:
        return ""
    if len(chosen) == 1:
        return f": {name_series(chosen[0])}: {_sentence(chosen[0].verdict)}"
    standings = [curve.standing for curve in chosen]
    if len(set(standings)) == 1:
        return f"; all {len(chosen)} curves {WORDS[standings[0]]}"
    counts = [f"{standings.count(standing)} {word}" for standing, word in WORDS.items() if standing in standings]
    return f"; of {len(chosen)} curves {', '.join(counts)}"


def _choose(curves: Sequence[Curve]) -> list[Curve]:
    """Of a series measured in both modes, take throughput: that is what references are of."""
    chosen: dict[tuple[object, ...], Curve] = {}
    for curve in curves:
        key = (curve.collective, curve.dtype, curve.redop, curve.in_place)
        if key not in chosen or curve.mode is Mode.THROUGHPUT:
            chosen[key] = curve
    return list(chosen.values())


def _sentence(text: str) -> str:
    return text.removesuffix(".")
