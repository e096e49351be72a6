"""The reports of `tune`: trials of settings, and how speed scales with ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.tuning import LaunchKind, ScalingKind, ScalingResult, TuneOutcome, TuneVerdict
from ddpdoctor.model.words import count_of
from ddpdoctor.report.blocks import (
    Content,
    FactEntry,
    FactList,
    Grid,
    GridCell,
    Heading,
    Text,
    Tone,
    linear_level,
    table_of,
)
from ddpdoctor.report.findings import LABEL_WIDTH
from ddpdoctor.report.lines import merge_places
from ddpdoctor.report.verbs.job import job_content
from ddpdoctor.report.verbs.speed import ms, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.tuning import RatioRange, TriedSetting, TuneResult
    from ddpdoctor.report.blocks import Block, Section, Table


def tune_pictures(rows: Sequence[TriedSetting]) -> Iterator[Grid]:
    """Yield the grid of settings by predicted and measured change, or nothing if nothing was tried."""
    spans = [span for row in rows for span in (row.predicted, row.measured) if span is not None]
    if not spans:
        return
    most = max(abs(span.ratio - 1) for span in spans)
    cells = tuple((_change_cell(row.predicted, "", most), _change_cell(row.measured, row.reason, most)) for row in rows)
    title, names = "change of the step by setting (minus: shorter)", tuple(row.title for row in rows)
    legend = ("The darker, the larger the change.",)
    yield Grid(title, names, ("predicted", "measured"), cells, "setting", "change", legend)


def _change_cell(span: RatioRange | None, reason: str, most: float) -> GridCell:
    if span is None:
        return GridCell("-", tone=Tone.SKIPPED, about=reason)
    tone = Tone.GOOD if span.high < 1 else Tone.WARNING if span.low > 1 else Tone.PLAIN
    about = f"{span.low - 1:+.1%} to {span.high - 1:+.1%}"
    level = linear_level(abs(span.ratio - 1), most)
    return GridCell(f"{span.ratio - 1:+.0%}", tone=tone, about=about, level=level)


KINDS = {
    ScalingKind.WEAK: "weak (the batch of a rank stays)",
    ScalingKind.STRONG: "strong (the total batch stays)",
    ScalingKind.NEITHER: "neither weak nor strong: the batch changes",
    ScalingKind.UNKNOWN: "taken for weak: the batch was not recorded",
}
NOISE = 0.05  # More noise than this is said. The same limit as for settings.
FACTORS = ("efficiency", "threads", "contention", "communication")
ABOUT_FACTORS = (
    "Each efficiency is threads x contention x communication. Threads: one rank with a rank's own share of the cores, "
    "against one with all of them. Contention: all ranks at once without reductions. Communication: reductions and "
    "waiting, the only factor that DDP's settings change."
)


def scaling_content(report: Report) -> Content:
    result = decode(ScalingResult, report.data["scaling"])
    alone = next((launch for launch in result.launches if launch.kind is LaunchKind.ALONE), None)
    if not result.rows or alone is None:
        return Content(headline="no efficiency: a launch has no result")
    last = result.rows[-1]
    kind = last.kind.value if last.kind in {ScalingKind.WEAK, ScalingKind.STRONG} else "scaling"
    text = f"{kind} efficiency {last.efficiency:.0%} with {count_of(last.ranks, 'rank')}"
    rows = result.rows
    batch = "" if alone.rows is None else f", with a batch of {alone.rows:g}"
    first = f"One rank alone, with all cores, takes {ms(alone.step_ms)} a step{batch}."
    noise = max(row.noise for row in rows)
    kinds = dict.fromkeys(row.kind for row in rows)
    said = [first, ABOUT_FACTORS, *[f"This run is {KINDS[kind]}." for kind in kinds]]
    said += [f"Too noisy to compare: the same settings differ by up to {noise:.0%}."] if noise > NOISE else []
    factors_of_rows = [(row.efficiency, row.threads, row.contention, row.communication) for row in rows]
    cells = [
        (str(row.ranks), number(row.step_ms), f"{factors[0]:.0%}", *(f"{factor:.2f}" for factor in factors[1:]))
        for row, factors in zip(rows, factors_of_rows, strict=True)
    ]
    table = table_of(("ranks", ("step", "ms"), *FACTORS), cells, left=0)
    shades = [
        tuple(GridCell(f"{f:.2f}", about=f"{f:.1%}", level=linear_level(f, 1.0)) for f in factors)
        for factors in factors_of_rows
    ]
    names, legend = tuple(str(row.ranks) for row in rows), ("The paler, the more is lost.",)
    picture = Grid("scaling efficiency and its factors", names, FACTORS, tuple(shades), "ranks", "factor", legend)
    predicted: list[Block] = [Heading("more ranks (predicted)"), Text(f"Not predicted: {result.reason}.", indent=2)]
    if result.predicted:
        spread = (
            f"Measured with at most {count_of(result.measured_ranks, 'rank')}. Each range is over a ring and a tree, "
            "on a network that is as fast for more hosts, with the same batch and the same cores for each rank. "
            f"Waiting comes from the spread of the ranks' own times, {result.spread:.1%} of the step."
        )
        sizes = []
        for size in result.predicted:
            step = " to ".join(dict.fromkeys((number(size.low_ms), number(size.high_ms))))
            efficiency = " to ".join(dict.fromkeys((f"{size.low:.0%}", f"{size.high:.0%}")))
            sizes.append((f"{size.ranks:,}", step, number(size.waiting_ms), efficiency))
        heads = ("ranks", ("step", "ms"), ("waiting", "ms"), "efficiency")
        predicted[1:] = [Text(spread, indent=2), table_of(heads, sizes, left=0)]
    return Content(
        headline=f"{text}; communication and waiting alone: {last.communication:.0%}",
        verb="tune",
        sections=(
            (Heading("scaling efficiency (measured)"), *(Text(line, indent=2) for line in said), table),
            tuple(predicted),
        ),
        remarks=result.notes,
        draw_pictures=lambda: (picture,),
    )


RESTARTED = "by restarts: the job was launched again with this setting"


def tune_content(report: Report) -> Content:
    """Return the content of a trial. A job that hung or failed in it is shown as any such job."""
    outcome = decode(TuneOutcome, report.data["tune"])
    if outcome.result is not None:
        result = outcome.result
        size = report.job.world_size if report.job is not None else None
        ranks = f", {count_of(size, 'rank')}" if size else ""
        title = f"settings tried in turns{ranks}, {count_of(result.rounds, 'round')}"
        own = f"A step of the script takes {ms(result.step_ms)}. What each setting makes of it (minus: shorter):"
        advice: tuple[Section, ...] = ()
        if result.verdict is TuneVerdict.CHANGE:
            change = FactEntry("change", (result.fix,), whole=True)
            where = FactEntry("where", merge_places(result.where))
            advice = ((FactList((change, where), width=LABEL_WIDTH),),)
        return Content(
            headline=result.conclusion,
            verb="tune",
            sections=((Heading(title), Text(own, indent=2), _table(result)), *advice),
            draw_pictures=lambda: tune_pictures(result.rows),
        )
    if outcome.problem:
        return Content(headline=f"no result: {outcome.problem}", remarks=(outcome.help,))
    content = job_content(report)
    if not outcome.trying:
        tried = "The trial had not begun: the script's own settings were in effect."
    else:
        tried = f"The trial has no result. In effect was: {outcome.trying} (round {outcome.round} of {outcome.rounds})."
    sections = (*content.sections, (Text(tried),))
    return replace(content, sections=sections, remarks=())


def _table(result: TuneResult) -> Table:
    cells = []
    marks: dict[str, str] = {}
    for row in result.rows:
        title = row.title
        for note in filter(None, (row.note, RESTARTED if row.by_restarts else "")):
            title += f" {marks.setdefault(note, f'[{len(marks) + 1}]')}"
        measured = "-" if row.measured is None else _percent(row.measured.ratio)
        cells.append((title, _range(row.predicted), measured, _range(row.measured, always=True), str(row.rounds)))
    reasons = [f"{row.title}: not measured: {row.reason}" for row in result.rows if row.reason]
    return table_of(
        ("setting", "predicted", "measured", "95% interval", "rounds"),
        cells,
        weights={"predicted": 2, "rounds": 1},
        tones={at: Tone.GOOD for at, row in enumerate(result.rows) if row.is_gain},
        legend=(*(f"{mark} {note}" for note, mark in marks.items()), *reasons),
    )


def _range(span: RatioRange | None, *, always: bool = False) -> str:
    """Return both ends of a range, or one if they are equal and it is not ``always`` both."""
    if span is None:
        return "-"
    low, high = _percent(span.low), _percent(span.high)
    return low if low == high and not always else f"{low} to {high}"


def _percent(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"{round(percent):+d}%" if math.isfinite(percent) else "?"
