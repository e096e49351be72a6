"""The content of `tune`: what each setting changes, and the one line to change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.tuning import TuneOutcome, TuneVerdict
from ddpdoctor.report.blocks import Column, Content, FactEntry, FactList, Heading, Table, Text, Tone
from ddpdoctor.report.findings import LABEL_WIDTH
from ddpdoctor.report.grids.tune import tune_pictures
from ddpdoctor.report.names import merge_places
from ddpdoctor.report.time_budget import ms
from ddpdoctor.report.verbs.job import job_content

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.tuning import RatioRange, TriedSetting, TuneResult
    from ddpdoctor.report.blocks import Section

RESTARTED = "by restarts: the job was launched again with this setting"


def tune_content(report: Report) -> Content:
    """Return the content of a trial. A job that hung or failed in it is shown as any such job."""
    outcome = decode(TuneOutcome, report.data["tune"])
    if outcome.result is not None:
        return _measured(report, outcome.result)
    if outcome.problem:
        return Content(headline=f"no result: {outcome.problem}", remarks=(outcome.help,))
    content = job_content(report)
    return Content(
        headline=content.headline,
        status=content.status,
        sections=(*content.sections, (Text(text=_tried(outcome)),)),
        ends_with_verdict=True,
        others=content.others,
        pictures=content.pictures,
    )


def _tried(outcome: TuneOutcome) -> str:
    if not outcome.trying:
        return "The trial had not begun: the script's own settings were in effect."
    return f"The trial has no result. In effect was: {outcome.trying} (round {outcome.round} of {outcome.rounds})."


def _measured(report: Report, result: TuneResult) -> Content:
    size = report.job.world_size if report.job is not None else None
    ranks = f", {count_of(size, 'rank')}" if size else ""
    return Content(
        headline=result.conclusion,
        verb="tune",
        sections=(_table_section(result, ranks), *_advice(result)),
        pictures=tune_pictures(result.rows),
    )


def _table_section(result: TuneResult, ranks: str) -> Section:
    title = f"settings tried in turns{ranks}, {count_of(result.rounds, 'round')}"
    own = f"A step of the script takes {ms(result.step_ms)}. What each setting makes of it (minus: shorter):"
    return (Heading(text=title), Text(text=own, indent=2), _table(result))


def _table(result: TuneResult) -> Table:
    rows = result.rows
    marks = {note: f"[{n}]" for n, note in enumerate(dict.fromkeys(note for row in rows for note in _notes(row)), 1)}
    reasons = [f"{row.title}: not measured: {row.reason}" for row in rows if row.reason]
    return Table(
        indent=2,
        columns=(
            Column(name="setting", cells=tuple(_name(row, marks) for row in rows), align="left"),
            Column(name="predicted", cells=tuple(_predicted(row.predicted) for row in rows), weight=2),
            Column(name="measured", cells=tuple(_change(row.measured) for row in rows)),
            Column(name="95% interval", cells=tuple(_interval(row.measured) for row in rows)),
            Column(name="rounds", cells=tuple(str(row.rounds) for row in rows), weight=1),
        ),
        tones={number: Tone.GOOD for number, row in enumerate(rows) if row.is_gain},
        legend=(*(f"{mark} {note}" for note, mark in marks.items()), *reasons),
    )


def _name(row: TriedSetting, marks: dict[str, str]) -> str:
    return " ".join((row.title, *(marks[note] for note in _notes(row))))


def _notes(row: TriedSetting) -> tuple[str, ...]:
    return tuple(note for note in (row.note, RESTARTED if row.by_restarts else "") if note)


def _predicted(span: RatioRange | None) -> str:
    if span is None:
        return "-"
    low, high = _percent(span.low), _percent(span.high)
    return low if low == high else f"{low} to {high}"


def _change(span: RatioRange | None) -> str:
    return "-" if span is None else _percent(span.ratio)


def _interval(span: RatioRange | None) -> str:
    return "-" if span is None else f"{_percent(span.low)} to {_percent(span.high)}"


def _percent(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"{round(percent):+d}%" if math.isfinite(percent) else "?"


def _advice(result: TuneResult) -> tuple[Section, ...]:
    if result.verdict is not TuneVerdict.CHANGE:
        return ()
    facts = (
        FactEntry(label="change", texts=(result.fix,), whole=True),
        FactEntry(label="where", texts=merge_places(result.where)),
    )
    return ((FactList(facts=facts, width=LABEL_WIDTH),),)
