"""The content of `tune --scaling`: the efficiency that was measured, its factors, and what more ranks would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.scaling import LaunchKind, ScalingKind, ScalingResult
from ddpdoctor.report.blocks import Column, Content, Heading, Table, Text
from ddpdoctor.report.grids.tune import scaling_pictures
from ddpdoctor.report.time_budget import ms

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.scaling import ScalingLaunch, ScalingRow
    from ddpdoctor.report.blocks import Section

KINDS = {
    ScalingKind.WEAK: "weak (the batch of a rank stays)",
    ScalingKind.STRONG: "strong (the total batch stays)",
    ScalingKind.NEITHER: "neither weak nor strong: the batch changes",
    ScalingKind.UNKNOWN: "taken for weak: the batch was not recorded",
}
NOISE = 0.05
"""More noise than this is said. The same limit as for settings."""
FACTORS = (
    "Each efficiency is threads x contention x communication. Threads: one rank with a rank's own share of the cores, "
    "against one with all of them. Contention: all ranks at once without reductions. Communication: reductions and "
    "waiting, the only factor that DDP's settings change."
)


def scaling_content(report: Report) -> Content:
    """Return the content."""
    result = decode(ScalingResult, report.data["scaling"])
    alone = next((one for one in result.launches if one.kind is LaunchKind.ALONE), None)
    if not result.rows or alone is None:
        return Content(headline="no efficiency: a launch has no result")
    return Content(
        headline=_headline(result),
        verb="tune",
        sections=(_measured(result, alone), *_predicted(result)),
        remarks=result.notes,
        pictures=scaling_pictures(result.rows),
    )


def _headline(result: ScalingResult) -> str:
    last = result.rows[-1]
    kind = last.kind.value if last.kind in {ScalingKind.WEAK, ScalingKind.STRONG} else "scaling"
    text = f"{kind} efficiency {last.efficiency:.0%} with {count_of(last.ranks, 'rank')}"
    return f"{text}; communication and waiting alone: {last.communication:.0%}"


def _measured(result: ScalingResult, alone: ScalingLaunch) -> Section:
    rows = result.rows
    batch = "" if alone.rows is None else f", with a batch of {alone.rows:g}"
    first = f"One rank alone, with all cores, takes {ms(alone.step_ms)} a step{batch}."
    noise = max(row.noise for row in rows)
    said = [first, FACTORS, *_kinds(rows)]
    said += [f"Too noisy to compare: the same settings differ by up to {noise:.0%}."] if noise > NOISE else []
    table = Table(
        indent=2,
        columns=(
            Column(name="ranks", cells=tuple(str(row.ranks) for row in rows)),
            Column(name="step", unit="ms", cells=tuple(ms(row.step_ms).removesuffix(" ms") for row in rows)),
            Column(name="efficiency", cells=tuple(f"{row.efficiency:.0%}" for row in rows)),
            Column(name="threads", cells=tuple(f"{row.threads:.2f}" for row in rows)),
            Column(name="contention", cells=tuple(f"{row.contention:.2f}" for row in rows)),
            Column(name="communication", cells=tuple(f"{row.communication:.2f}" for row in rows)),
        ),
    )
    return (Heading(text="scaling efficiency (measured)"), *(Text(text=line, indent=2) for line in said), table)


def _kinds(rows: tuple[ScalingRow, ...]) -> list[str]:
    kinds = dict.fromkeys(row.kind for row in rows)
    return [f"This run is {KINDS[kind]}." for kind in kinds]


def _predicted(result: ScalingResult) -> tuple[Section, ...]:
    heading = Heading(text="more ranks (predicted)")
    if not result.predicted:
        return ((heading, Text(text=f"Not predicted: {result.reason}.", indent=2)),)
    sizes = result.predicted
    said = (
        f"Measured with at most {count_of(result.measured_ranks, 'rank')}. Each range is over a ring and a tree, on a "
        "network that is as fast for more hosts, with the same batch and the same cores for each rank. Waiting comes "
        f"from the spread of the ranks' own times, {result.spread:.1%} of the step."
    )
    table = Table(
        indent=2,
        columns=(
            Column(name="ranks", cells=tuple(f"{one.ranks:,}" for one in sizes)),
            Column(name="step", unit="ms", cells=tuple(_span(ms(one.low_ms), ms(one.high_ms)) for one in sizes)),
            Column(name="waiting", unit="ms", cells=tuple(ms(one.waiting_ms).removesuffix(" ms") for one in sizes)),
            Column(name="efficiency", cells=tuple(_span(f"{one.low:.0%}", f"{one.high:.0%}") for one in sizes)),
        ),
    )
    return ((heading, Text(text=said, indent=2), table),)


def _span(low: str, high: str) -> str:
    low, high = low.removesuffix(" ms"), high.removesuffix(" ms")
    return low if low == high else f"{low} to {high}"
