"""The content of `diff`: what differs between two runs, the most telling first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.run_differences import RunDifferences, Topic
from ddpdoctor.report.blocks import Content, FactEntry, FactList, Heading, Records, Text, Tone, table_of

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.run_differences import ComparedRun
    from ddpdoctor.report.blocks import Section

HEADS = ("about", "what", "A", "B")
ABSENT = "-"
MAX_CELL = 48
"""Longer values are cut in the table. JSON and CSV have more of them."""


def run_diff_content(report: Report) -> Content:
    """Return the content of the differences between two runs."""
    found = decode(RunDifferences, report.data["run_differences"])
    return Content(
        headline=_headline(found),
        verb="diff",
        about=((FactList(facts=(_side("A", found.first), _side("B", found.second))),),),
        sections=(*_sections(found), *_unknown(found)),
        records=Records(
            names=("topic", "name", "first", "second"),
            rows=tuple((one.topic.value, one.name, one.first, one.second) for one in found.differences),
        ),
    )


def _headline(found: RunDifferences) -> str:
    """Name the difference that tells most. The verdicts themselves are what is to be explained."""
    causes = [one for one in found.differences if one.topic not in {Topic.VERDICT, Topic.PACE}]
    if not found.differences:
        topics = ", ".join(found.compared) or "nothing"
        return f"no difference found (compared: {topics})"
    if not causes:
        return f"the runs differ only in {' and '.join(dict.fromkeys(one.topic.value for one in found.differences))}"
    first = causes[0]
    more = f", and {count_of(len(causes) - 1, 'more difference')}" if len(causes) > 1 else ""
    return f"the runs differ in {first.name}: {_shown(first.first)} in A, {_shown(first.second)} in B{more}"


def _side(label: str, run: ComparedRun) -> FactEntry:
    return FactEntry(label=label, texts=(f"{run.name}: {run.ended}", *([run.command] if run.command else [])))


def _sections(found: RunDifferences) -> tuple[Section, ...]:
    if not found.differences:
        return ()
    rows = [(one.topic.value, one.name, _cut(one.first), _cut(one.second)) for one in found.differences]
    narrow = FactList(
        facts=tuple(
            FactEntry(
                label=one.topic.value, texts=(one.name, f"A: {one.first or ABSENT}", f"B: {one.second or ABSENT}")
            )
            for one in found.differences
        )
    )
    table = replace(table_of(HEADS, rows, left=4), instead=(narrow,))
    return ((Heading(text="differences, the most telling first"), table),)


def _unknown(found: RunDifferences) -> tuple[Section, ...]:
    if not found.not_compared:
        return ()
    return (
        (Text(text=f"not compared, because one run has no facts: {', '.join(found.not_compared)}", tone=Tone.SKIPPED),),
    )


def _shown(text: str) -> str:
    return _cut(text) or "not set"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"
