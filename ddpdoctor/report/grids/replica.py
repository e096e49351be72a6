"""Grids of the tensors that differ between ranks."""

from __future__ import annotations

from string import ascii_uppercase
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.consistency import Consistency, StreamClock, What
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.sides import majority_of
from ddpdoctor.report.blocks import GridCell, Tone
from ddpdoctor.report.findings import TONES
from ddpdoctor.report.grids.build import MAX_ROWS, grid_by_member, not_shown
from ddpdoctor.report.names import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.model.consistency import Difference, Stream, TensorSplit
    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.blocks import Grid, Section
    from ddpdoctor.report.grids.build import Row

FAMILY = "DD50"
"""The codes of findings about replicas begin with it."""
NOUNS = {
    What.PARAMETER: "parameters",
    What.GRADIENT: "gradients",
    What.BUFFER: "buffers",
    What.STATE: "optimizer state",
}
SAME_LETTER = "Equal letters: equal contents. Most have A."
EQUAL = "equal"
OTHER = "other"


def replica_pictures(report: Report) -> tuple[Section, ...]:
    """Return a grid for each model whose replicas differ. Nothing if the report lacks it, or is damaged there."""
    plain = report.data.get("consistency")
    try:
        consistency = None if plain is None else decode(Consistency, plain)
    except WrongValue:
        return ()
    return consistency_pictures(consistency, report.findings)


def consistency_pictures(consistency: Consistency | None, findings: Iterable[Finding]) -> tuple[Section, ...]:
    """Return a grid of tensors by ranks for each stream of records in which tensors differ."""
    streams = () if consistency is None else consistency.streams
    tone = tone_of(findings)
    several = len({(one.group, one.model) for one in streams}) > 1
    return tuple(
        (_grid(one, tone, several=several),) for one in streams if any(each.splits for each in one.differences)
    )


def tone_of(findings: Iterable[Finding]) -> Tone:
    """Return the tone of a tensor that differs: that of the worst finding about replicas, or a note without one."""
    severities = [one.severity for one in findings if one.code.startswith(FAMILY)]
    return TONES[min(severities, key=lambda one: one.order, default=Severity.INFO)]


def letter(side: int) -> str:
    """Return the letter of a set of equal contents: A for the largest set. Beyond Z, a word stands for all others."""
    return ascii_uppercase[side] if side < len(ascii_uppercase) else OTHER


def _grid(stream: Stream, tone: Tone, *, several: bool) -> Grid:
    splits = [(each, split) for each in stream.differences for split in each.splits][:MAX_ROWS]
    rows = [_row(stream, each, split, tone) for each, split in splits]
    ranks = sorted({*stream.ranks, *(rank for _, cells in rows for rank in cells)})
    hidden = sum(each.differing for each in stream.differences) - len(splits)
    points = "at the end" if stream.clock is StreamClock.END else f"at each {stream.clock.value}"
    model = f", model {stream.model}" if several and stream.model > 0 else ""
    outside = ", parameters outside DDP" if stream.model < 0 else ""
    return grid_by_member(
        f"replicas that differ, compared {points}{model}{outside}",
        [*rows, *_equal_rows(stream, ranks)],
        ranks,
        format_ranks,
        axes=("tensor", "rank"),
        legend=(SAME_LETTER, *not_shown(hidden, "differing tensor")),
    )


def _row(stream: Stream, difference: Difference, split: TensorSplit, tone: Tone) -> Row:
    one = split.row
    name = " ".join(part for part in (one.name, one.part) if part)
    return f"{name} ({one.what.value}), {_when(stream, difference)}", _cells(split, tone)


def _when(stream: Stream, difference: Difference) -> str:
    if stream.clock is StreamClock.END:
        return "at the end"
    return f"from {'step' if stream.clock is StreamClock.STEP else 'backward'} {difference.number} on"


def _cells(split: TensorSplit, tone: Tone) -> Mapping[int, GridCell]:
    most, absent = majority_of(split.sides), frozenset(split.absent_on)
    others = [rank for side in split.sides[len(ascii_uppercase) :] for rank in side]
    cells = dict.fromkeys(others, GridCell(text=OTHER, tone=tone, about="unlike those with a letter"))
    for number, side in enumerate(split.sides[: len(ascii_uppercase)]):
        lacks = bool(absent) and absent.issuperset(side)
        cell = GridCell(
            text="none" if lacks else letter(number),
            tone=Tone.PLAIN if side is most else tone,
            about=f"{'not there' if lacks else 'equal'} on {format_ranks(side)}",
        )
        cells.update(dict.fromkeys(side, cell))
    return cells


def _equal_rows(stream: Stream, ranks: Iterable[int]) -> Iterator[Row]:
    """Yield a row for each kind of tensors, for those that are equal on all ranks."""
    differences = {one.what: one for one in stream.differences}
    for what in stream.kinds:
        difference = differences.get(what)
        others = None if difference is None else difference.of - difference.differing
        if others is None or others > 0:
            label = f"all {NOUNS[what]}" if others is None else f"{count_of(others, 'other')} ({NOUNS[what]})"
            yield label, dict.fromkeys(ranks, GridCell(text=EQUAL, tone=Tone.GOOD))
